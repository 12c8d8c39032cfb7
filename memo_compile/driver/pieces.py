"""Several graphs of one step under one budget: what graph breaks, or DDP's buckets, cut apart.

Each graph has its own plan, within the whole budget. Where several are live together, their sum may
exceed it: their first step is watched, and before the next one's first forward all of them are
planned as one step, in one frame (``step/joined.py``). A graph is told apart by itself, its place
in the step by the order of calls. What is not as planned runs by the graph's own plan, in ordinary
memory, if the budget allows, and is counted.

The stages of a pipeline's rank are graphs of one step as well, and so are microbatches of several
sizes: there the order of the halves is the schedule's.

Without a budget graphs run by their own plans, but for several stages of a rank.
"""

import contextlib
import gc
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from memo_runtime.arena import arena_of
from memo_runtime.group_steps import GroupPlan, GroupStep
from memo_runtime.leases import StepCounters, leases

from memo_compile.driver.around import fixed_beside, has_fsdp_modules
from memo_compile.driver.assemble import Assembly
from memo_compile.driver.bind import bind_group
from memo_compile.driver.declared import Stages, stages_around
from memo_compile.driver.early_gradients import own_leaves
from memo_compile.driver.group_members import GroupMembers
from memo_compile.driver.groups import (
    MAX_UNPLANNABLE,
    PERSISTS,
    PIPELINE_FIRST_STEP,
    GroupedSteps,
)
from memo_compile.driver.out_of_memory import OutOfMemory
from memo_compile.driver.piece_knowledge import PieceKnowledge
from memo_compile.driver.pieces_watch import PiecesWatch
from memo_compile.driver.stages import PlannedStep, PlanRequest
from memo_compile.driver.step_planner import plan_known
from memo_compile.errors import Infeasible, MemoError
from memo_compile.reporting import state
from memo_compile.step.group import Group, HalfOrder
from memo_compile.step.interludes import most_between
from memo_compile.step.plans import Observed, ReportedGroup
from memo_compile.step.problem import FixedBytes
from memo_compile.torch_private import autograd, dynamo, fx_graphs
from memo_compile.units import format_bytes, format_enough

MAX_LOOKS = 3
"""In so many steps memory is looked at between the halves, where graphs are not live together."""

FIRST_STEP = (
    "several graphs of one step are live together (graph breaks, or DistributedDataParallel's "
    "buckets): in their first step each keeps memory_budget by itself, and their sum may exceed "
    "it; from the next on they are planned as one step"
)

OTHER_ORDER = (
    "the graphs of a step came in another order than planned, and were refused: the next step is "
    "watched, in which each keeps memory_budget by itself and their sum may exceed it, and planned "
    "anew"
)

PIPELINE_LOOKS = 2
"""A pipeline's step is refused after what was measured in so many; the last one counts."""

NOT_YET = (
    "no plan fits memory_budget after what was measured in the first step of a pipeline's rank, "
    "where torch also makes what it makes once: the next one is watched as well, and may exceed it"
)

_OF_PIECES = (
    "These are {} graphs of one step, planned as one (graph breaks or DistributedDataParallel's "
    "buckets cut it): one whole graph needs less"
)
_UNSEEN = (
    "What runs between their halves is seen in the step behind: the floor is at least this much"
)
_OF_PIPELINE = "These are the {} forwards of a pipeline's rank, with their backwards, in its order"

