"""Watches the forwards and backwards of graphs, and runs those together that are live together.

A step lasts from a forward before which nothing was live until nothing is live any more. The first
one is watched (``driver/step_watch.py``). What was seen is planned as a joint step when its last
half has run (CPU), or before the next one begins. A forward of a later step is a member of that
plan, where it has a place for it; else it runs by its graph's own plan, in ordinary memory, if the
budget allows, and is counted. Steps of another kind that come again are planned anew.
"""

import collections
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from memo_runtime.leases import leases

from memo_compile.driver.around import apart, fixed_beside, has_fsdp_modules
from memo_compile.driver.assumed import assumed_of
from memo_compile.driver.checkpoints import CheckpointRound
from memo_compile.driver.declared import Stages, declared_around
from memo_compile.driver.early_gradients import own_leaves
from memo_compile.driver.facts import allocated_bytes, gradient_bytes
from memo_compile.driver.joint_plan import JointMembers, JointStepPlan, joint_request
from memo_compile.driver.separate_parts import are_alike, fit_separately
from memo_compile.driver.step_watch import StepWatch, alive_values, first_key, key_of
from memo_compile.errors import Infeasible, MemoError, without_frames
from memo_compile.reporting import state
from memo_compile.step.problem import FixedBytes
from memo_compile.torch_private import autograd

if TYPE_CHECKING:
    from memo_compile.driver.part import StepPart

FIRST_STEP = (
    "forwards are live together that are not planned together yet (modules that share a graph, "
    "microbatches of a pipeline, modules that a checkpoint runs again, graphs that graph breaks or "
    "DistributedDataParallel's buckets cut apart): in their first step, which is watched, each "
    "keeps memory_budget by itself or runs in ordinary memory, and their sum may exceed it; from "
    "the next on they are planned as one step. memo_compile.group(modules) plans modules that "
    "share a graph from the first step on"
)

OTHER_ORDER = (
    "the graphs of a step came in another order than planned, and were refused: the next step is "
    "watched, in which each keeps memory_budget by itself and their sum may exceed it, and planned "
    "anew"
)

NOT_YET = (
    "no plan fits memory_budget after what was measured in the first step of a pipeline's rank, "
    "where torch also makes what it makes once: the next one is watched as well, and may exceed it"
)

NO_ORDER = (
    "several graphs of one step are live together, and their backwards do not come in the opposite "
    "order of their forwards, or they were compiled with different options: they are not planned "
    "as one step, and memory_budget bounds each of them, not their sum"
)

MAX_WATCHED = 3
"""After so many steps that gave no plan nobody looks at memory between the halves, which costs a
whole graph a tenth of its time: what is planned later is planned without it first. So many steps
of a pipeline may have fewer forwards than was declared, because torch finds out shapes by them."""

MAX_UNPLANNABLE = 2
"""After so many steps in a row of an order that no plan has, nobody looks for the model around the
forwards, which takes as long as a small step, until an order comes that can be planned."""

PERSISTS = 2
"""So many steps in a row that the plan does not serve are planned for."""

PIPELINE_LOOKS = 2
"""A pipeline's step is refused after what was measured in so many; the last one counts."""


class Entry(NamedTuple):
    """A half that has begun, as the watcher saw it."""

    watch: StepWatch
    number: int
    """Which forward of the step it is, or whose backward."""
    runs: Callable[[list[Any]], list[Any]] | None = None
    """Runs a forward that is a member of a joint step; None: it is none."""
    is_watched: bool = False
    """The forward is no member yet, and may turn out to be one."""


