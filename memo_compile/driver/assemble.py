"""Runs a planned step, and replans it when steps show what no plan could know before.

For example: gradients that the user keeps from the step before, logits that are still held when
the next forward begins, memory that the device refuses, collectives that were measured meanwhile.
"""

import contextlib
import functools
import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from memo_runtime.arena import ArenaError, arena_of
from memo_runtime.backward_run import BackwardRun
from memo_runtime.heap import COUNTED_LATE_BYTES
from memo_runtime.leases import StepCounters, leases
from memo_runtime.pinned_memory import HostStoreError
from memo_runtime.run_step import StepPlan, begin_backward, ran_before, run_forward

from memo_compile.config import MemoConfig
from memo_compile.driver.bind import bind_step
from memo_compile.driver.early_gradients import (
    Gates,
    adds_all,
    gates_here,
    is_captured,
    own_leaves,
    prove,
)
from memo_compile.driver.facts import gradient_bytes
from memo_compile.driver.gradient_watch import GradientWatch, HandedGradients
from memo_compile.driver.joint_plan import JointMembers
from memo_compile.driver.knowledge import StepKnowledge, gradients_at_once, leaving_values
from memo_compile.driver.layer_weights import move_back_to_host
from memo_compile.driver.library_buffers import Product, keeps_kernels, library_buffers, products_of
from memo_compile.driver.out_of_memory import OutOfMemory
from memo_compile.driver.plan_step import plan_step
from memo_compile.driver.stages import LoweredStep, PlannedStep, PlanRequest
from memo_compile.driver.step_messages import NO_FLOOR, NO_SMALLER, no_room, not_gone, taken_beyond
from memo_compile.driver.step_planner import LOSS_OUTSIDE
from memo_compile.driver.user_outputs import (
    LossWatch,
    ResultWatch,
    held_bytes,
    outside_loss_bytes,
    result_gradients,
    result_storages,
)
from memo_compile.errors import Infeasible, MemoError
from memo_compile.reporting import state
from memo_compile.step.movable import StepCosts
from memo_compile.step.plans import Observed, Plan, ReportedPlan
from memo_compile.step.problem import Problem
from memo_compile.step.residency import (
    retained_peak_bytes,
    running_peak_bytes,
    step_constant_bytes,
    waiting_step_bytes,
)
from memo_compile.torch_private import autograd, dynamo, fx_graphs
from memo_compile.units import format_bytes, format_enough

log = logging.getLogger("memo")

WARM_UP_STEPS = 3
"""Steps of a graph after which one of them took what a step takes: the first ones warm up."""

MAX_REFUSALS = 6
"""How often a step is replanned after refused allocations, each time for fewer bytes."""

TOLERANCE = 0.005
"""An excess below this share of the budget is not reported: the C allocator causes as much."""

MIN_KEPT_BYTES = 2**20
"""Fewer bytes of kept results cause no new plan: losses and small statistics are always held."""


