"""A planned step that runs: the plan bound to the runtime, replaced by another when it must be."""

import contextlib
import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from memo_runtime.arena import ArenaError, arena_of
from memo_runtime.heap import COUNTED_LATE_BYTES
from memo_runtime.host_store import HostStoreError
from memo_runtime.leases import StepCounters, leases
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
from memo_compile.driver.group_members import GroupMembers
from memo_compile.driver.knowledge import StepKnowledge, gradients_at_once, leaving_values
from memo_compile.driver.library_buffers import (
    Product,
    keeps_kernels,
    library_buffers,
    products_of,
)
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
    own_gradients,
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

MAX_REFUSALS = 6
"""How often a step is planned again after refusals; each time the bound on its bytes is lower."""

TOLERANCE = 0.005
"""An excess below this share of the budget is not reported: the C allocator causes as much."""

MIN_KEPT_BYTES = 2**20
"""Fewer bytes of kept results cause no new plan: losses and small statistics are always held."""


@dataclass(slots=True, kw_only=True)
class Assembly:
    """A planned step that runs, and what it takes to plan it for another request."""

    lowered: LoweredStep
    config: MemoConfig
    known: StepKnowledge
    request: PlanRequest = field(default_factory=PlanRequest)
    """The last request: what is known by now of the device and of what the user keeps."""
    unplanned_request: PlanRequest | None = None
    """What the last forward asked for and got no plan for; in other tiles there may be one."""
    retile: Callable[[Infeasible], None] | None = None
    """Given why there was none, compiles the graph in tiles in which there is, for later steps."""
    planned: PlannedStep
    plan: Plan = field(init=False)
    """The plan of ``planned``, which also counts what was found to exist beside it since."""
    observed: Observed = field(init=False)
    step: StepPlan
    """``planned``, as the runtime runs it."""
    group: PlannedStep | None = None
    """The plan of the group that the request names; it was made with the tiles of this step."""
    members: GroupMembers | None = None
    """The members of that group."""
    reported: ReportedPlan = field(init=False)
    """What the report shows of this step, where it shows it."""

    _watch: ResultWatch = field(default_factory=ResultWatch)
    _losses: LossWatch = field(init=False)
    _made: tuple[int, ...] = ()
    """Positions of the forward's results that keep alive ordinary memory which it allocated."""
    _said_beyond: bool = False
    _is_watched: bool = False
    """The forward that runs is of the first step of a group."""
    _kept_bytes: int = 0
    """Bytes of results planned as dropped that were held when their backward had ended."""
    _unburdened: PlannedStep | None = None
    """The last plan that counts no results of earlier steps."""
    _memory: OutOfMemory = field(init=False)
    _products: frozenset[Product] = frozenset()
    """Products that run once before a step, so that the BLAS library has its buffers (CPU)."""
    _runs_first: tuple[str, ...] = ()
    """Regions that run once before a step, so that libraries have their kernels (CPU)."""
    _could_not_run: Mapping[str, str] = field(default_factory=dict)
    """Those of them that could not, and why."""
    gradients: GradientWatch = field(default_factory=GradientWatch)
    """What is known of how its gradients leave."""
    _peaks: dict[Any, int] = field(default_factory=dict)
    """By bytes of gradients that exist and those that leave: the peak of the step that runs."""
    _leaving: tuple[int, ...] = ()
    """Gradients that the last forward took for gone once autograd has them."""
    _existing: int = 0
    """Bytes of gradients that existed when the last forward began."""

    def __post_init__(self) -> None:
        self._memory = OutOfMemory(dump=self.config.dump)
        self._losses = LossWatch.of(self.lowered.cut.backward.half_graph.graph)
        self._take(self.planned, self.step)
        self.reported = ReportedPlan.of(self.plan, self.observed)

    def _report(self) -> None:
        """The report shows what is known now."""
        before, self.reported = self.reported, ReportedPlan.of(self.plan, self.observed)
        state.replace_plan(before, self.reported)

    def _take(self, planned: PlannedStep, bound: StepPlan) -> None:
        """From now on ``bound`` runs."""
        if not planned.problem.fixed.earlier_outputs:
            self._unburdened = planned
        self.planned, self.plan, self.step, self._peaks = planned, planned.plan, bound, {}
        self.observed = Observed(planning_s=planned.planning_s, lowering_s=self.lowered.lowering_s)
        self._made = tuple(result_storages(planned.problem, self.lowered.cut.forward.results))
        bound.on_step_end, bound.on_unplanned = self._count, self._say_unplanned
        bound.comm_times = self.known.collectives.times
        if bound.heap is not None and planned.plan.budget_bytes is not None:
            called = {call.region for call in planned.problem.calls}
            graphs = self.known.graphs().items()
            used = {name: graph.gm for name, graph in graphs if name in called}
            self._products = products_of(used.values())
            self._runs_first = tuple(name for name, gm in used.items() if keeps_kernels(gm))

    @property
    def problem(self) -> Problem:
        """The step program that runs."""
        return self.planned.problem

    def costs(self) -> StepCosts | None:
        """The seconds of regions and copies, where a decision needed them."""
        return self.known.known_costs(self.request.applied_to(self.config).host_store)

    def _replan(
        self,
        found: PlanRequest | None = None,
        *,
        existing: int | None = None,
        leaving: tuple[int, ...] | None = None,
        lasting: int = 0,
        none_exist: bool = False,
        policy: str | None = None,
    ) -> PlannedStep:
        """The step planned for the last request, and for gradients and results that exist before.

        ``found`` is that request with what else was found. Gradients (by default those that exist
        now) count in all later plans too, because they may be kept again; with ``none_exist`` none
        do, whatever the options say. Where no plan fits (Infeasible), the last request stays.
        """
        config = self.config if policy is None else replace(self.config, policy=policy)
        if existing is None:
            existing = self.lowered.cut.facts.existing_gradient_bytes()
        request = replace(
            found or self.request,
            existing_gradient_bytes=max(self.request.existing_gradient_bytes, existing),
            none_exist=none_exist,
            leaving=self.request.leaving if leaving is None else leaving,
            earlier_output_bytes=lasting,
        )
        try:
            with dynamo.nothing_else_compiles():
                planned = plan_step(self.lowered, config, request, self.known)
        except Infeasible:
            self.unplanned_request = request
            raise
        self.request, self.unplanned_request = request, None
        return planned

    def forward(self, args: list[Any], *, watched: bool = False) -> list[Any]:
        """The forward's results; empties ``args``. Raises Infeasible before it breaks a budget.

        A step that is ``watched`` is the first of a group and runs beside others all the same.
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
        self._count_what_exists(leaves, is_early=gates is not None and gates.is_proved)
        self._count_kept_outputs()
        library_buffers.require(self._products)
        self._could_not_run = self.known.require_ran(self._runs_first)
        if gates is not None:
            gates.watch = self.gradients.follow(leaves)
        del leaves
        with self._memory.explained(self.problem, self.reported):
            results = run_forward(self.step, args)
        self._watch.returned([results[position] for position in self._made])
        return results

    def backward(self, args: list[Any], *, leaves_early: bool = True) -> list[Any]:
        """The backward's results; empties ``args``. Raises as ``forward``.

        Unless it ``leaves_early``, no gradient leaves before all are made: that is so while the
        first step of a group is watched, and nothing is refused for it.
        """
        keep_graph = autograd.keep_graph()
        if self._may_hide_a_loss():
            self._losses.look(args)
        gates = gates_here() if leaves_early and not keep_graph else None
        self._require_room(
            args, keep_graph=keep_graph, stays=gates is None, is_part=not leaves_early
        )
        if gates is not None:
            return self._first_part(gates, args)
        with self._memory.explained(self.problem, self.reported):
            run = begin_backward(self.step, args, keep_graph=keep_graph)
            results = run.rest(range(len(run.plan.backward.results)))
        self._backward_ended()
        return results

    def _first_part(self, gates: Gates, args: list[Any]) -> list[Any]:
        """The backward's results that leave first; ``gates`` run the other parts."""
        with self._memory.explained(self.problem, self.reported):
            run = begin_backward(self.step, args, keep_graph=False)

        watch = gates.watch
        assert watch is not None, "its forward ran"
        watch.begin(follows=adds_all())

        def take(number: int) -> list[Any]:
            part, last = gates.parts[number], number == len(gates.parts) - 1
            self._see_gone(watch)
            with self._memory.explained(self.problem, self.reported):
                found = run.rest(part.inputs) if last else run.part(part.inputs, part.beside)
            if last:
                gates.take = None
                self._backward_ended()
            else:
                watch.handed(part.inputs, found)
            return found

        results: list[Any] = [None] * len(run.plan.backward.results)
        for position, value in zip(gates.parts[0].inputs, take(0), strict=True):
            results[position] = value
        gates.begin(run, take)
        return results

    def _see_gone(self, watch: HandedGradients) -> None:
        """Learn which gradients are gone. Raises Infeasible: one is not, and does not fit."""
        waiting = dict(watch.still_there())
        self.gradients.learn(tuple(watch.used_up()), waiting)
        peak, budget = self.plan.peak_bytes + sum(waiting.values()), self.plan.budget_bytes
        if budget is not None and waiting.keys() & set(self._leaving) and peak > budget:
            raise Infeasible(not_gone(peak, budget, sum(waiting.values())), floor_bytes=peak)

    def _backward_ended(self) -> None:
        """See what is held in memory now."""
        self._say_beyond()
        self._memory.step_ended(self.step.device)
        kept = self._watch.end()
        if not self.problem.keeps_outputs:
            self._kept_bytes = kept

    def _say_beyond(self) -> None:
        """Say once that memory which the graph does not know of broke the budget (CPU)."""
        heap, budget = self.step.heap, self.plan.budget_bytes
        if heap is None or budget is None or self._said_beyond:
            return
        fixed = self.plan.fixed  # what may exist before the step, and may be made beside it
        beyond = heap.beyond_bytes - (fixed.gradients - fixed.new_gradients) - fixed.earlier_outputs
        seen_bytes = self.plan.peak_bytes + max(0, beyond - COUNTED_LATE_BYTES)
        if seen_bytes > budget * (1 + TOLERANCE):
            self._said_beyond = True
            state.warn_once(taken_beyond(beyond, self._could_not_run))

    def _require_room_beside_others(self) -> None:
        """Raise Infeasible if a forward beyond the planned frames does not fit beside them."""
        step, budget = self.step, self.plan.budget_bytes
        if budget is None or step.live < step.max_inflight:
            return
        autograd.free_stopped_backward()
        leases.end_refused()
        gc.collect()  # which ends the steps that nobody holds any more
        if step.live < step.max_inflight:
            return
        more = (step.beyond + 1) * waiting_step_bytes(self.problem, self.plan.arena_bytes)
        peak = self.plan.peak_bytes + more
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
        """Raise Infeasible if what stays, though it was planned as gone, does not fit as well.

        Results that are held; retain_graph's copy; gradients that do not leave early (``stays``),
        or not into ``.grad``. A step that ``is_part`` of a group is not refused: others hold its
        results.
        """
        plan, problem = self.plan, self.problem
        planned, counted = plan.fixed.earlier_outputs, args
        if problem.keeps_outputs:  # of this step, and of those that wait for their backward
            planned += problem.live_steps * held_bytes(problem, self.lowered.cut.forward.results)
            counted = []
        held = max(0, self._watch.turn(counted) - planned)
        if is_part:
            return
        second = plan.fixed.new_gradients if ran_before(self.step, args) else 0
        if self._leaving and (stays or is_captured()):
            problem = self._problem_with(self._existing, ())
            staying = max(0, self._peak_with(self._existing, ()) - plan.peak_bytes)
        else:
            staying = 0
        copied = retained_peak_bytes(problem, plan) - plan.peak_bytes if keep_graph else 0
        peak, budget = plan.peak_bytes + held + second + staying + copied, plan.budget_bytes
        if budget is not None and peak > budget:
            message = no_room(
                peak,
                budget,
                held=held,
                second_gradients=second,
                staying=staying,
                copied=copied,
                keeps_outputs=problem.keeps_outputs,
            )
            raise Infeasible(message, floor_bytes=None if copied else peak)
        if peak > plan.peak_bytes and (copied or budget is not None):
            self.plan = replace(plan, peak_bytes=peak)
            self._report()

    def reserve(self) -> None:
        """Ask for the step's frames, so that a refusal comes now and not in the first step.

        After a refusal the step is planned again, ``MAX_REFUSALS`` times at most: with pageable
        memory where pinned was refused, else for less. The report says so. Raises ArenaError,
        HostStoreError: the memory of every plan that was tried was refused.
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
        """Replan with the speed of copies through pageable memory, instead of pinned."""
        self.request = replace(self.request, host_store="shm")
        planned = self._replan(lasting=self.request.earlier_output_bytes)
        if planned.problem.host_bytes:
            state.warn_once(f"copies go through pageable memory and may block: {refused}")
        self._bind_replanned(planned)

    def _plan_smaller(self, refused: ArenaError | HostStoreError) -> None:
        """Replan for less than what was refused, or for the least that a step needs.

        The bound on the step's own bytes falls by a quarter of the refused arena, at every refusal
        anew; host memory falls by a quarter. Where no plan is smaller, ``refused`` is raised again.
        """
        plan, host_bytes = self.plan, self.problem.host_bytes
        self.request = self._request_less(refused)
        try:
            planned = self._replan(lasting=self.request.earlier_output_bytes)
        except Infeasible as error:
            raise type(refused)(f"{refused}; {NO_SMALLER}: {error}") from None
        if isinstance(refused, ArenaError) and planned.plan.arena_bytes >= plan.arena_bytes:
            planned = self._in_less_arena(planned)
        sizes = (planned.plan.arena_bytes, planned.problem.host_bytes)
        shrinks = sizes[0] < plan.arena_bytes or sizes[1] < host_bytes
        if not shrinks and planned.plan.peak_bytes >= plan.peak_bytes:
            raise type(refused)(f"{refused}; {NO_SMALLER}")
        arena, host = (format_bytes(size) for size in sizes)
        state.warn_once(f"{refused}. Planned again: arena {arena}, host memory {host}")
        self._bind_replanned(planned)

    def _in_less_arena(self, planned: PlannedStep) -> PlannedStep:
        """``planned``, or full recomputation: unused pages of an arena are in no plan's peak."""
        lasting = self.request.earlier_output_bytes
        if self.config.policy in ("auto", "greedy"):
            with contextlib.suppress(Infeasible):
                other = self._replan(lasting=lasting, policy="full-recompute")
                return min(planned, other, key=lambda own: own.plan.arena_bytes)
        return planned

    def _request_less(self, refused: ArenaError | HostStoreError) -> PlanRequest:
        """The last request, with less memory granted than what was refused."""
        if isinstance(refused, ArenaError):
            step_bytes = self.plan.peak_bytes - step_constant_bytes(self.problem)
            granted = self.request.granted_step_bytes
            least = step_bytes if granted is None else min(granted, step_bytes)
            return replace(self.request, granted_step_bytes=least - self.plan.arena_bytes // 4)
        host_bytes = self.problem.host_bytes
        granted = min(self.request.granted_host_bytes or host_bytes, host_bytes) * 3 // 4
        return replace(self.request, granted_host_bytes=granted)

    def retire(self) -> None:
        """Let go of what is held for a model that is gone."""
        self.release()
        state.plan_is_gone(self.reported)

    def release(self) -> None:
        """Give back the step's frames. A step that still runs makes them anew."""
        arena_of(self.step.device).forget(self.step.key)

    def follow(self, before: "Assembly") -> None:
        """Run the steps after those of ``before``, whose results may still be held."""
        self._watch, self.members = before._watch, before.members

    def _count_what_exists(self, leaves: Sequence[Any], *, is_early: bool) -> None:
        """Count gradients and results of earlier steps that are kept: new ones come beside them.

        At compile time there are none yet, and nobody knows whether the user will keep them. A step
        that no longer fits its budget is planned again; Infeasible is raised if no plan fits.
        """
        existing, alone = gradient_bytes(leaves), self.step.live == 0
        leaving = self.gradients.leaving(leaves) if is_early else ()
        if alone and not existing and set(leaving) - set(self.request.leaving):
            self._use_what_leaves(leaving)
        earlier = lasting = 0
        if alone and self.plan.budget_bytes is not None:
            earlier, lasting = self._watch.begin()
            if not lasting and self.plan.fixed.earlier_outputs and self._unburdened is not None:
                self._rebind(self._unburdened)
        before, fixed = self.plan, self.plan.fixed
        fixed = replace(
            fixed,
            gradients=max(fixed.gradients, gradients_at_once(self.problem, existing)),
            earlier_outputs=max(fixed.earlier_outputs, lasting),
        )
        later = fixed.earlier_outputs - before.fixed.earlier_outputs
        more = max(0, self._peak_with(existing, leaving) + later - before.peak_bytes)
        budget = before.budget_bytes
        if budget is None or before.peak_bytes + more <= budget or not alone:
            if more or fixed != before.fixed:
                self.plan = replace(before, fixed=fixed, peak_bytes=before.peak_bytes + more)
                self._report()
        else:
            kept = earlier <= self.problem.rebound_bytes
            self._plan_with(existing, leaving, lasting, replaced=kept)
        self._existing, self._leaving = existing, leaving
        if self.step.heap is not None and alone:
            replaced = max(0, earlier - self.plan.fixed.earlier_outputs)
            self.step.heap.replaced_bytes = min(replaced, self.problem.rebound_bytes)

    def _use_what_leaves(self, leaving: tuple[int, ...]) -> None:
        """Replan a step that moves something, once hooks were seen to use gradients up."""
        if self.plan.budget_bytes is None or self.plan.timeline is None:
            return
        with contextlib.suppress(Infeasible):  # where it was planned for kept gradients too
            self._rebind(self._replan(leaving=leaving))

    def _problem_with(self, existing: int, leaving: tuple[int, ...]) -> Problem:
        """The step that runs, where gradients exist before it and others leave early."""
        fixed = replace(self.plan.fixed, gradients=0)  # those of a plan may be more than exist now
        gradients = gradients_at_once(replace(self.problem, fixed=fixed), existing)
        return replace(
            self.problem,
            fixed=replace(fixed, gradients=gradients),
            leaving=leaving_values(self.lowered, leaving),
        )

    def _peak_with(self, existing: int, leaving: tuple[int, ...]) -> int:
        """The peak of ``_problem_with``; computed once, and at once where no gradient leaves."""
        key = (existing, leaving, self.plan.fixed.earlier_outputs)
        if key not in self._peaks:
            self._peaks[key] = running_peak_bytes(self._problem_with(existing, leaving), self.plan)
        return self._peaks[key]

    def _plan_with(
        self, existing: int, leaving: tuple[int, ...], lasting: int, *, replaced: bool
    ) -> None:
        """Replan with kept gradients and results.

        If that does not fit, results that this forward's may still replace (``replaced``) are not
        counted: the backward checks them before it begins.
        """
        replan = functools.partial(
            self._replan, existing=existing, leaving=leaving, none_exist=not existing
        )
        try:
            planned = replan(lasting=lasting)
        except Infeasible:
            if not lasting or not replaced:
                raise
            planned = replan()
        self._rebind(planned)

    def keep_budget(self) -> None:
        """From now on the step keeps the budget by itself. Raises Infeasible: no plan fits it.

        Until then a stage of a pipeline left that to the plan of all its microbatches.
        """
        if self.plan.budget_bytes is None and self.config.memory_budget is not None:
            self._rebind(self._replan())

    def _rebind(self, planned: PlannedStep) -> None:
        """From now on ``planned`` runs and is reported."""
        self._bind_replanned(planned)
        self.reserve()

    def _count_kept_outputs(self) -> None:
        """Replan once it turns out that the user holds what the forward returned.

        Without a budget, or with ``outputs="dropped"``, the plan assumes that large results
        (logits) are freed before the backward. A user who holds them may exceed the budget, in one
        step only.
        """
        if self._kept_bytes < MIN_KEPT_BYTES or self.step.live:
            return
        self._rebind(self._replan(replace(self.request, keeps_outputs=True)))
        self._kept_bytes = 0

    def _may_hide_a_loss(self) -> bool:
        """True where a loss outside could break the budget, because no plan counts it yet."""
        is_said = self.config.outside_loss or self.config.outputs == "dropped"
        return self.plan.budget_bytes is not None and not is_said and not self.request.outside_loss

    def _use_measured_collectives(self) -> None:
        """Replan once the seconds of collectives were measured that were declared before.

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
        """Replan once a backward has shown a loss outside that no option announced."""
        if self.step.live or not self._may_hide_a_loss() or not self._losses.found():
            return
        more = outside_loss_bytes(own_gradients(self.lowered.cut.backward.half_graph.graph))
        state.warn_once(
            f"{LOSS_OUTSIDE}: {format_bytes(more)} count from this step on, and steps before may "
            "have exceeded memory_budget"
        )
        self._rebind(self._replan(replace(self.request, outside_loss=True)))

    def _bind_replanned(self, planned: PlannedStep) -> None:
        old = self.step
        config = self.request.applied_to(self.config)
        self._take(planned, bind_step(planned, self.lowered.cut, config))
        arena_of(old.device).forget(old.key)  # a backward that is still to come makes them anew
        self._report()

    def _count(self, counted: StepCounters) -> None:
        """Keep what the step that just ended moved, for the report."""
        self.observed = replace(self.observed, **asdict(counted))
        self._report()
        state.step_ran(self.reported)

    def _say_unplanned(self) -> None:
        """A forward runs in ordinary memory; steps of a group do so once, and say so themselves."""
        state.count_unplanned()
        if not self._is_watched:
            state.warn_once(
                "a forward began while another of the same graph was waiting for its backward; it "
                "runs in ordinary memory. Set max_inflight to the number of live forwards"
            )
