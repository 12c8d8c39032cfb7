"""Runs the steps of one graph: by themselves, or several that are live together as one group.

A block that is compiled once and called for each layer has as many live steps as there are layers.
The first step is watched; before the second one's first forward the group is planned. Members are
told apart by the order of their calls, confirmed by where their first parameter lies. What is not
as planned runs by the graph's own plan, in ordinary memory, if the budget allows, and is counted.
"""

import contextlib
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from memo_runtime.arena import arena_of
from memo_runtime.group_steps import GroupPlan, GroupStep
from memo_runtime.leases import StepCounters, leases
from memo_runtime.run_step import run_backward

from memo_compile.driver.around import apart, has_fsdp_modules
from memo_compile.driver.assemble import Assembly
from memo_compile.driver.assumed import assumed_of, fixed_of
from memo_compile.driver.bind import bind_group
from memo_compile.driver.checkpoints import CheckpointRound
from memo_compile.driver.declared import Stages, declared_around, stages_around
from memo_compile.driver.early_gradients import own_leaves
from memo_compile.driver.facts import allocated_bytes, gradient_bytes
from memo_compile.driver.group_members import GroupMembers
from memo_compile.driver.out_of_memory import OutOfMemory
from memo_compile.driver.plan_step import plan_step
from memo_compile.driver.stages import PlannedStep, PlanRequest
from memo_compile.driver.step_watch import StepWatch, first_key, key_of
from memo_compile.errors import Infeasible, MemoError, without_frames
from memo_compile.reporting import state
from memo_compile.reporting.write import write_pictures
from memo_compile.step.group import Group, num_user_results
from memo_compile.step.interludes import most_between
from memo_compile.step.plans import Observed, ReportedGroup
from memo_compile.torch_private import autograd, dynamo, fx_graphs
from memo_compile.units import format_bytes, format_enough

log = logging.getLogger("memo")

PIPELINE_FIRST_STEP = (
    "a pipeline's stage has several microbatches live at once: its first step is watched, runs in "
    "ordinary memory and may exceed memory_budget; from the second on all of them are planned as "
    "one group"
)

GROUP_FIRST_STEP = (
    "a graph is called by several modules whose steps are live together (regional compilation): "
    "its first step is watched, runs in ordinary memory and may exceed memory_budget; from the "
    "second on they are planned as one group. memo_compile.group(modules) plans them from the "
    "first step on"
)

CHECKPOINTS_FIRST_STEP = (
    "checkpoints run modules again that share a graph: in the first step of these each keeps "
    "memory_budget by itself, beside what others and the checkpoints hold, and may exceed it; from "
    "the second on all are planned together"
)

MAX_ALONE = 2
"""A pipeline runs a microbatch by itself to find out shapes, or where a step fails. After more
steps of one forward nobody looks at memory: that costs a whole graph a tenth of its time. A group
that comes later is planned without it first."""

PERSISTS = 2
"""So many steps in a row with the same number of further members are planned for."""


MAX_UNPLANNABLE = 2
"""After so many steps in a row of an order that no plan has, nobody looks for the model around the
forwards, which takes as long as a small step, until an order comes that can be planned."""


@dataclass(slots=True, eq=False)
class PlannedGroup:
    """A group that runs, and what the report says of it."""

    members: GroupMembers
    planned: PlannedStep
    bound: GroupPlan
    reported: ReportedGroup
    step: GroupStep | None = None
    """The live step; the last one where none is."""

    @property
    def num_members(self) -> int:
        """How many live steps of the graph are planned as one."""
        return self.members.group.num_members