NO_ORDER = (
    "several graphs of one step are live together, and their backwards do not come in the opposite "
    "order of their forwards, or they were compiled with different options: they are not planned "
    "as one step, and memory_budget bounds each of them, not their sum"
)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Piece:
    """The forwards and backwards of one graph, which may be one of several in a step."""

    own: GroupedSteps
    joint: "JointSteps | None" = None
    """The step of several graphs that it is planned in."""
    is_known: bool = False
    """A step with it has ended."""
    is_apart: bool = False
    """It was said that nothing bounds the sum of it and of others."""
    is_chunk: bool = False
    """It is one of several stages of its rank in a pipeline."""

    def __post_init__(self) -> None:
        _pieces.add(self)

    @property
    def assembly(self) -> Assembly:
        """What runs the graph's own plan."""
        return self.own.assembly

    @property
    def runs_as_group(self) -> bool:
        """True where gradients leave when all of a half are made."""
        return self.joint is not None or self.own.runs_as_group

    @property
    def is_live(self) -> bool:
        """True while a backward of a step may still come."""
        joint = self.joint is not None and self.joint.is_live
        return joint or self.own.is_live

    def forward(self, args: list[Any]) -> list[Any]:
        """The forward's results; empties ``args``. Raises as ``Assembly.forward``."""
        stages = stages_around(args)
        self.is_chunk = stages.num_stages > 1
        if not self._is_watched:
            return self.own.forward(args)
        return _pieces.forward(self, args, stages)

    def backward(self, args: list[Any]) -> list[Any]:
        """The backward's results; empties ``args``. Raises as ``Assembly.backward``."""
        return _pieces.backward(self, args) if self._is_watched else self.own.backward(args)

    @property
    def _is_watched(self) -> bool:
        """True where all graphs of a step matter."""
        return self.is_chunk or self.assembly.config.memory_budget is not None

    def retire(self) -> None:
        """Let go of what is held for a model that is gone."""
        _pieces.remove(self)
        self.own.retire()