@dataclass(slots=True, eq=False)
class JointSteps:
    """The step that runs now of some graphs, what was seen of it, and the plans of joint steps."""

    is_of_all: bool = False
    """Sees all graphs of the process, and leaves steps of one graph to that graph's watcher."""
    plans: "dict[StepPart, JointStepPlan]" = field(default_factory=dict)
    """The plan that a graph's forwards are members of."""
    _parts: "weakref.WeakSet[StepPart]" = field(default_factory=weakref.WeakSet)
    _changes: "collections.deque[tuple[StepPart, bool]]" = field(default_factory=collections.deque)
    """Graphs that were compiled (True) or are gone, and that the step does not know of yet."""
    _watch: StepWatch | None = None
    """Sees the step that runs."""
    _before: StepWatch | None = None
    """Has seen the last step."""
    _halves: dict[int, Entry] = field(default_factory=dict)
    """Number of a lease -> its forward."""
    _unlearned: "dict[tuple[StepPart, ...], StepWatch]" = field(default_factory=dict)
    """Steps that were watched, by their forwards, until a graph of theirs begins the next one."""
    _round: CheckpointRound = field(default_factory=CheckpointRound)
    """What the user's checkpoints run again."""
    _refused: JointStepPlan | None = None
    """The plan that had no place for the last forward, and no room beside it."""
    _num_watched: int = 0
    """Steps that were watched since the last plan was made, or the last graph compiled."""
    _num_unplannable: int = 0
    """So many steps in a row several forwards were live together in an order that no plan has."""
    _is_part: bool = False
    """The other watcher has planned this graph with others."""
    _waiting_bytes: int = 0
    """Gradients of the last step that were there when the next one began."""
    _ran: "weakref.WeakSet[StepPart]" = field(default_factory=weakref.WeakSet)
    """Graphs of which a step has ended."""
    _apart: "weakref.WeakSet[StepPart]" = field(default_factory=weakref.WeakSet)
    """Graphs of which it was said that nothing bounds the sum of them and of others."""
    _lock: threading.RLock = field(default_factory=threading.RLock)
    """Held while a half begins or ends and while a joint step is planned, not while it runs."""

    def add(self, part: "StepPart") -> None:
        """Takes over a graph that was compiled, without counting the compilation's memory.

        Ends forwards that nobody can run backward any more: who catches a refusal tries again.
        """
        if self._any_live():
            autograd.free_stopped_backward()
            gc.collect()
        for other in list(self._parts):
            if other.assembly.step.heap is not None:
                other.assembly.step.heap.pause()
        self._changes.append((part, True))
        self._take_changes()

    def remove(self, part: "StepPart") -> None:
        """Forgets a graph of which no step will run any more."""
        self._changes.append((part, False))
        self._take_changes()

    def _take_changes(self) -> None:
        """Processes ``_changes`` now, or if the lock is taken when the next half begins.

        The lock is only tried: the caller may hold Dynamo's, for which a thread that plans waits.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            while self._changes:
                part, is_new = self._changes.popleft()
                if is_new:
                    self._add_now(part)
                else:
                    self._remove_now(part)
        finally:
            self._lock.release()

    def _add_now(self, part: "StepPart") -> None:
        self._parts.add(part)
        self._num_watched = self._num_unplannable = 0
        if self._watch is not None:
            self._watch.forget_memory()

    def _remove_now(self, part: "StepPart") -> None:
        """Forgets ``part``, the step that runs of it, and its plan."""
        self._parts.discard(part)
        self._unlearned = {key: seen for key, seen in self._unlearned.items() if part not in key}
        if self._watch is not None and part in self._watch.parts:
            self._watch.stop()
            self._watch = None
        if part in self.plans:
            self._drop(self.plans[part])

    def begin_forward(self, part: "StepPart", args: Sequence[Any], stages: Stages) -> Entry:
        """Notes that a forward of ``part`` is about to run on ``args``, and says by which plan.

        Raises Infeasible: no plan fits.
        """
        with self._lock:
            self._take_changes()
            leaves = own_leaves(args)
            watch, number = self._enter(part, leaves, stages)
            plan, member = self._member(part, watch, number)
            if plan is not None and member is None and number:  # stopped steps may have the places
                autograd.free_stopped_backward()
                leases.end_refused()
                if not self._any_live():
                    watch, number = self._enter(part, leaves, stages)
                    plan, member = self._member(part, watch, number)
            if plan is None or member is None:
                is_watched = self._leave_alone(part, watch, plan)
                return Entry(watch, number, is_watched=is_watched)
            dropped, num_dropped = self._round.dropped, plan.members.num_dropped
            runs = plan.begin_forward(
                member,
                follows=num_dropped > 0 and self._round.is_open(in_backward=watch.in_backward),
                stays=watch.in_backward or len(dropped) + 1 < num_dropped,
            )
            return Entry(watch, number, runs)

    def end_forward(self, part: "StepPart", entry: Entry, results: Sequence[Any]) -> None:
        """Notes that a forward has returned ``results``."""
        half = part.assembly.lowered.problem.halves[0]
        lease = leases.find(results[half.results.index(half.handle)])
        with self._lock:
            if lease is not None:
                self._halves[lease.number] = entry
                entry.watch.lease = lease.number
            entry.watch.end((False, entry.number), results)

    def begin_backward(self, lease: int | None, args: Sequence[Any]) -> Entry | None:
        """Notes that a backward is about to run on ``args``; None: it is of no watched step."""
        with self._lock:
            self._take_changes()
            entry = None if lease is None else self._halves.get(lease)
            if entry is None or entry.watch is not self._watch:
                return None
            entry.watch.begin((True, entry.number), args)
            return entry

    def end_backward(self, entry: Entry | None, results: Sequence[Any]) -> None:
        """Notes that the backward has returned ``results``, and plans if the step is over."""
        if entry is not None:
            with self._lock:
                entry.watch.end((True, entry.number), results)
                self._learn_at_end(entry.watch)

    def end_interlude(self) -> None:
        """Ends the user's code between two halves: what is done for the next half is not its."""
        with self._lock:
            if self._watch is not None:
                self._watch.end_interlude()

    def is_live(self, part: "StepPart") -> bool:
        """True while a backward of a step of ``part`` may still come."""
        plan = self.plans.get(part)
        if plan is not None and plan.is_live:
            return True
        if self.is_of_all:
            return part.alone.is_live(part)
        return bool(part.assembly.step.live or part.assembly.step.beyond)

    def _any_live(self) -> bool:
        return any(self.is_live(part) for part in list(self._parts))

    def may_be_step(self) -> bool:
        """True where several modules' steps are live together, as far as was seen."""
        watch = self._watch
        if watch is None or len(watch.members) < 2:
            return False
        return None not in watch.keys if watch.is_pipeline else watch.are_apart

    def hand_over(self, *, is_part: bool) -> None:
        """Drops this graph's plans: from now on its steps are planned with other graphs' or alone.

        ``is_part``: with other graphs'; what is left over is no joint step, if of a pipeline.
        """
        self._is_part = is_part
        seen, self._watch = self._watch, None
        if seen is not None:
            seen.stop()
        while self.plans:
            _, plan = self.plans.popitem()
            plan.forget()

    def _enter(
        self, part: "StepPart", leaves: Sequence[Any], stages: Stages
    ) -> tuple[StepWatch, int]:
        """Notes a forward of the live step or of the next one; returns its watch and its number."""
        watch = self._watch
        if watch is None or not self._any_live():
            watch = self._begin_step(part, leaves, stages)
        number = len(watch.members)
        watch.begin((False, number), leaves, part)
        return watch, number

    def _member(
        self, part: "StepPart", watch: StepWatch, number: int
    ) -> tuple[JointStepPlan | None, int | None]:
        """Returns the plan that ``part`` has, and which member of it the forward is; None: none."""
        plan = self.plans.get(part)
        if plan is None or watch.is_mixed:
            return plan, None
        return plan, plan.place_of(part, watch.members[number].key)

    def _begin_step(self, part: "StepPart", leaves: Sequence[Any], stages: Stages) -> StepWatch:
        """Plans for what was seen of steps before, none of which is live, and watches a new one.

        Raises Infeasible: no plan fits the budget, now and before each step until one does.
        """
        seen, self._watch = self._watch, None
        self._halves.clear()
        refused, self._refused = self._refused, None
        if refused is not None and self.is_of_all and not refused.is_ordered:
            state.warn_once(OTHER_ORDER)
            self._drop(refused)
        self._end_step(seen, leaves)
        for parts, unlearned in list(self._unlearned.items()):
            if part not in parts:
                continue
            if self._plans_of(parts):  # if no other one fits the budget, that one stays
                self._unlearned.pop(parts, None)
            self._learn(unlearned)  # a first plan that fails is tried again before the next step
            self._unlearned.pop(parts, None)
        if not self.is_of_all:
            self._begin_alone(part, leaves, stages, seen)
        if part in self.plans:
            self._count_existing(self.plans[part], leaves)
        self._watch = self._watch_of_step(part, stages, seen)
        return self._watch

    def _end_step(self, seen: StepWatch | None, leaves: Sequence[Any]) -> None:
        """Ends the last step, which may be one of those that checkpoints run again.

        The one that begins now reads ``leaves``.
        """
        in_backward = autograd.in_backward()
        if seen is not None:
            seen.stop()
            self._before, self._waiting_bytes = seen, seen.waiting_gradient_bytes()
            self._ran.update(seen.parts)
            self._round.end(
                seen.as_checkpointed(), has_backward=seen.has_backward, in_backward=seen.in_backward
            )
        unseen = self._round.begin(first_key(leaves), in_backward=in_backward)
        if seen is None:
            return
        if unseen:
            seen.checkpointed, seen.is_first_again = unseen, True
        if len(seen.members) > 1 and not seen.in_backward:
            self._num_unplannable = 0 if seen.is_step() else self._num_unplannable + 1
        if not seen.is_learned:
            self._unlearned[seen.parts] = seen

    def _begin_alone(
        self, part: "StepPart", leaves: Sequence[Any], stages: Stages, seen: StepWatch | None
    ) -> None:
        """Plans a graph's joint step, if it is declared or was compiled anew in other tiles.

        Where steps that ran were no joint ones, the graph's own plan keeps the budget from now on.
        """
        assembly = part.assembly
        if part in self.plans:
            return
        runs_by_itself = seen is not None and not seen.is_step()
        if stages.num_stages == 1:  # the first steps of a stage may be cut short
            runs_by_itself = self._num_watched >= MAX_WATCHED
        if runs_by_itself and not self._is_part and stages.num_stages < 2:
            assembly.keep_budget()  # nobody else does
        if assembly.joint is not None and assembly.members is not None:  # compiled in other tiles
            parts = (part,) * assembly.members.joint.num_members
            self._take(JointStepPlan.bind(parts, assembly.members, assembly.joint))
        elif seen is None and len(declared := declared_around(leaves)) > 1:
            joint = assumed_of(assembly.lowered, assembly.config, declared, leaves)
            keys = tuple(key_of(parameters[0]) for parameters in declared)
            of_all = [parameter for parameters in declared for parameter in parameters]
            members = JointMembers.of(joint, keys, of_all, is_assumed=True)
            self._plan((part,) * joint.num_members, members)

    def _watch_of_step(self, part: "StepPart", stages: Stages, seen: StepWatch | None) -> StepWatch:
        """Returns what sees the step that begins with a forward of ``part``."""
        plan, in_backward = self.plans.get(part), autograd.in_backward()
        is_new = plan is None or plan.members.is_assumed
        may_plan = is_new and stages.num_stages < 2  # several stages are the other watcher's
        if self.is_of_all:  # what is of one graph is its own watcher's
            is_only_graph = len(self._parts) < 2 and stages.num_stages < 2
            is_planned_alone = (
                seen is not None and {*seen.parts} == {part} and part in part.alone.plans
            )
            may_plan = is_new and not (is_only_graph or is_planned_alone)
        is_first = may_plan and self._num_watched < MAX_WATCHED
        watch = StepWatch(
            samples=is_first and part.assembly.step.device.type == "cpu",
            learns=may_plan and self._num_unplannable < MAX_UNPLANNABLE,
            in_backward=in_backward,
            checkpointed=self._round.dropped,
            is_first_again=self._round.is_whole(in_backward=in_backward),
            is_brief=plan is not None and not is_new and not plan.deviating[1],
            is_pipeline=stages.num_stages > 0,
            is_part=stages.num_stages > 1 or self._is_part,
            num_forwards=stages.num_forwards if plan is None and is_first else 0,
            follows_parameters=may_plan and has_fsdp_modules(),
        )
        watch.keep(stages.kept())
        self._num_watched += is_new
        return watch

    def _learn_at_end(self, seen: StepWatch) -> None:
        """Plans what was seen as soon as all of a step has run, so that no later step does it.

        What planning takes of a CPU's memory would be on top of the next step; so would other
        tiles. An error waits for that step, which plans again: there it is the user's.
        """
        assembly = seen.members[0].part.assembly
        if not seen.learns or seen.is_learned or assembly.step.device.type != "cpu":
            return
        plans = self._plans_of(seen.parts)
        if any(not plan.members.is_assumed for plan in plans) or not self._concerns(seen):
            return
        if not seen.is_step() or self._any_live():  # some halves are still to come
            return
        seen.stop()
        why = None
        with contextlib.suppress(MemoError, RuntimeError), torch.enable_grad():
            try:
                self._learn(seen, seen.existing_gradient_bytes())
                seen.is_learned = True
            except Infeasible as error:
                why = without_frames(error)
            if why is not None and assembly.retile is not None:
                assembly.retile(why)

    def _concerns(self, seen: StepWatch) -> bool:
        """True where a step that was seen is this watcher's to plan."""
        if not self.is_of_all:
            return not (seen.is_pipeline and seen.is_part)
        if any(part not in self._parts for part in seen.parts):
            return False
        return seen.is_part or len({*seen.parts}) > 1 or bool(self._plans_of(seen.parts))

    def _plans_of(self, parts: Iterable["StepPart"]) -> list[JointStepPlan]:
        return list(dict.fromkeys(self.plans[part] for part in parts if part in self.plans))

    def _learn(self, seen: StepWatch, existing: int | None = None) -> None:
        """Plans what was seen, where no plan serves it, beside ``existing`` bytes of gradients.

        None: those that there are now. Raises Infeasible: no plan fits the budget.
        """
        parts = seen.parts[: seen.num_members]
        plans = self._plans_of(parts)
        if not self._concerns(seen) or not (seen.learns or plans):
            return
        if plans and plans[0].members.num_dropped and seen.in_backward and not seen.is_first_again:
            return  # a later step of a checkpoint's round, whose first one is planned for
        if not (seen.is_step() and are_alike(parts)):
            if self.is_of_all and seen.has_run() and not plans:
                self._leave_apart(seen)
            return
        kind = parts, seen.order if seen.is_ordered else (), seen.num_dropped
        if len(plans) == 1 and plans[0].serves(*kind):
            plans[0].deviating = (None, 0)
            self._confirm(plans[0], seen, existing)
        elif self._is_wanted(seen, kind, plans):
            if seen.num_dropped:
                existing = seen.existing_gradient_bytes()
            self._plan_seen(seen, existing)

    def _is_wanted(self, seen: StepWatch, kind: object, plans: Sequence[JointStepPlan]) -> bool:
        """True where a step that no plan serves is to be planned; ``plans`` are of its graphs.

        ``kind`` is equal for steps that one plan would serve.
        """
        if plans:
            return any(plan.members.is_assumed for plan in plans) or _persists(kind, plans)
        may_need_none = self.is_of_all and not seen.is_pipeline
        return not (may_need_none and fit_separately(seen.parts, seen.keys))

    def _plan_seen(self, seen: StepWatch, existing: int | None) -> None:
        """Plans a step that was seen. Raises Infeasible: no plan fits the budget.

        Not yet for the first step of a pipeline's rank: graphs were compiled in it, and torch made
        what it makes once. The next one shows what runs between the halves, and so the floor.
        """
        parts = seen.parts[: seen.num_members]
        try:
            self._plan(parts, self._members_of(seen), existing)
        except Infeasible:
            is_last = self._num_watched >= PIPELINE_LOOKS or not self._is_on_cpu(parts)
            if not (self.is_of_all and seen.is_pipeline) or is_last:
                raise
            state.warn_once(NOT_YET)

    def _confirm(self, plan: JointStepPlan, seen: StepWatch, existing: int | None) -> None:
        """Plans again what was assumed so far, if what lies between the members is otherwise."""
        members, is_measured = plan.members, seen.samples or not self._is_on_cpu(plan.parts)
        if not (members.is_assumed and is_measured) or seen.parts != plan.parts:
            return
        as_seen = self._members_of(seen)
        if as_seen.joint != members.joint:
            self._plan(plan.parts, as_seen, existing)
        else:
            plan.members = replace(members, is_assumed=False)

    @staticmethod
    def _is_on_cpu(parts: Sequence["StepPart"]) -> bool:
        """True where what the user's code takes between the halves can be measured."""
        return parts[0].assembly.step.device.type == "cpu"

    def _members_of(self, seen: StepWatch) -> JointMembers:
        """Returns the step that was seen, as it is planned."""
        parameters = [*alive_values(seen.parameters())]
        trained = (each for each in apart(parameters) if each.requires_grad)
        trained_bytes = sum(map(allocated_bytes, trained))
        for step in seen.checkpointed if seen.num_dropped else ():
            parameters += alive_values(step.parameters)
        fixed = self._fixed(seen, parameters)
        if seen.num_dropped:  # the gradients of all other parts may exist
            fixed = replace(fixed, new_gradients=trained_bytes)
        return JointMembers.of(
            seen.joint(fixed),
            seen.keys[: seen.num_members],
            parameters,
            is_assumed=self._is_on_cpu(seen.parts) and not (seen.samples or seen.num_dropped),
            num_dropped=seen.num_dropped,
        )

    @staticmethod
    def _fixed(seen: StepWatch, parameters: Sequence[torch.nn.Parameter]) -> FixedBytes:
        """Returns what members and the model around them hold beside the frame, without inputs."""
        modules = {(member.part, member.key) for member in seen.members}
        part = seen.parts[0]
        for step in seen.checkpointed if seen.num_dropped else ():
            modules |= {(part, key) for key in step.keys}
        problems = [member.part.assembly.lowered.problem for member in seen.members]
        return replace(
            fixed_beside(parameters, part.assembly.config, seen.gathered_bytes),
            buffers=sum(
                module.assembly.lowered.cut.facts.fixed_bytes(0).buffers for module, _ in modules
            ),
            libraries=max(problem.fixed.libraries for problem in problems),
        )

    def _plan(
        self, parts: "tuple[StepPart, ...]", members: JointMembers, existing: int | None = None
    ) -> None:
        """Plans ``members``, and runs their steps so from now on. Raises Infeasible: no plan fits.

        Counts ``existing`` bytes of gradients of steps before; None: those that there are now.
        """
        if existing is None:
            existing = self._existing_bytes(members)
        members = replace(members, existing_bytes=existing)
        replaced = self._plans_of(parts)
        if self.is_of_all:
            replaced += [plan for part in {*parts} for plan in part.alone.plans.values()]
        try:
            plan = JointStepPlan.plan_and_bind(parts, members, replaced)
        except Infeasible:
            if self._has_fewer_waiting() and self._existing_bytes(members) < existing:
                self._plan(parts, members)
                return
            if not self.is_of_all:  # in other tiles there may be a plan
                assembly = parts[0].assembly
                assembly.members = members
                assembly.unplanned_request = joint_request(parts, members)
            raise
        self._take(plan)

    def _take(self, plan: JointStepPlan) -> None:
        """Lets the graphs of ``plan`` run by it from now on."""
        for other in self._plans_of(plan.parts):
            self._drop(other)
        for part in {*plan.parts}:
            self.plans[part] = plan
            if self.is_of_all:
                part.alone.hand_over(is_part=True)
        self._num_watched = 0

    def _drop(self, plan: JointStepPlan) -> None:
        """Forgets ``plan``, by which no step runs any more."""
        for part in {*plan.parts}:
            if self.plans.get(part) is plan:
                del self.plans[part]
                if self.is_of_all:
                    part.alone.hand_over(is_part=False)
        plan.forget()

    def _leave_apart(self, seen: StepWatch) -> None:
        """Lets each graph of a step that cannot be planned keep the budget by itself."""
        if seen.is_pipeline and seen.num_members < seen.num_forwards:  # torch infers shapes by it
            return
        state.warn_once(NO_ORDER)
        for part in seen.parts:
            if not seen.is_pipeline:
                self._apart.add(part)
            part.assembly.keep_budget()

    def _leave_alone(self, part: "StepPart", watch: StepWatch, plan: JointStepPlan | None) -> bool:
        """Lets a forward run by its graph's own plan; True: it may turn out to be a member.

        Raises Infeasible if it does not fit beside the plan that has no place for it.
        """
        if plan is not None and (plan.is_live or plan.is_ordered):
            self._refused = plan  # stays if the next line raises
            plan.require_room(part)
            self._refused = None
            if part.assembly.step.live < part.assembly.step.max_inflight:
                state.count_unplanned()  # beyond that it is counted where it takes its memory
            return True
        is_member_later = self.may_be_step()
        if part.assembly.config.memory_budget is not None:
            if self.is_of_all:
                self._bound_by_others(part, watch)
            elif is_member_later or self._round.is_open(in_backward=watch.in_backward):
                state.warn_once(FIRST_STEP)
        return is_member_later

    def _bound_by_others(self, part: "StepPart", watch: StepWatch) -> None:
        """Says that a forward runs beside those of other graphs, or refuses it (Infeasible)."""
        others = [other for other in watch.parts if other is not part and self.is_live(other)]
        if not others:
            return
        if part in self._ran and others[0] in self.plans and not watch.is_pipeline:
            self.plans[others[0]].require_room(part)
        elif part not in self._apart and not fit_separately(watch.parts, watch.keys):
            state.warn_once(FIRST_STEP)

    def _has_fewer_waiting(self) -> bool:
        """True where gradients that others held when the step began are gone since.

        A thread that has reduced them lets go of them when it comes to it.
        """
        earlier_bytes = self._waiting_bytes
        if self._before is not None:
            self._waiting_bytes = self._before.waiting_gradient_bytes()
        return self._waiting_bytes < earlier_bytes

    def _existing_bytes(self, members: JointMembers) -> int:
        """Bytes of gradients that exist: as ``.grad``, or kept by FSDP2 until it reduces them."""
        return max(members.existing_gradient_bytes(), self._waiting_bytes)

    def _count_existing(self, plan: JointStepPlan, leaves: Sequence[Any]) -> None:
        """Plans again where gradients of steps before exist that the plan does not count.

        And where the seconds of collectives are other ones than it was made with. Of parts that a
        checkpoint runs again only their own gradients count: the plan has those of all others.
        """
        members, seconds_changed = plan.members, False
        for part in {*plan.parts}:
            collectives = part.assembly.known.collectives
            seconds_changed |= collectives.are_measured and collectives.take()
        if members.num_dropped:
            existing = members.joint.num_members * gradient_bytes(leaves)
        else:
            existing = self._existing_bytes(members)
        if seconds_changed or existing > members.existing_bytes:
            self._plan(plan.parts, members, existing)


def _persists(kind: object, plans: Sequence[JointStepPlan]) -> bool:
    """Counts steps of one ``kind`` that no plan serves; True once PERSISTS came in a row."""
    times = max((plan.deviating[1] for plan in plans if plan.deviating[0] == kind), default=0)
    for plan in plans:
        plan.deviating = (kind, times + 1)
    return times + 1 >= PERSISTS