@dataclass(slots=True, eq=False)
class GroupedSteps:
    """The forwards and backwards of one graph."""

    assembly: Assembly
    planned: PlannedGroup | None = None
    _watch: StepWatch | None = None
    _members: dict[int, int] = field(default_factory=dict)
    """Number of a lease -> which forward of the step that is watched."""
    _deviating: tuple[object | None, int] = (None, 0)
    """What the last steps were that had more members than are planned, or another order, and how
    many steps."""
    _round: CheckpointRound = field(default_factory=CheckpointRound)
    """What the user's checkpoints run again."""
    _num_alone: int = 0
    """So many times in a row a microbatch of a pipeline ran by itself."""
    _num_unplannable: int = 0
    """So many steps in a row several forwards were live together in an order that no plan has."""
    _is_part: bool = False
    """Several graphs of a step, of which this is one, are planned together."""
    _waiting_bytes: int = 0
    """Gradients of the last step that were there when the next one began."""
    _before: StepWatch | None = None
    """What was seen of the last step."""
    _memory: OutOfMemory = field(init=False)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self._memory = OutOfMemory(dump=self.assembly.config.dump)

    def forward(self, args: list[Any]) -> list[Any]:
        """The forward's results; empties ``args``. Raises as ``Assembly.forward``."""
        with self._lock:
            leaves = own_leaves(args)
            watch, number = self._enter(leaves)
            member = self._member(watch, number)
            if member is None and number and self.planned is not None:
                autograd.free_stopped_backward()
                leases.end_refused()
                if not self._any_live():
                    watch, number = self._enter(leaves)
                    member = self._member(watch, number)
            del leaves
            # Until it has run, no other thread may begin a step in the same frame.
            results = None if member is None else self._as_member(member, args)
        if results is None:
            results = self._by_itself(args, number)
        with self._lock:
            lease = leases.find(results[self._handle_result])
            if lease is not None:
                self._members[lease.number] = number
                watch.lease = lease.number
            watch.end((False, number), results)
        return results

    def _enter(self, leaves: Sequence[Any]) -> tuple[StepWatch, int]:
        """A forward begins, of the live step or of the next one: its watch, and its number."""
        if not self._any_live():
            self._begin_step(leaves)
        watch = self._watch
        assert watch is not None, "a step has begun"
        number = len(watch.members)
        watch.begin((False, number), leaves)
        return watch, number

    def backward(self, args: list[Any]) -> list[Any]:
        """The backward's results; empties ``args``. Raises as ``Assembly.backward``."""
        backward = self.assembly.step.backward
        lease = leases.find(args[backward.arguments.index(backward.handle)])
        watch = self._watch
        number = None if lease is None else self._members.get(lease.number)
        is_member = lease is not None and lease.group is not None
        del lease
        if watch is not None and number is not None:
            watch.begin((True, number), args)
        if not is_member:
            results = self.assembly.backward(args, leaves_early=not self._may_be_group())
        else:
            results = run_backward(self.assembly.step, args, keep_graph=autograd.keep_graph())
        if watch is not None and number is not None:
            watch.end((True, number), results)
            self._learn_at_end(watch)
        return results

    def end_interlude(self) -> None:
        """A half is about to begin: what others do for it is not the user's."""
        with self._lock:
            if self._watch is not None:
                self._watch.end_interlude()

    def _learn_at_end(self, seen: StepWatch) -> None:
        """Plan for what was seen as soon as all of a step has run, so that no later step does it.

        What planning takes of a CPU's memory would be on top of the next step; so would other
        tiles. An error waits for that step, which plans again: there it is the user's.
        """
        with self._lock:
            is_first = self.planned is None or self.planned.members.is_assumed
            is_new = is_first and seen.learns and self._is_on_cpu
            if not (is_new and seen.is_group()) or self._any_live():
                return
            seen.stop()
            with contextlib.suppress(MemoError, RuntimeError), torch.enable_grad():
                seen.is_learned = self._plan_or_retile(seen)

    def _plan_or_retile(self, seen: StepWatch) -> bool:
        """Plan for a step that has run; False where it fits in other tiles only, if ever."""
        try:
            self._plan(seen, seen.existing_gradient_bytes())
            return True
        except Infeasible as error:
            why = without_frames(error)
        if self.assembly.retile is not None:
            self.assembly.retile(why)
        return False

    @property
    def runs_as_group(self) -> bool:
        """True where steps are members of a group: gradients leave when all of one are made."""
        return self.planned is not None

    def _may_be_group(self) -> bool:
        """True where several modules' steps are live together, as far as was seen."""
        watch = self._watch
        if watch is None or len(watch.members) < 2:
            return False
        return None not in watch.keys if watch.is_pipeline else watch.are_apart

    @property
    def _handle_result(self) -> int:
        half = self.assembly.problem.halves[0]
        return half.results.index(half.handle)

    @property
    def is_live(self) -> bool:
        """True while a backward of a step may still come."""
        return self._any_live()

    def hand_over(self, *, is_part: bool) -> None:
        """The steps of the graph are run by someone else from now on, or no more.

        ``is_part``: what they leave over is no group, if it is of a pipeline.
        """
        self._is_part = is_part
        seen, self._watch = self._watch, None
        if seen is not None:
            seen.stop()
        planned, self.planned = self.planned, None
        if planned is not None:
            arena_of(self.assembly.step.device).forget(planned.bound.members[0].key)
            state.group_is_gone(planned.reported)

    def _any_live(self) -> bool:
        step, planned = self.assembly.step, self.planned
        in_group = planned is not None and planned.step is not None and not planned.step.is_over
        return bool(step.live or step.beyond or in_group)

    def _begin_step(self, args: Sequence[Any]) -> None:
        """No step of the graph is live: what was seen of the last one is planned for."""
        seen, self._watch = self._watch, None
        in_backward = autograd.in_backward()
        if seen is not None:
            seen.stop()
            self._before, self._waiting_bytes = seen, seen.waiting_gradient_bytes()
            self._end_in_round(seen)
        unseen = self._round.begin(first_key(args), in_backward=in_backward)
        if seen is not None:
            if unseen:
                seen.checkpointed, seen.is_first_again = unseen, True
            if len(seen.members) > 1 and not seen.in_backward:
                self._num_unplannable = 0 if seen.is_group() else self._num_unplannable + 1
            if not seen.is_learned:
                self._learn(seen)
        problem, stages = self.assembly.problem, stages_around(args)
        self._num_alone = 0 if seen is None or seen.is_group() else self._num_alone + 1
        if self._runs_alone(seen, stages):
            self.assembly.keep_budget()  # nobody else does
        if self.planned is None and self.assembly.group and self.assembly.members:
            self._take(self.assembly.group, self.assembly.members)
        if self.planned is None and seen is None:
            self._plan_declared(args)
        is_new = self.planned is None or self.planned.members.is_assumed
        may_be_first = is_new and self._num_alone <= MAX_ALONE and stages.num_stages < 2
        is_first = may_be_first and self._is_on_cpu
        self._watch = StepWatch(
            problem.halves[1],
            num_user_results(*problem.halves),
            problem.tangents,
            is_first,
            is_new and self._num_unplannable < MAX_UNPLANNABLE,
        )
        self._watch.in_backward, self._watch.checkpointed = in_backward, self._round.dropped
        self._watch.is_first_again = self._round.is_whole(in_backward=in_backward)
        self._watch.is_brief = not (is_new or self._deviating[1])
        self._watch.is_pipeline = stages.num_stages > 0
        self._watch.keep(stages.kept())
        expects = self.planned is None and self._num_alone <= MAX_ALONE
        self._watch.num_forwards = stages.num_forwards if expects else 0
        self._watch.is_part = stages.num_stages > 1 or self._is_part
        self._watch.follows_parameters = may_be_first and has_fsdp_modules()
        self._members.clear()
        if self.planned is not None:
            self._count_existing(self.planned, args)

    def _end_in_round(self, seen: StepWatch) -> None:
        """The last step has ended, which may be one of those that checkpoints run again."""
        self._round.end(
            seen.as_checkpointed(), has_backward=seen.has_backward, in_backward=seen.in_backward
        )

    def _runs_alone(self, seen: StepWatch | None, stages: Stages) -> bool:
        """True for what was taken to be a part of a step, and is none as far as was seen."""
        if self.planned is not None or self._is_part or stages.num_stages > 1:
            return False
        if stages.num_stages == 1:
            return self._num_alone > MAX_ALONE
        return seen is not None and not seen.is_group()

    @property
    def _is_on_cpu(self) -> bool:
        """True where what the user's code takes between the halves can be measured."""
        return self.assembly.step.device.type == "cpu"

    def _plan_declared(self, args: Sequence[Any]) -> None:
        """Plan the group that the user named, where the call is of its first module."""
        parameters = declared_around(args)
        if len(parameters) < 2:
            return
        found = [own for member in parameters for own in member]
        group = assumed_of(self.assembly.lowered, self.assembly.config, parameters, args)
        keys = tuple(key_of(own[0]) for own in parameters)
        self._plan_group(group, GroupMembers.of(keys, found, group, is_assumed=True))

    def _learn(self, seen: StepWatch) -> None:
        planned = self.planned
        if planned is None or planned.members.is_assumed:
            if seen.is_group() and seen.learns:
                self._plan(seen)
            return
        if planned.members.num_dropped and seen.in_backward and not seen.is_first_again:
            return
        now = self._other_than_planned(seen, planned)
        if now is None:
            self._deviating = (None, 0)
            return
        times = self._deviating[1] + 1 if self._deviating[0] == now else 1
        self._deviating = (now, times)
        if times >= PERSISTS:
            self._deviating = (None, 0)
            self._plan(seen)

    def _other_than_planned(self, seen: StepWatch, planned: PlannedGroup) -> object | None:
        """What the step was that its plan does not serve; None: it does, or nothing would.

        The frame of blocks serves fewer as well. That of a pipeline, or of blocks that are run
        again while others wait, serves its own order.
        """
        if not seen.is_group():
            return None
        if not (seen.is_ordered or planned.members.group.order):
            num_dropped = len(seen.checkpointed) if seen.is_run_again else 0
            if num_dropped > planned.members.num_dropped > 0:
                return seen.num_members, num_dropped
            return seen.num_members if seen.num_members > planned.num_members else None
        return seen.order if seen.order != planned.bound.order else None

    def _plan(self, seen: StepWatch, existing: int | None = None) -> None:
        """Plan the group that was seen. Raises as ``_plan_group``."""
        references = [reference() for reference in seen.parameters()]
        found = [own for own in references if own is not None]
        lowered, config = self.assembly.lowered, self.assembly.config
        num_dropped = len(seen.checkpointed) if seen.is_run_again else 0
        if not num_dropped:
            fixed = fixed_of(lowered, config, found, seen.num_members, seen.gathered_bytes)
        else:  # the gradients of all other parts may exist
            mine = sum(allocated_bytes(own) for own in apart(found) if own.requires_grad)
            dropped = (each() for step in seen.checkpointed for each in step.parameters)
            found = [*found, *(own for own in dropped if own is not None)]
            fixed = fixed_of(lowered, config, found, num_dropped, seen.gathered_bytes)
            fixed = replace(fixed, new_gradients=mine)
        group = seen.group(fixed)
        is_assumed = not (seen.samples or num_dropped) and self._is_on_cpu
        members = GroupMembers.of(
            seen.keys, found, group, is_assumed=is_assumed, num_dropped=num_dropped
        )
        if num_dropped:
            existing = seen.existing_gradient_bytes()
        self._plan_group(group, members, existing)

    def _plan_group(self, group: Group, members: GroupMembers, existing: int | None = None) -> None:
        """Plan ``group``, beside ``existing`` bytes of gradients; None: those that are there now.

        Raises Infeasible: no plan fits the budget.
        """
        assembly = self.assembly
        existing = self._existing_bytes(members) if existing is None else existing
        assembly.known.collectives.take()
        fixed = replace(group.fixed, gradients=group.fixed.gradients + existing)
        counted = replace(group, fixed=fixed)
        request = PlanRequest(
            group=counted, shares=group.shares, host_store=assembly.request.host_store
        )
        config = request.applied_to(assembly.config)
        assembly.members = replace(members, group=group, existing_bytes=existing)
        try:
            with dynamo.nothing_else_compiles():
                planned = plan_step(assembly.lowered, config, request, assembly.known)
        except Infeasible:
            if self._has_fewer_waiting() and self._existing_bytes(members) < existing:
                self._plan_group(group, members)
                return
            assembly.unplanned_request = request  # in other tiles there may be a plan
            raise
        self._take(planned, assembly.members)

    def _has_fewer_waiting(self) -> bool:
        """True where gradients that others held when the step began are gone since.

        A thread that has reduced them lets go of them when it comes to it.
        """
        before = self._waiting_bytes
        if self._before is not None:
            self._waiting_bytes = self._before.waiting_gradient_bytes()
        return self._waiting_bytes < before

    def _take(self, planned: PlannedStep, members: GroupMembers) -> None:
        """From now on steps of the group run by ``planned``."""
        assembly, before = self.assembly, self.planned
        steps = [assembly.lowered.cut] * members.group.num_members
        bound = bind_group(planned, steps, assembly.request.applied_to(assembly.config))
        bound.on_step_end, bound.before_copy = self._count, self._require_room_for_copy
        bound.members[0].comm_times = assembly.known.collectives.times
        assembly.release()
        if before is not None:
            arena_of(assembly.step.device).forget(before.bound.members[0].key)
        with fx_graphs.real_tensors():
            bound.reserve()
        observed = Observed(planning_s=planned.planning_s, lowering_s=assembly.lowered.lowering_s)
        reported = ReportedGroup.of_group(
            planned.plan,
            observed,
            num_instances=len(bound.members),
            between_bytes=most_between(planned.problem),
            graphs=(assembly.reported.name,),
        )
        heap, fixed = bound.members[0].heap, members.group.fixed
        if heap is not None and members.num_dropped:
            heap.allowed_bytes += fixed.inputs + fixed.gradients
        self.planned = PlannedGroup(members, planned, bound, reported)
        self._dump(planned)
        state.replace_group(None if before is None else before.reported, reported)

    def _dump(self, planned: PlannedStep) -> None:
        """The group's plan and pictures, beside the dump of its graph."""
        if self.assembly.config.dump is None:
            return
        folder = Path(self.assembly.config.dump) / f"{planned.plan.name}-group"
        try:
            write_pictures(folder, planned.problem, planned.plan)
        except MemoError as error:  # a dump that fails does not lose the plan
            log.warning("memo: the group's plan could not be written: %s", error)

    def retire(self) -> None:
        """Let go of what is held for a model that is gone."""
        self.assembly.retire()
        if self.planned is not None:
            arena_of(self.assembly.step.device).forget(self.planned.bound.members[0].key)
            state.group_is_gone(self.planned.reported)

    def _member(self, watch: StepWatch, number: int) -> int | None:
        """Which member of the group the forward that begins is; None: it runs by itself."""
        planned = self.planned
        if planned is None or watch.is_mixed:
            return None
        live = planned.step is not None and not planned.step.is_over
        step = planned.step if live else None
        if watch.is_pipeline:  # all members are alike
            known = number < planned.num_members and bool(planned.members.group.order)
            return number if known and (step is None or step.takes(number)) else None
        key = watch.members[number].key
        if planned.members.group.order:
            keys = planned.members.keys
            by_key = sorted(range(planned.num_members), key=lambda at: keys[at] != key)
            return next((at for at in by_key if step is None or step.takes(at)), None)
        position = 0 if step is None else step.position
        if position >= planned.num_members:
            return None
        if key in planned.members.keys:
            places = [
                at
                for at, known in enumerate(planned.members.keys)
                if known == key and at >= position
            ]
            return places[0] if places else None
        return position if key is None or number < planned.num_members else None

    def _as_member(self, member: int, args: list[Any]) -> list[Any]:
        planned = self.planned
        assert planned is not None, "it is planned"
        if planned.step is None or planned.step.is_over:
            if not leases.any_live():
                state.step_begins()
            planned.step = self._begin_group(planned)
        with self._memory.explained(planned.planned.problem, planned.reported):
            return planned.step.forward(member, args)

    def _begin_group(self, planned: PlannedGroup) -> GroupStep:
        """Take the group's frame for a step, which may be one of those that checkpoints run again.

        The frame of one that is dropped keeps its pages where the next one is already known.
        """
        watch, num_dropped = self._watch, planned.members.num_dropped
        assert watch is not None, "a step has begun"
        return planned.bound.begin(
            follows=num_dropped > 0 and self._round.is_open(in_backward=watch.in_backward),
            stays=watch.in_backward or len(self._round.dropped) + 1 < num_dropped,
        )

    def _by_itself(self, args: list[Any], number: int) -> list[Any]:
        """A forward that is no member of a planned group."""
        if self.planned is not None:
            self._require_room_beside_group(number)
            if self.assembly.step.live < self.assembly.step.max_inflight:
                state.count_unplanned()  # beyond that it is counted where it takes its memory
            return self.assembly.forward(args, watched=True)
        may_be_group = self._may_be_group()
        if self.assembly.config.memory_budget is not None:
            self._say_first_step(may_be_group=may_be_group)
        return self.assembly.forward(args, watched=may_be_group)

    def _say_first_step(self, *, may_be_group: bool) -> None:
        """Say once that steps which are not planned together yet may exceed the budget."""
        watch = self._watch
        assert watch is not None, "a step has begun"
        if self._round.is_open(in_backward=watch.in_backward):
            state.warn_once(CHECKPOINTS_FIRST_STEP)
        elif may_be_group:
            state.warn_once(PIPELINE_FIRST_STEP if watch.is_pipeline else GROUP_FIRST_STEP)

    def _require_room_beside_group(self, number: int) -> None:
        """Raise Infeasible if a forward that the group has no place for does not fit beside it."""
        planned = self.planned
        assert planned is not None, "it is planned"
        plan, budget = planned.planned.plan, planned.planned.plan.budget_bytes
        state.add_note(
            f"a forward is no member of its graph's group of {planned.num_members}: it runs "
            "in ordinary memory"
        )
        if budget is None:
            return
        own = self.assembly.plan
        more = (self.assembly.step.beyond + 1) * (own.arena_bytes + own.fixed.outputs)
        if plan.peak_bytes + more > budget:
            raise Infeasible(
                f"forward {number + 1} of a graph whose group has {planned.num_members} "
                f"members needs {format_enough(plan.peak_bytes + more)} > memory_budget "
                f"{format_bytes(budget)}, and has not begun. Raise memory_budget, or name the "
                "modules with memo_compile.group"
            )

    def _require_room_for_copy(self) -> None:
        """Raise Infeasible if a copy of the frame does not fit."""
        planned = self.planned
        if planned is None or planned.planned.plan.budget_bytes is None:
            return
        plan, budget = planned.planned.plan, planned.planned.plan.budget_bytes
        if plan.peak_bytes + plan.arena_bytes > budget:
            raise Infeasible(
                "backwards of a group that run twice (retain_graph=True) or in another order copy "
                f"its frame: {format_enough(plan.peak_bytes + plan.arena_bytes)} > memory_budget "
                f"{format_bytes(budget)}. Call backward once for all, or raise memory_budget"
            )

    def _existing_bytes(self, members: GroupMembers) -> int:
        """Gradients that exist: as ``.grad``, or kept by FSDP2 until it reduces them."""
        return max(members.existing_gradient_bytes(), self._waiting_bytes)

    def _count_existing(self, planned: PlannedGroup, args: Sequence[Any]) -> None:
        """Plan again where gradients of steps before exist that the plan does not count.

        And where the seconds of collectives are other ones than it was made with. Of parts that a
        checkpoint runs again only their own gradients count: the plan has those of all others.
        """
        members, collectives = planned.members, self.assembly.known.collectives
        is_other = collectives.are_measured and collectives.take()
        if members.num_dropped:
            existing = planned.num_members * gradient_bytes(args)
        else:
            existing = self._existing_bytes(members)
        if is_other or existing > members.existing_bytes:
            self._plan_group(members.group, members, existing)

    def _count(self, counted: StepCounters) -> None:
        planned = self.planned
        if planned is None:
            return
        before = planned.reported
        planned.reported = replace(
            before,
            offloaded_bytes=counted.offloaded_bytes,
            recomputed_bytes=counted.recomputed_bytes,
        )
        state.replace_group(before, planned.reported)