@dataclass(slots=True, eq=False)
class JointSteps:
    """The steps of several graphs by one plan."""

    pieces: tuple[Piece, ...]
    """Per member its graph."""
    known: PieceKnowledge
    members: GroupMembers
    planned: PlannedStep
    bound: GroupPlan
    reported: ReportedGroup
    memory: OutOfMemory
    """Explains what is refused beside the plan."""
    step: GroupStep | None = None
    """The live step; the last one where none is."""
    deviating: tuple[object, int] = (None, 0)
    """What the last steps were, where they are others than planned, and how many steps."""

    @classmethod
    def of(
        cls,
        pieces: tuple[Piece, ...],
        group: Group,
        members: GroupMembers,
        existing: int | None = None,
    ) -> "JointSteps":
        """Planned and bound, its memory taken, beside ``existing`` bytes of gradients.

        None: those that there are now. Raises Infeasible: no plan fits the budget.
        """
        graphs = tuple(dict.fromkeys(pieces))
        for piece in graphs:
            piece.assembly.known.collectives.take()
        existing = members.existing_gradient_bytes() if existing is None else existing
        fixed = replace(group.fixed, gradients=group.fixed.gradients + existing)
        known = PieceKnowledge(
            graphs=[piece.assembly.known for piece in graphs],
            members=[graphs.index(piece) for piece in pieces],
            group=replace(group, fixed=fixed),
        )
        first = pieces[0].assembly
        request = PlanRequest(shares=group.shares, host_store=first.request.host_store)
        config = request.applied_to(first.config)
        try:
            with dynamo.nothing_else_compiles():
                planned = plan_known(known, config, request)
        except Infeasible as error:
            about = _OF_PIPELINE if group.order else _OF_PIECES
            unseen = f". {_UNSEEN}" if members.is_assumed else ""
            raise Infeasible(
                f"{error}. {about.format(len(pieces))}{unseen}", floor_bytes=error.floor_bytes
            ) from None
        steps = [piece.assembly.lowered.cut for piece in pieces]
        bound = bind_group(planned, steps, config)
        for piece in graphs:
            piece.assembly.release()
        with fx_graphs.real_tensors():
            bound.reserve()
        lowering_s = sum(piece.assembly.lowered.lowering_s for piece in graphs)
        observed = Observed(planning_s=planned.planning_s, lowering_s=lowering_s)
        joint = cls(
            pieces=pieces,
            known=known,
            members=replace(members, existing_bytes=existing),
            planned=planned,
            bound=bound,
            reported=ReportedGroup.of_group(
                planned.plan,
                observed,
                num_instances=len(pieces),
                between_bytes=most_between(planned.problem),
                graphs=tuple(graph.assembly.reported.name for graph in graphs),
            ),
            memory=OutOfMemory(dump=first.config.dump),
        )
        bound.on_step_end, bound.before_copy = joint._count, joint._require_room_for_copy
        state.replace_group(None, joint.reported)
        return joint

    @property
    def is_live(self) -> bool:
        """True while a step of it holds the frame."""
        return self.step is not None and not self.step.is_over

    @property
    def is_pipeline(self) -> bool:
        """True where members are microbatches, in the order of their schedule."""
        return bool(self.members.group.order)

    def serves(self, pieces: tuple[Piece, ...], order: HalfOrder) -> bool:
        """True where a step of ``pieces`` is planned. Pieces of a model may leave some out."""
        if self.is_pipeline:
            return pieces == self.pieces and order == self.bound.order
        return _is_part(pieces, self.pieces)

    def place_of(self, piece: Piece, number: int) -> int | None:
        """Which member the forward of ``piece``, the step's ``number``-th, is; None: it is none."""
        if self.is_pipeline:
            known = number < len(self.pieces) and self.pieces[number] is piece
            live = self.step if self.is_live else None
            return number if known and (live is None or live.takes(number)) else None
        position = self.step.position if self.step is not None and self.is_live else 0
        places = (at for at, own in enumerate(self.pieces) if own is piece and at >= position)
        return next(places, None)

    def forward(self, member: int, args: list[Any]) -> list[Any]:
        """The results of a member's forward."""
        if not self.is_live:
            if not leases.any_live():
                state.step_begins()
            self.step = self.bound.begin()
        assert self.step is not None, "it has begun"
        with self.memory.explained(self.planned.problem, self.reported):
            return self.step.forward(member, args)

    def require_room(self, piece: Piece) -> None:
        """Raise Infeasible if a forward that the plan has no place for does not fit beside it."""
        plan, budget = self.planned.plan, self.planned.plan.budget_bytes
        waiting = (known.assembly.step.live + known.assembly.step.beyond for known in self.pieces)
        count = 1 + (sum(waiting) if self.is_pipeline else 0)
        own = piece.assembly.plan
        peak = plan.peak_bytes + count * (own.arena_bytes + own.fixed.outputs)
        if budget is not None and peak > budget:
            raise Infeasible(
                f"a forward that the plan of its step's {len(self.pieces)} graphs has no place for "
                f"needs {format_enough(peak)} > memory_budget {format_bytes(budget)}, and has not "
                "begun. Call the graphs in the order of the steps before, or raise memory_budget"
            )

    def count_existing(self) -> "JointSteps":
        """This, or planned again where gradients exist that the plan does not count."""
        members = self.members
        if members.existing_gradient_bytes() <= members.existing_bytes:
            return self
        return self.planned_again(members.group, is_assumed=members.is_assumed)

    def planned_again(self, group: Group, *, is_assumed: bool) -> "JointSteps":
        """The same graphs planned for what is known of ``group`` now."""
        members = replace(self.members, group=group, is_assumed=is_assumed)
        again = JointSteps.of(self.pieces, group, members)
        self.forget()
        return again

    def forget(self) -> None:
        """No step runs by this plan any more."""
        arena_of(self.bound.members[0].device).forget(self.bound.members[0].key)
        state.group_is_gone(self.reported)

    def _count(self, counted: StepCounters) -> None:
        before = self.reported
        self.reported = replace(
            before,
            offloaded_bytes=counted.offloaded_bytes,
            recomputed_bytes=counted.recomputed_bytes,
        )
        state.replace_group(before, self.reported)

    def _require_room_for_copy(self) -> None:
        """Raise Infeasible if a copy of the frame does not fit."""
        plan, budget = self.planned.plan, self.planned.plan.budget_bytes
        if budget is not None and plan.peak_bytes + plan.arena_bytes > budget:
            raise Infeasible(
                "backwards of a step of several graphs that run twice (retain_graph=True) or in "
                f"another order copy its frame: {format_enough(plan.peak_bytes + plan.arena_bytes)}"
                f" > memory_budget {format_bytes(budget)}. Call backward once for all, or raise "
                "memory_budget"
            )


