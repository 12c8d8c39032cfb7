"""A joint step that is planned and runs: its members in one frame, by one plan, under one budget.

Members are told apart by their graph and by the order of calls, confirmed by where the first
parameter of each lies. A forward that the plan has no place for runs by its graph's own plan, in
ordinary memory, if the budget allows.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from memo_runtime.arena import arena_of
from memo_runtime.group_steps import GroupPlan, GroupStep
from memo_runtime.leases import StepCounters, leases

from memo_compile.driver.around import parameters_around
from memo_compile.driver.bind import bind_group
from memo_compile.driver.facts import gradient_bytes
from memo_compile.driver.joint_knowledge import JointKnowledge
from memo_compile.driver.out_of_memory import OutOfMemory
from memo_compile.driver.plan_step import plan_shared
from memo_compile.driver.stages import PlannedStep, PlanRequest
from memo_compile.errors import Infeasible, MemoError
from memo_compile.reporting import state
from memo_compile.reporting.write import write_pictures
from memo_compile.step.interludes import most_between
from memo_compile.step.joint_step import HalfOrder, JointStep
from memo_compile.step.plans import Observed, ReportedGroup
from memo_compile.torch_private import dynamo, fx_graphs
from memo_compile.units import format_bytes, format_enough

if TYPE_CHECKING:
    from memo_compile.driver.part import StepPart

log = logging.getLogger("memo")

_OF_GRAPHS = (
    "These are {} graphs of one step, planned as one (graph breaks or DistributedDataParallel's "
    "buckets cut it): one whole graph needs less"
)
_OF_PIPELINE = "These are the {} forwards of a pipeline's rank, with their backwards, in its order"
_UNSEEN = (
    "What runs between their halves is seen in the step behind: the floor is at least this much"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JointMembers:
    """The members of a joint step, and their parameters, which it does not keep alive."""

    joint: JointStep
    """Without gradients of steps before."""
    keys: tuple[int | None, ...]
    """Where the first parameter of each member lies."""
    parameters: tuple[weakref.ref[Any], ...]
    """Of all members, and of the model around them."""
    existing_bytes: int = 0
    """Gradients of steps before that are planned for."""
    is_assumed: bool = False
    """What lies between the members was not seen yet."""
    num_dropped: int = 0
    """Of a checkpoint: how many forwards were dropped before the first was run again."""

    @classmethod
    def of(
        cls,
        joint: JointStep,
        keys: tuple[int | None, ...],
        parameters: Sequence[torch.nn.Parameter],
        *,
        is_assumed: bool,
        num_dropped: int = 0,
    ) -> "JointMembers":
        """Returns the members, which have ``parameters``."""
        of_model = (*parameters, *parameters_around(parameters))
        return cls(
            joint=joint,
            keys=keys,
            parameters=tuple(weakref.ref(parameter) for parameter in of_model),
            is_assumed=is_assumed,
            num_dropped=num_dropped,
        )

    def existing_gradient_bytes(self) -> int:
        """Returns the bytes of the gradients that exist now."""
        alive = [reference() for reference in self.parameters]
        return gradient_bytes(list({id(parameter): parameter for parameter in alive}.values()))


def joint_request(parts: Sequence["StepPart"], members: JointMembers) -> PlanRequest:
    """Returns what a plan of ``members``, which are of ``parts``, must count."""
    fixed = members.joint.fixed
    counted = replace(fixed, gradients=fixed.gradients + members.existing_bytes)
    host_store = parts[0].assembly.request.host_store
    return PlanRequest(joint=replace(members.joint, fixed=counted), host_store=host_store)


@dataclass(slots=True, eq=False)
class JointStepPlan:
    """The plan of a joint step, bound to the runtime, and the step of it that runs."""

    parts: tuple["StepPart", ...]
    """Per member its graph."""
    members: JointMembers
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
    def plan_and_bind(
        cls, parts: tuple["StepPart", ...], members: JointMembers, replaced: Sequence[Self] = ()
    ) -> Self:
        """Plans ``members``, frees the memory of the ``replaced`` plans, and takes that of the new.

        Raises Infeasible: no plan fits the budget, and those stay.
        """
        graphs, config = tuple(dict.fromkeys(parts)), parts[0].assembly.config
        for part in graphs:
            part.assembly.known.collectives.take()
        request = joint_request(parts, members)
        assert request.joint is not None, "it is of a joint step"
        knowledge = [part.assembly.known for part in graphs]
        try:
            with dynamo.nothing_else_compiles():
                planned = plan_shared(
                    JointKnowledge(graphs=knowledge, joint=request.joint),
                    request.applied_to(config),
                    request,
                )
        except Infeasible as error:
            raise _explained(error, parts, members) from None
        for plan in replaced:
            plan.forget()
        return cls.bind(parts, members, planned)

    @classmethod
    def bind(
        cls, parts: tuple["StepPart", ...], members: JointMembers, planned: PlannedStep
    ) -> Self:
        """Binds what is ``planned`` for ``members`` to the runtime, and takes its memory."""
        graphs, first = tuple(dict.fromkeys(parts)), parts[0].assembly
        config = first.request.applied_to(first.config)
        bound = bind_group(planned, [part.assembly.lowered.cut for part in parts], config)
        if len(graphs) == 1:
            bound.members[0].comm_times = first.known.collectives.times
        for part in graphs:
            part.assembly.release()
        with fx_graphs.real_tensors():
            bound.reserve()
        heap, fixed = bound.members[0].heap, members.joint.fixed
        if heap is not None and members.num_dropped:  # dropped forwards free so much and take it
            heap.allowed_bytes += fixed.inputs + fixed.gradients
        lowering_s = sum(part.assembly.lowered.lowering_s for part in graphs)
        reported = ReportedGroup.of_group(
            planned.plan,
            Observed(planning_s=planned.planning_s, lowering_s=lowering_s),
            num_instances=len(parts),
            between_bytes=most_between(planned.problem),
            graphs=tuple(part.assembly.reported.name for part in graphs),
        )
        memory = OutOfMemory(dump=first.config.dump)
        plan = cls(parts, members, planned, bound, reported, memory)
        bound.on_step_end, bound.before_copy = plan._count, plan._require_room_for_copy
        plan._dump(first.config.dump)
        state.replace_group(None, reported)
        return plan

    @property
    def is_live(self) -> bool:
        """True while a step of it holds the frame."""
        return self.step is not None and not self.step.is_over

    @property
    def is_ordered(self) -> bool:
        """True where it serves one order of halves only; else backwards in the opposite order."""
        return bool(self.members.joint.order)

    def serves(self, parts: tuple["StepPart", ...], order: HalfOrder, num_dropped: int) -> bool:
        """True where a step of ``parts`` can run by this plan.

        A step in an ``order`` of halves must be the planned one; of another, members may be left
        out. Before it ``num_dropped`` forwards of a checkpoint were dropped, to be run again: the
        plan of one step of a checkpoint counts what so many take beside it, and no more.
        """
        if self.is_ordered or order:
            return parts == self.parts and order == self.bound.order
        if num_dropped > self.members.num_dropped > 0:
            return False
        planned = iter(self.parts)
        return all(any(part is other for other in planned) for part in parts)

    def place_of(self, part: "StepPart", key: int | None) -> int | None:
        """Returns which member a forward of ``part`` is, whose first parameter lies at ``key``.

        None: it is none, because the plan has no place for it, or that is taken. Members of one
        graph are alike: one whose parameter nobody knows takes the next place.
        """
        step, keys = self.step if self.is_live else None, self.members.keys
        of_graph = [at for at, other in enumerate(self.parts) if other is part]
        free = [at for at in of_graph if step is None or step.takes(at)]
        if key is not None and key in {keys[at] for at in of_graph}:
            free = [at for at in free if keys[at] == key]
        return free[0] if free else None

    def begin_forward(
        self, member: int, *, follows: bool, stays: bool
    ) -> Callable[[list[Any]], list[Any]]:
        """Takes the member's place, in a new frame if none is live; returns what runs it.

        ``follows`` and ``stays`` as of ``GroupPlan.begin``.
        """
        if not self.is_live:
            if not leases.any_live():
                state.step_begins()
            self.step = self.bound.begin(follows=follows, stays=stays)
        assert self.step is not None, "it has begun"
        with self.memory.explained(self.planned.problem, self.reported):
            forward = self.step.begin_forward(member)

        def run(args: list[Any]) -> list[Any]:
            with self.memory.explained(self.planned.problem, self.reported):
                return forward(args)

        return run

    def require_room(self, part: "StepPart") -> None:
        """Raises Infeasible if a forward that the plan has no place for does not fit beside it."""
        plan, budget = self.planned.plan, self.planned.plan.budget_bytes
        state.add_note(
            f"a forward is no member of its step, which is planned with {len(self.parts)}: it runs "
            "in ordinary memory"
        )
        peak = plan.peak_bytes + _alone_bytes(part)
        for other in dict.fromkeys(self.parts):
            peak += (other.assembly.step.live + other.assembly.step.beyond) * _alone_bytes(other)
        if budget is not None and peak > budget:
            raise Infeasible(
                f"a forward that the plan of its step's {len(self.parts)} members has no place for "
                f"needs {format_enough(peak)} > memory_budget {format_bytes(budget)}, and has not "
                "begun. Call the graphs in the order of the steps before, name modules that share "
                "a graph with memo_compile.group, or raise memory_budget"
            )

    def forget(self) -> None:
        """Frees the memory of a plan by which no step runs any more."""
        arena_of(self.bound.members[0].device).forget(self.bound.members[0].key)
        state.group_is_gone(self.reported)

    def _dump(self, folder: str | None) -> None:
        """Writes the plan and its pictures, beside the dumps of its graphs."""
        if folder is None:
            return
        name = f"{self.planned.plan.name}-group"
        try:
            write_pictures(Path(folder) / name, self.planned.problem, self.planned.plan)
        except MemoError as error:  # a dump that fails does not lose the plan
            log.warning("memo: the plan of a joint step could not be written: %s", error)

    def _count(self, counted: StepCounters) -> None:
        """Reports what the step that just ended has moved."""
        before = self.reported
        self.reported = replace(
            before,
            offloaded_bytes=counted.offloaded_bytes,
            recomputed_bytes=counted.recomputed_bytes,
            measured_s=counted.measured_s,
        )
        state.replace_group(before, self.reported)

    def _require_room_for_copy(self) -> None:
        """Raises Infeasible if a copy of the frame does not fit."""
        plan, budget = self.planned.plan, self.planned.plan.budget_bytes
        if budget is not None and plan.peak_bytes + plan.arena_bytes > budget:
            raise Infeasible(
                "backwards of a joint step that run twice (retain_graph=True) or in another order "
                f"copy its frame: {format_enough(plan.peak_bytes + plan.arena_bytes)} > "
                f"memory_budget {format_bytes(budget)}. Call backward once for all, or raise "
                "memory_budget"
            )


def _alone_bytes(part: "StepPart") -> int:
    """Returns what a forward that waits for its backward takes by the graph's own plan."""
    plan = part.assembly.plan
    return plan.arena_bytes + plan.fixed.outputs


def _explained(error: Infeasible, parts: Sequence["StepPart"], members: JointMembers) -> Infeasible:
    """Returns ``error``, which also says what does not fit together."""
    if any(part.is_stage for part in parts):
        about = f". {_OF_PIPELINE.format(len(parts))}"
    elif len({*parts}) > 1:
        about = f". {_OF_GRAPHS.format(len(parts))}"
    else:
        return error
    unseen = f". {_UNSEEN}" if members.is_assumed else ""
    return Infeasible(f"{error}{about}{unseen}", floor_bytes=error.floor_bytes)