@dataclass(slots=True, kw_only=True)
class Assembly:
    """A planned step that runs, and what it takes to replan it."""

    lowered: LoweredStep
    config: MemoConfig
    known: StepKnowledge
    request: PlanRequest = field(default_factory=PlanRequest)
    """The last request that got a plan, with all that steps have shown so far."""
    unplanned_request: PlanRequest | None = None
    """The request of the last forward, where it got no plan; in other tiles there may be one."""
    retile: Callable[[Infeasible], None] | None = None
    """Compiles the graph anew, in tiles in which the last request fits, for later steps."""
    planned: PlannedStep
    plan: Plan = field(init=False)
    """The plan of ``planned``; its peak also counts what later steps found beside it."""
    observed: Observed = field(init=False)
    step: StepPlan
    """``planned``, as the runtime runs it."""
    joint: PlannedStep | None = None
    """The plan of the joint step that the request names, made with the tiles of this step."""
    members: JointMembers | None = None
    """The members of that joint step."""
    reported: ReportedPlan = field(init=False)
    """What the report shows of this step, where it shows it."""
    gradients: GradientWatch = field(default_factory=GradientWatch)
    """What steps have shown of how gradients leave."""

    _results: ResultWatch = field(default_factory=ResultWatch)
    _losses: LossWatch = field(init=False)
    _memory: OutOfMemory = field(init=False)
    _followed_results: tuple[int, ...] = ()
    """Positions of the forward's results that keep alive ordinary memory which it allocated."""
    _held_result_bytes: int = 0
    """Bytes of results planned as dropped that were held when their backward had ended."""
    _planned_without_earlier: PlannedStep | None = None
    """The last plan that counts no results of earlier steps."""
    _said_unplanned_memory: bool = False
    _is_watched: bool = False
    """The forward that runs is of the first step of a group."""
    _warmup_products: frozenset[Product] = frozenset()
    """Products that run once before a step, so that the BLAS library has its buffers (CPU)."""
    _warmup_regions: tuple[str, ...] = ()
    """Regions that run once before a step, so that libraries have their kernels (CPU)."""
    _failed_warmups: Mapping[str, str] = field(default_factory=dict)
    """Those of ``_warmup_regions`` that could not run by themselves, and why."""
    after_steps: Callable[["Assembly"], None] = lambda assembly: None
    """Called once, when WARM_UP_STEPS have run."""
    _num_steps: int = 0
    _leaving: tuple[int, ...] = ()
    """Gradients, by position, that the last forward expected to be gone once autograd has them."""
    _existing_bytes: int = 0
    """Bytes of gradients that existed when the last forward began."""
    _peaks: dict[Any, int] = field(default_factory=dict)
    """Cache of ``_peak_with``."""

    def __post_init__(self) -> None:
        self._memory = OutOfMemory(dump=self.config.dump)
        self._losses = LossWatch.of(self.lowered.cut.backward.half_graph.graph)
        self._run_later_steps_by(self.planned, self.step)
        self.reported = ReportedPlan.of(self.plan, self.observed)

    def _report(self) -> None:
        """Shows the plan and the counters of now in the report."""
        before, self.reported = self.reported, ReportedPlan.of(self.plan, self.observed)
        state.replace_plan(before, self.reported)

    def _run_later_steps_by(self, planned: PlannedStep, bound: StepPlan) -> None:
        """Makes ``planned`` the plan of later steps; ``bound`` is what the runtime runs of it."""
        if not planned.problem.fixed.earlier_outputs:
            self._planned_without_earlier = planned
        self.planned, self.plan, self.step, self._peaks = planned, planned.plan, bound, {}
        self.observed = Observed(planning_s=planned.planning_s, lowering_s=self.lowered.lowering_s)
        results = self.lowered.cut.forward.results
        self._followed_results = tuple(result_storages(planned.problem, results))
        bound.on_step_end, bound.on_unplanned = self._count, self._say_unplanned
        bound.comm_times = self.known.collectives.times
        # CPU under a budget: libraries allocate what they keep for good before a step, not in it.
        if bound.heap is not None and planned.plan.budget_bytes is not None:
            called = {call.region for call in planned.problem.calls}
            graphs = self.known.graphs().items()
            called_graphs = {name: graph.gm for name, graph in graphs if name in called}
            self._warmup_products = products_of(called_graphs.values())
            self._warmup_regions = tuple(
                name for name, gm in called_graphs.items() if keeps_kernels(gm)
            )

    @property
    def problem(self) -> Problem:
        """The planned step: its calls and values."""
        return self.planned.problem

    def costs(self) -> StepCosts | None:
        """Returns the seconds of regions and copies; None where no decision needed them."""
        return self.known.known_costs(self.request.applied_to(self.config).host_store)

    def _replan(
        self,
        request: PlanRequest | None = None,
        *,
        existing_bytes: int | None = None,
        leaving: tuple[int, ...] | None = None,
        earlier_bytes: int = 0,
        none_exist: bool = False,
        policy: str | None = None,
    ) -> PlannedStep:
        """Plans the step for ``request`` (by default the last one) and for what exists beside it.

        That is ``existing_bytes`` of gradients (by default those that exist now), and
        ``earlier_bytes`` of results of earlier steps. Gradients count in all later plans too,
        because they may be kept again; with ``none_exist`` none do, whatever the options say.
        Raises Infeasible: no plan fits; the last request stays.
        """
        config = self.config if policy is None else replace(self.config, policy=policy)
        if existing_bytes is None:
            existing_bytes = self.lowered.cut.facts.existing_gradient_bytes()
        request = replace(
            request or self.request,
            existing_gradient_bytes=max(self.request.existing_gradient_bytes, existing_bytes),
            none_exist=none_exist,
            leaving=self.request.leaving if leaving is None else leaving,
            earlier_output_bytes=earlier_bytes,
        )
        try:
            with dynamo.nothing_else_compiles():
                planned = plan_step(self.lowered, config, request, self.known)
        except Infeasible:
            self.unplanned_request = request
            raise
        self.request, self.unplanned_request = request, None
        return planned

    def return_weights(self, inputs: Sequence[Any]) -> None:
        """Moves host weights back that the program has moved to the device since, before a step.

        They are among ``inputs``. Raises HostStoreError: the memory was refused.
        """
        names = self.problem.host_weights
        if names and not leases.any_live():
            move_back_to_host(self.lowered.cut, names, self.config, inputs)

    def forward(self, args: list[Any], *, watched: bool = False) -> list[Any]:
        """Runs the forward and returns its results; empties ``args``.

        Replans the step first where earlier steps call for it. A ``watched`` step, the first of a
        group, may run beside others. Raises Infeasible before it would break the budget.
        """
        if not leases.any_live():
            state.step_begins()
        self.unplanned_request = None
        self._is_watched = watched
        gates, leaves = prove(args), own_leaves(args)
        if not watched:
            self._require_room_beside_others()
        self._use_measured_collectives()
        self._count_outside_loss()
        self._count_earlier_tensors(leaves, is_early=gates is not None and gates.is_proved)
        self._count_held_results()
        library_buffers.require(self._warmup_products)
        self._failed_warmups = self.known.require_ran(self._warmup_regions)
        if gates is not None:
            gates.watch = self.gradients.follow(leaves)
        del leaves
        with self._memory.explained(self.problem, self.reported):
            results = run_forward(self.step, args)
        self._results.returned([results[position] for position in self._followed_results])
        return results

    def backward(self, args: list[Any], *, leaves_early: bool = True) -> list[Any]:
        """Runs the backward and returns its results; empties ``args``. Raises as ``forward``.

        Without ``leaves_early`` all gradients leave at the end, and nothing is refused: so the
        first step of a group runs, while it is watched.
        """
        keep_graph = autograd.keep_graph()
        if self._may_have_outside_loss():
            self._losses.look(args)
        gates = gates_here() if leaves_early and not keep_graph else None
        self._require_room(
            args, keep_graph=keep_graph, stays=gates is None, is_part=not leaves_early
        )
        with self._memory.explained(self.problem, self.reported):
            run = begin_backward(self.step, args, keep_graph=keep_graph)
        if gates is not None and run.graph is None:
            return self._begin_in_parts(gates, run)
        with self._memory.explained(self.problem, self.reported):
            results = run.rest(range(len(run.plan.backward.results)))
        self._backward_ended()
        return results

    def _begin_in_parts(self, gates: Gates, run: BackwardRun) -> list[Any]:
        """Runs the first part of the backward, and returns its gradients; None for all others.

        Later parts run when autograd reaches their gates (``driver.early_gradients``).
        """
        watch = gates.watch
        assert watch is not None, "its forward ran"
        watch.begin(follows=adds_all())

        def run_part(number: int) -> list[Any]:
            part, is_last = gates.parts[number], number == len(gates.parts) - 1
            self._require_gone(watch)
            with self._memory.explained(self.problem, self.reported):
                gradients = run.rest(part.inputs) if is_last else run.part(part.inputs, part.beside)
            if is_last:
                gates.run_part = None
                self._backward_ended()
            else:
                watch.handed(part.inputs, gradients)
            return gradients

        results: list[Any] = [None] * len(run.plan.backward.results)
        for position, value in zip(gates.parts[0].inputs, run_part(0), strict=True):
            results[position] = value
        gates.begin(run, run_part)
        return results

    def _require_gone(self, watch: HandedGradients) -> None:
        """Learns which handed gradients are gone. Raises Infeasible: one stays, and does not fit.

        For example the gradient of a weight that other code uses too.
        """
        waiting = dict(watch.still_there())
        self.gradients.learn(tuple(watch.used_up()), waiting)
        peak, budget = self.plan.peak_bytes + sum(waiting.values()), self.plan.budget_bytes
        if budget is not None and waiting.keys() & set(self._leaving) and peak > budget:
            raise Infeasible(not_gone(peak, budget, sum(waiting.values())), floor_bytes=peak)

    def _backward_ended(self) -> None:
        """Notes what is still in memory when a backward has ended."""
        self._say_unplanned_memory()
        self._memory.step_ended(self.step.device)
        held_bytes = self._results.end()
        if not self.problem.keeps_outputs:
            self._held_result_bytes = held_bytes

    def _say_unplanned_memory(self) -> None:
        """Says once that memory which the graph does not know of broke the budget (CPU)."""
        heap, budget = self.step.heap, self.plan.budget_bytes
        if heap is None or budget is None or self._said_unplanned_memory:
            return
        fixed = self.plan.fixed  # what may exist before the step, and may be made beside it
        before_step = (fixed.gradients - fixed.new_gradients) + fixed.earlier_outputs
        unplanned = heap.beyond_bytes - before_step
        seen_bytes = self.plan.peak_bytes + max(0, unplanned - COUNTED_LATE_BYTES)
        if seen_bytes > budget * (1 + TOLERANCE):
            self._said_unplanned_memory = True
            state.warn_once(taken_beyond(unplanned, self._failed_warmups))

    def _require_room_beside_others(self) -> None:
        """Raises Infeasible if a forward beyond the planned frames does not fit beside them."""
        step, budget = self.step, self.plan.budget_bytes
        if budget is None or step.live < step.max_inflight:
            return
        autograd.free_stopped_backward()
        leases.end_refused()
        gc.collect()  # which ends the steps that nobody holds any more
        if step.live < step.max_inflight:
            return
        waiting_bytes = (step.beyond + 1) * waiting_step_bytes(self.problem, self.plan.arena_bytes)
        peak = self.plan.peak_bytes + waiting_bytes
        if peak > budget:
            count = step.live + step.beyond + 1
            raise Infeasible(
                f"{count} forwards of one graph wait for their backward, which needs "
                f"{format_enough(peak)} > memory_budget {format_bytes(budget)}; this one has not "
                f"begun. Call backward after each forward, let go of a step whose backward will "
                f"not run (del loss), or set max_inflight={count}, so that all are planned "
                f"together. {NO_FLOOR}"
            )

    def _require_room(
        self, args: list[Any], *, keep_graph: bool, stays: bool, is_part: bool
    ) -> None:
        """Raises Infeasible if a backward does not fit beside what exists though no plan counts it.

        That is: results that are held; retain_graph's copy; gradients that do not leave early
        (``stays``), or not into ``.grad``. A step that ``is_part`` of a group is not refused: other
        members hold its results.
        """
        plan, problem = self.plan, self.problem
        planned_results, counted_args = plan.fixed.earlier_outputs, args
        if problem.keeps_outputs:  # of this step, and of those that wait for their backward
            step_results = held_bytes(problem, self.lowered.cut.forward.results)
            planned_results += problem.live_steps * step_results
            counted_args = []
        held = max(0, self._results.begin_backward(counted_args) - planned_results)
        if is_part:
            return
        second_gradients = plan.fixed.new_gradients if ran_before(self.step, args) else 0
        staying = 0
        if self._leaving and (stays or is_captured()):
            problem = self._problem_with(self._existing_bytes, ())
            staying = max(0, self._peak_with(self._existing_bytes, ()) - plan.peak_bytes)
        copied = retained_peak_bytes(problem, plan) - plan.peak_bytes if keep_graph else 0
        peak = plan.peak_bytes + held + second_gradients + staying + copied
        budget = plan.budget_bytes
        if budget is not None and peak > budget:
            message = no_room(
                peak,
                budget,
                held=held,
                second_gradients=second_gradients,
                staying=staying,
                copied=copied,
                keeps_outputs=problem.keeps_outputs,
            )
            raise Infeasible(message, floor_bytes=None if copied else peak)
        if peak > plan.peak_bytes and (copied or budget is not None):
            self.plan = replace(plan, peak_bytes=peak)
            self._report()

    def reserve(self) -> None:
        """Allocates the step's frames now, so that a refusal does not come in the first step.

        After a refusal the step is replanned, ``MAX_REFUSALS`` times at most: with pageable host
        memory where pinned was refused, else for fewer bytes. The report says so. Raises
        ArenaError, HostStoreError: the memory of every plan that was tried was refused.
        """
        for attempt in range(MAX_REFUSALS + 1):
            try:
                with fx_graphs.real_tensors():
                    self.step.reserve()
                return
            except (ArenaError, HostStoreError) as error:
                refused = error.with_traceback(None)  # it would keep a refused arena alive
            if attempt == MAX_REFUSALS:
                raise type(refused)(
                    f"{refused}; the step was planned again {MAX_REFUSALS} times, each time for "
                    "less, and may fit with a lower memory_budget"
                )
            arena_of(self.step.device).forget(self.step.key)  # regions are timed in that memory
            if self.step.host_store == "pinned" and isinstance(refused, HostStoreError):
                self._plan_pageable(refused)
            else:
                self._plan_smaller(refused)

    def _plan_pageable(self, refused: HostStoreError) -> None:
        """Replans with the speed of copies through pageable memory, instead of pinned."""
        self.request = replace(self.request, host_store="shm")
        planned = self._replan(earlier_bytes=self.request.earlier_output_bytes)
        if planned.problem.host_bytes:
            state.warn_once(f"copies go through pageable memory and may block: {refused}")
        self._bind_replanned(planned)

    def _plan_smaller(self, refused: ArenaError | HostStoreError) -> None:
        """Replans for fewer bytes than what was refused. Raises ``refused``: no plan is smaller.

        Each refusal lowers the bound on what the step adds to its constants by a quarter of the
        refused arena, or the bound on host memory by a quarter.
        """
        plan, host_bytes = self.plan, self.problem.host_bytes
        self.request = self._smaller_request(refused)
        try:
            planned = self._replan(earlier_bytes=self.request.earlier_output_bytes)
        except Infeasible as error:
            raise type(refused)(f"{refused}; {NO_SMALLER}: {error}") from None
        if isinstance(refused, ArenaError) and planned.plan.arena_bytes >= plan.arena_bytes:
            planned = self._with_smaller_arena(planned)
        sizes = (planned.plan.arena_bytes, planned.problem.host_bytes)
        shrinks = sizes[0] < plan.arena_bytes or sizes[1] < host_bytes
        if not shrinks and planned.plan.peak_bytes >= plan.peak_bytes:
            raise type(refused)(f"{refused}; {NO_SMALLER}")
        arena, host = (format_bytes(size) for size in sizes)
        state.warn_once(f"{refused}. Planned again: arena {arena}, host memory {host}")
        self._bind_replanned(planned)

    def _with_smaller_arena(self, planned: PlannedStep) -> PlannedStep:
        """Returns ``planned`` or full recomputation, whichever has the smaller arena.

        A plan with a lower peak may have an arena as large: its unused pages are in no peak.
        """
        if self.config.policy in ("auto", "greedy"):
            with contextlib.suppress(Infeasible):
                recomputing = self._replan(
                    earlier_bytes=self.request.earlier_output_bytes, policy="full-recompute"
                )
                return min(planned, recomputing, key=lambda step: step.plan.arena_bytes)
        return planned

    def _smaller_request(self, refused: ArenaError | HostStoreError) -> PlanRequest:
        """Returns the last request, with less memory granted than what was refused."""
        if isinstance(refused, ArenaError):
            step_bytes = self.plan.peak_bytes - step_constant_bytes(self.problem)
            if self.request.granted_step_bytes is not None:
                step_bytes = min(self.request.granted_step_bytes, step_bytes)
            granted = step_bytes - self.plan.arena_bytes // 4
            return replace(self.request, granted_step_bytes=granted)
        host_bytes = self.problem.host_bytes
        granted = min(self.request.granted_host_bytes or host_bytes, host_bytes) * 3 // 4
        return replace(self.request, granted_host_bytes=granted)

    def retire(self) -> None:
        """Frees the step's memory, and its place in the report, when its model is gone."""
        self.release()
        state.plan_is_gone(self.reported)

    def release(self) -> None:
        """Frees the step's frames. A step that still runs allocates them again."""
        arena_of(self.step.device).forget(self.step.key)

    def follow(self, before: "Assembly") -> None:
        """Takes over from ``before``, the same graph in other tiles: its results may be held."""
        self._results, self.members = before._results, before.members

    def _count_earlier_tensors(self, leaves: Sequence[Any], *, is_early: bool) -> None:
        """Counts gradients and results of earlier steps that exist beside those of this step.

        At compile time there are none, and nobody knows whether the user keeps them. A step that
        no longer fits its budget is replanned. ``leaves`` are the inputs in front of all gates;
        ``is_early``: their gradients may leave early. Raises Infeasible: no plan fits.
        """
        existing_bytes, is_alone = gradient_bytes(leaves), self.step.live == 0
        leaving = self.gradients.leaving(leaves) if is_early else ()
        if is_alone and not existing_bytes and set(leaving) - set(self.request.leaving):
            self._plan_with_leaving(leaving)
        held_bytes = lasting_bytes = 0  # earlier results; those that this forward's do not replace
        if is_alone and self.plan.budget_bytes is not None:
            held_bytes, lasting_bytes = self._results.begin()
            smaller_plan = self._planned_without_earlier
            if not lasting_bytes and self.plan.fixed.earlier_outputs and smaller_plan is not None:
                self._rebind(smaller_plan)
        plan = self.plan
        fixed = replace(
            plan.fixed,
            gradients=max(plan.fixed.gradients, gradients_at_once(self.problem, existing_bytes)),
            earlier_outputs=max(plan.fixed.earlier_outputs, lasting_bytes),
        )
        more_bytes = fixed.earlier_outputs - plan.fixed.earlier_outputs
        peak = max(plan.peak_bytes, self._peak_with(existing_bytes, leaving) + more_bytes)
        if is_alone and plan.budget_bytes is not None and peak > plan.budget_bytes:
            may_be_replaced = held_bytes <= self.problem.rebound_bytes
            self._plan_with(existing_bytes, leaving, lasting_bytes, may_be_replaced=may_be_replaced)
        elif peak > plan.peak_bytes or fixed != plan.fixed:
            self.plan = replace(plan, fixed=fixed, peak_bytes=peak)
            self._report()
        self._existing_bytes, self._leaving = existing_bytes, leaving
        if self.step.heap is not None and is_alone:
            replaced = max(0, held_bytes - self.plan.fixed.earlier_outputs)
            self.step.heap.replaced_bytes = min(replaced, self.problem.rebound_bytes)

    def _plan_with_leaving(self, leaving: tuple[int, ...]) -> None:
        """Replans a step that moves something, once hooks were seen to use gradients up."""
        if self.plan.budget_bytes is None or self.plan.timeline is None:  # it moves nothing
            return
        with contextlib.suppress(Infeasible):  # where it was planned for kept gradients too
            self._rebind(self._replan(leaving=leaving))

    def _problem_with(self, existing: int, leaving: tuple[int, ...]) -> Problem:
        """Returns the planned step with ``existing`` bytes of gradients; ``leaving`` ones go early.

        ``leaving`` are positions of the backward's results.
        """
        fixed = replace(self.plan.fixed, gradients=0)  # those of a plan may be more than exist now
        gradients = gradients_at_once(replace(self.problem, fixed=fixed), existing)
        return replace(
            self.problem,
            fixed=replace(fixed, gradients=gradients),
            leaving=leaving_values(self.lowered, leaving),
        )

    def _peak_with(self, existing: int, leaving: tuple[int, ...]) -> int:
        """Returns the peak bytes of ``_problem_with``."""
        key = (existing, leaving, self.plan.fixed.earlier_outputs)
        if key not in self._peaks:
            self._peaks[key] = running_peak_bytes(self._problem_with(existing, leaving), self.plan)
        return self._peaks[key]

    def _plan_with(
        self, existing: int, leaving: tuple[int, ...], lasting: int, *, may_be_replaced: bool
    ) -> None:
        """Replans ``_problem_with`` these gradients, and ``lasting`` bytes of earlier results.

        If that does not fit, results that this forward's may still replace (``may_be_replaced``)
        are not counted: the backward checks them before it begins.
        """
        replan = functools.partial(
            self._replan, existing_bytes=existing, leaving=leaving, none_exist=not existing
        )
        try:
            planned = replan(earlier_bytes=lasting)
        except Infeasible:
            if not lasting or not may_be_replaced:
                raise
            planned = replan()
        self._rebind(planned)

    def keep_budget(self) -> None:
        """Replans a stage of a pipeline so that it keeps the budget by itself.

        Until now the plan of all its microbatches kept it. Raises Infeasible: no plan fits.
        """
        if self.plan.budget_bytes is None and self.config.memory_budget is not None:
            self._rebind(self._replan())

    def _rebind(self, planned: PlannedStep) -> None:
        """Binds ``planned`` for later steps, and allocates its frames."""
        self._bind_replanned(planned)
        self.reserve()

    def _count_held_results(self) -> None:
        """Replans once the user was seen to hold what the forward returned.

        Without a budget, or with ``outputs="dropped"``, the plan assumes that large results
        (logits) are freed before the backward. Only the step that shows otherwise may exceed the
        budget.
        """
        if self._held_result_bytes < MIN_KEPT_BYTES or self.step.live:
            return
        self._rebind(self._replan(replace(self.request, keeps_outputs=True)))
        self._held_result_bytes = 0

    def _may_have_outside_loss(self) -> bool:
        """True where a loss outside of the graph could break the budget: no plan counts it yet."""
        is_said = self.config.outside_loss or self.config.outputs == "dropped"
        return self.plan.budget_bytes is not None and not is_said and not self.request.outside_loss

    def _use_measured_collectives(self) -> None:
        """Replans once, when the first step has measured collectives.

        Each rank does it by itself: the order of collectives stays, and the seconds are the same.
        Where nothing fits any more beside what exists by now, the plan stays.
        """
        collectives = self.known.collectives
        if self.step.live or not collectives.are_measured or not collectives.take():
            return
        with contextlib.suppress(MemoError):
            self._rebind(self._replan())
        self.unplanned_request = None

    def _count_outside_loss(self) -> None:
        """Replans once a backward has shown a loss outside that no option announced."""
        if self.step.live or not self._may_have_outside_loss() or not self._losses.is_seen():
            return
        gradients = result_gradients(self.lowered.cut.backward.half_graph.graph)
        state.warn_once(
            f"{LOSS_OUTSIDE}: {format_bytes(outside_loss_bytes(gradients))} count from this step "
            "on, and steps before may have exceeded memory_budget"
        )
        self._rebind(self._replan(replace(self.request, outside_loss=True)))

    def _bind_replanned(self, planned: PlannedStep) -> None:
        """Binds ``planned`` for later steps, and frees the frames of the plan before."""
        old_step = self.step
        config = self.request.applied_to(self.config)
        self._run_later_steps_by(planned, bind_step(planned, self.lowered.cut, config))
        arena_of(old_step.device).forget(old_step.key)  # a backward to come allocates them again
        self._report()

    def _count(self, counted: StepCounters) -> None:
        """Reports what the step that just ended has moved."""
        self.observed = replace(self.observed, **asdict(counted))
        self._report()
        state.step_ran(self.reported)
        self._num_steps += 1
        if self._num_steps == WARM_UP_STEPS:
            try:
                self.after_steps(self)
            except MemoError as error:  # training goes on where a dump's disk is full
                log.warning("memo: what was measured is not in the dump: %s", error)

    def _say_unplanned(self) -> None:
        """Reports a forward that runs in ordinary memory; a group's first step says so itself."""
        state.count_unplanned()
        if not self._is_watched:
            state.warn_once(
                "a forward began while another of the same graph was waiting for its backward; it "
                "runs in ordinary memory. Set max_inflight to the number of live forwards"
            )