@dataclass(slots=True, eq=False)
class _Pieces:
    """All graphs of the process that run under a budget, and the step that runs now."""

    graphs: "weakref.WeakSet[Piece]" = field(default_factory=weakref.WeakSet)
    watch: PiecesWatch | None = None
    seen: dict[tuple[Piece, ...], PiecesWatch] = field(default_factory=dict)
    """Steps that were watched, by their forwards, until a graph of theirs begins the next one."""
    num_looks: int = 0
    """Steps in which memory was looked at since a graph was compiled."""
    num_unplannable: int = 0
    """As of ``GroupedSteps``, of steps of several graphs."""
    numbers: dict[int, int] = field(default_factory=dict)
    """Number of a lease -> which forward of the step that is watched."""
    refused: JointSteps | None = None
    """The plan that had no place for the last forward, and no room beside it."""
    lock: threading.RLock = field(default_factory=threading.RLock)

    def add(self, piece: Piece) -> None:
        """A graph was compiled. What that takes is not the step's.

        Nor is a forward that nobody can run backward any more: who catches a refusal tries again.
        """
        if self._any_live():
            autograd.free_stopped_backward()
            gc.collect()
        with self.lock:
            for known in list(self.graphs):
                if known.assembly.step.heap is not None:
                    known.assembly.step.heap.pause()
            self.graphs.add(piece)
            self.num_looks = self.num_unplannable = 0
            if self.watch is not None:
                self.watch.stop()
                self.watch.samples, self.watch.learns = False, True
                self.watch.between.found.clear()

    def remove(self, piece: Piece) -> None:
        """No step of a graph will run any more."""
        with self.lock:
            self.graphs.discard(piece)
            self.seen = {key: seen for key, seen in self.seen.items() if piece not in key}
            if self.watch is not None and piece in self.watch.pieces:
                self.watch.stop()
                self.watch = None
            if piece.joint is not None:
                self._drop(piece.joint)

    def forward(self, piece: Piece, args: list[Any], stages: Stages) -> list[Any]:
        """The results of ``piece``'s forward."""
        with self.lock:
            piece.own.end_interlude()
            leaves = own_leaves(args)
            watch, number = self._enter(piece, leaves, stages)
            joint, member = piece.joint, self._member(watch, number)
            if joint is not None and member is None:
                autograd.free_stopped_backward()
                leases.end_refused()
                if not self._any_live():
                    watch, number = self._enter(piece, leaves, stages)
                    joint, member = piece.joint, self._member(watch, number)
            del leaves
            if joint is None or member is None:
                self._require_room(watch, piece)
        if joint is None or member is None:
            results = piece.own.forward(args)
        else:
            piece.assembly.unplanned_request = None
            results = joint.forward(member, args)
        with self.lock:
            half = piece.assembly.lowered.problem.halves[0]
            lease = leases.find(results[half.results.index(half.handle)])
            if lease is not None:
                self.numbers[lease.number] = number
            watch.end((False, number), results)
        return results

    def _any_live(self) -> bool:
        return any(known.is_live for known in list(self.graphs))

    def _enter(
        self, piece: Piece, leaves: Sequence[Any], stages: Stages
    ) -> tuple[PiecesWatch, int]:
        """A forward begins, of the live step or of the next one: its watch, and its number."""
        if self.watch is None or not self._any_live():
            self._begin_step(piece, stages)
        watch = self.watch
        assert watch is not None, "a step has begun"
        number = len(watch.pieces)
        watch.pieces.append(piece)
        watch.begin((False, number), leaves)
        return watch, number

    def _member(self, watch: PiecesWatch, number: int) -> int | None:
        """Which member of the planned step the forward is; None: it is none."""
        piece = watch.pieces[number]
        is_planned = piece.joint is not None and not watch.is_mixed
        return piece.joint.place_of(piece, number) if is_planned and piece.joint else None

    def backward(self, piece: Piece, args: list[Any]) -> list[Any]:
        """The results of ``piece``'s backward."""
        backward = piece.assembly.step.backward
        lease = leases.find(args[backward.arguments.index(backward.handle)])
        with self.lock:
            watch = self.watch
            number = None if lease is None else self.numbers.get(lease.number)
            del lease
            piece.own.end_interlude()
            if watch is not None and number is not None:
                watch.begin((True, number), args)
        results = piece.own.backward(args)
        with self.lock:
            if watch is not None and number is not None:
                watch.end((True, number), results)
                self._learn_at_end(watch)
        return results

    def _learn_at_end(self, seen: PiecesWatch) -> None:
        """Plan a pipeline's step as soon as all of it has run, as ``GroupedSteps`` does."""
        joint = seen.pieces[0].joint
        is_first = joint is None or joint.members.is_assumed
        is_cpu = seen.pieces[0].assembly.step.device.type == "cpu"
        if not (seen.is_pipeline and is_first and is_cpu and seen.is_step()):
            return
        if self._any_live():
            return
        seen.stop()
        with contextlib.suppress(MemoError, RuntimeError), torch.enable_grad():
            self._learn(seen, seen.existing_gradient_bytes())
            seen.is_learned = True

    def _begin_step(self, piece: Piece, stages: Stages) -> None:
        """No step is live: what was seen of the last one is planned for.

        Raises Infeasible: no plan fits the budget, now and before each step until one does.
        """
        seen, self.watch = self.watch, None
        self.numbers.clear()
        refused, self.refused = self.refused, None
        if refused is not None and not refused.is_pipeline:
            state.warn_once(OTHER_ORDER)
            self._drop(refused)
        if seen is not None:
            seen.stop()
            for known in seen.pieces:
                known.is_known = True
            if len(seen.pieces) > 1:
                self.num_unplannable = 0 if seen.is_step() else self.num_unplannable + 1
            if not seen.is_learned:
                self.seen[tuple(seen.pieces)] = seen
        for pieces in [pieces for pieces in self.seen if piece in pieces]:
            self._learn(self.seen[pieces])
            del self.seen[pieces]
        joint = piece.joint
        if joint is not None:
            self._take(joint, joint.count_existing())
            joint = piece.joint
        problem = piece.assembly.lowered.problem
        is_new = joint is None or joint.members.is_assumed
        on_cpu = piece.assembly.step.device.type == "cpu"
        is_one = len(self.graphs) < 2 and stages.num_stages < 2  # stages that are alike share one
        looks = is_new and on_cpu and not is_one and self.num_looks < MAX_LOOKS
        self.num_looks += looks
        alone = seen is not None and set(seen.pieces) == {piece} and piece.own.runs_as_group
        learns = is_new and not is_one and not alone  # then nothing is planned here
        learns = learns and self.num_unplannable < MAX_UNPLANNABLE
        self.watch = PiecesWatch(problem.halves[1], 0, {}, looks, learns)
        self.watch.is_pipeline, self.watch.is_part = stages.num_stages > 0, stages.num_stages > 1
        self.watch.follows_parameters = is_new and has_fsdp_modules()
        self.watch.keep(stages.kept())
        self.watch.num_forwards = stages.num_forwards if joint is None else 0

    def _learn(self, seen: PiecesWatch, existing: int | None = None) -> None:
        """Plan what was seen, where several graphs were live together.

        ``existing``: as for ``JointSteps.of``.
        """
        pieces = tuple(seen.pieces[: seen.num_members])
        is_joint = any(piece.joint for piece in pieces)
        is_one = len(set(pieces)) < 2 and not seen.is_part and not is_joint
        is_unseen = not seen.learns and not is_joint  # around its parameters nobody looked
        if is_one or is_unseen or any(piece not in self.graphs for piece in pieces):
            return
        if not seen.is_step():
            if seen.has_run() and not any(piece.joint for piece in pieces):
                self._leave_apart(seen)
            return
        known = {piece.joint for piece in pieces}
        joint = next(iter(known)) if len(known) == 1 else None
        if joint is not None and joint.serves(pieces, seen.order):
            joint.deviating = (None, 0)
            if pieces == joint.pieces and joint.members.is_assumed and seen.samples:
                group = seen.group(self._fixed(seen))
                is_other = group.interludes or group.passed != joint.members.group.passed
                if is_other:
                    self._take(joint, joint.planned_again(group, is_assumed=False))
                else:
                    joint.members = replace(joint.members, is_assumed=False)
            return
        if not any(known) and seen.fits_apart():
            return
        step = (pieces, seen.order)
        if any(known) and not self._persists(step, [found for found in known if found]):
            return
        group = seen.group(self._fixed(seen))
        found = [own for own in (reference() for reference in seen.parameters()) if own is not None]
        members = GroupMembers.of((), found, group, is_assumed=not seen.samples)
        made = self._made(seen, pieces, group, members, existing)
        if made is None:
            return
        for other in filter(None, known):
            self._drop(other)
        self._take(None, made)

    def _leave_apart(self, seen: PiecesWatch) -> None:
        """Graphs of a step are not planned together: each keeps the budget by itself."""
        if not seen.is_pipeline:
            state.warn_once(NO_ORDER)
            for piece in seen.pieces:
                piece.is_apart = True
                piece.assembly.keep_budget()
        elif seen.num_members >= seen.num_forwards:
            state.warn_once(NO_ORDER)
            for piece in seen.pieces:
                piece.assembly.keep_budget()

    def _made(
        self,
        seen: PiecesWatch,
        pieces: tuple[Piece, ...],
        group: Group,
        members: GroupMembers,
        existing: int | None,
    ) -> JointSteps | None:
        """The plan of what was seen. Raises Infeasible: no plan fits the budget.

        None for a pipeline's first step that does not fit: graphs were compiled in it, and torch
        made what it makes once. The next one shows what runs between the halves, and so the floor.
        """
        try:
            return JointSteps.of(pieces, group, members, existing)
        except Infeasible:
            on_cpu = pieces[0].assembly.step.device.type == "cpu"
            if not seen.is_pipeline or not on_cpu or self.num_looks >= PIPELINE_LOOKS:
                raise
            state.warn_once(NOT_YET)
            return None

    def _persists(self, step: object, joints: Sequence[JointSteps]) -> bool:
        """True once such steps, which no plan covers, came so often in a row."""
        times = max(
            (joint.deviating[1] for joint in joints if joint.deviating[0] == step), default=0
        )
        for joint in joints:
            joint.deviating = (step, times + 1)
        return times + 1 >= PERSISTS

    def _require_room(self, watch: PiecesWatch, piece: Piece) -> None:
        """A forward runs by its graph's own plan: beside others, say so, or refuse it."""
        others = [known for known in watch.pieces if known is not piece and known.is_live]
        joint = piece.joint
        if joint is not None and (joint.is_live or joint.is_pipeline):
            self.refused = joint
            joint.require_room(piece)
            self.refused = None
            if piece.assembly.step.live < piece.assembly.step.max_inflight:
                state.count_unplanned()  # beyond that it is counted where it takes its memory
        elif others and watch.is_pipeline:
            state.warn_once(PIPELINE_FIRST_STEP)
        elif others and piece.is_known and (other := others[0].joint) is not None:
            other.require_room(piece)
        elif others and not piece.is_apart and not watch.fits_apart():
            state.warn_once(FIRST_STEP)

    def _take(self, before: JointSteps | None, joint: JointSteps) -> None:
        """From now on the graphs of ``joint`` run by it."""
        if before is not joint:
            for piece in joint.pieces:
                piece.joint = joint
                piece.own.hand_over(is_part=True)

    def _drop(self, joint: JointSteps) -> None:
        for piece in joint.pieces:
            if piece.joint is joint:
                piece.joint = None
                piece.own.hand_over(is_part=False)
        joint.forget()

    def _fixed(self, seen: PiecesWatch) -> FixedBytes:
        """What all graphs hold beside the frame, and the model around them."""
        assemblies = [piece.assembly for piece in dict.fromkeys(seen.pieces)]
        found = [own for own in (reference() for reference in seen.parameters()) if own is not None]
        return replace(
            fixed_beside(found, assemblies[0].config, seen.gathered_bytes),
            buffers=sum(own.lowered.cut.facts.fixed_bytes(0).buffers for own in assemblies),
            libraries=max(own.lowered.problem.fixed.libraries for own in assemblies),
        )


_pieces = _Pieces()


def _is_part(pieces: tuple[Piece, ...], of: tuple[Piece, ...]) -> bool:
    """True where ``pieces`` come in ``of`` in the same order."""
    rest = iter(of)
    return all(any(piece is other for other in rest) for piece in pieces)
