"""Plans a lowered step for a request: decides what moves under the budget, places it, proves it."""

import functools
import math
import time
from dataclasses import dataclass, replace

from memo_runtime.pages import gives_pages_back

from memo_compile.check.check_plan import require_valid, require_within_budget
from memo_compile.check.prove import require_proved
from memo_compile.config import MemoConfig, local_world_size
from memo_compile.costs.host import (
    HostMemory,
    default_file_budget_bytes,
    default_host_budget_bytes,
    host_memory,
    require_store,
)
from memo_compile.driver.decide import decide
from memo_compile.driver.knowledge import StepKnowledge
from memo_compile.driver.left_whole import UNEXPECTED, is_bug, say_dropped
from memo_compile.driver.movable_step import Movable
from memo_compile.driver.report_rows import moved_rows, saved_rows, step_notes
from memo_compile.driver.stages import CutStep, LoweredStep, PlannedStep, PlanRequest
from memo_compile.driver.user_outputs import (
    LOSS_OUTSIDE,
    held_bytes,
    outside_loss_bytes,
    own_gradients,
)
from memo_compile.errors import ConfigError, Infeasible, MemoError, TooSlow
from memo_compile.planners.place_step import placed_step, require_budget
from memo_compile.planners.policy import Choice
from memo_compile.planners.step_bound import step_lower_bound_s
from memo_compile.reporting import state
from memo_compile.step.group import grouped, grouped_whole
from memo_compile.step.plans import Plan
from memo_compile.step.problem import Problem
from memo_compile.step.residency import residency, step_constant_bytes
from memo_compile.step.simulate import peak_live_bytes
from memo_compile.units import format_bytes, format_enough, format_seconds

CANDIDATE_PLACEMENT_S = 1.0
"""Most seconds for the placement of a candidate that does not fit where it is placed greedily."""


def plan_step(
    lowered: LoweredStep, config: MemoConfig, request: PlanRequest, known: StepKnowledge
) -> PlannedStep:
    """The checked plan; ``known`` keeps what can be reused. Raises Infeasible: no plan fits."""
    start = time.perf_counter()
    planner = _Planner(
        cut=lowered.cut,
        config=request.applied_to(config),
        request=request,
        known=known,
        problem=replace(
            requested_problem(lowered, request),
            releases_pages=known.runs_here() and gives_pages_back(lowered.cut.facts.device),
        ),
    )
    try:
        planned = planner.decide()
    except Infeasible as error:
        raise _explained(error, planner.problem, request) from None
    plan = replace(
        planned.plan,
        dropping_saves_bytes=planner.saved_by_dropping(planned),
        tiles=lowered.whole.tiles(),
    )
    return replace(planned, plan=plan, planning_s=time.perf_counter() - start)


def require_fast(plan: Plan, config: MemoConfig, known: StepKnowledge) -> None:
    """Raise TooSlow where ``plan`` is slower than what ``config`` takes at once.

    What counts are the step's seconds before any tiles, because tiles cost time themselves. They
    are asked for only where the plan's own are known: regions are not timed for nothing.
    """
    step_s = plan.compute_s if plan.step_s is None else plan.step_s  # None: no stalls, all is kept
    whole_compute_s = known.whole_compute_s() if step_s else 0.0
    if not step_s or not whole_compute_s:
        return
    if step_s > max(config.enough_s, config.max_over_compute * whole_compute_s):
        raise TooSlow(
            f"the fastest plan takes {step_s / whole_compute_s:.3f} x the computation",
            step_s=step_s,
        )
    if step_s >= config.max_step_s:
        raise TooSlow(
            f"the fastest plan takes {format_seconds(step_s)}: others are faster", step_s=step_s
        )


def gradients_at_once(problem: Problem, existing: int) -> int:
    """Bytes of gradients where ``existing`` ones are kept beside those that backwards make.

    Of several live steps one makes its gradients while those of another wait in autograd.
    """
    waiting = problem.fixed.new_gradients if problem.live_steps > 1 else 0
    return max(problem.fixed.gradients, existing + waiting + problem.fixed.new_gradients)


def requested_problem(lowered: LoweredStep, request: PlanRequest) -> Problem:
    """The step that keeps everything, with what exists beside it according to ``request``."""
    problem = lowered.problem
    if request.group is not None:
        problem = grouped(problem, request.group)
    fixed = problem.fixed
    gradients = gradients_at_once(problem, request.existing_gradient_bytes)
    fixed = replace(fixed, gradients=gradients, earlier_outputs=request.earlier_output_bytes)
    problem = replace(problem, fixed=fixed)
    if request.group is not None:  # what the user does with results was seen
        return problem
    if request.outside_loss:
        more = outside_loss_bytes(own_gradients(lowered.cut.backward.half_graph.graph))
        problem = replace(problem, loss_bytes=more)
    if not request.keeps_outputs:
        return problem
    held = held_bytes(problem, lowered.cut.forward.results)
    return replace(problem, keeps_outputs=True, rebound_bytes=held)


@dataclass(frozen=True, kw_only=True)
class _Planner:
    """One request of one step on its way to a plan."""

    cut: CutStep
    config: MemoConfig
    request: PlanRequest
    known: StepKnowledge
    problem: Problem
    """The step that keeps everything."""

    @functools.cached_property
    def movable(self) -> Movable:
        """The step as layers with slots."""
        num_members = self.request.num_members
        return self.known.movable(self.problem, self.config.host_store, num_members)

    @property
    def compute_s(self) -> float:
        """Seconds of the step that keeps everything."""
        return self.request.num_members * self.known.compute_s()

    def decide(self) -> PlannedStep:
        """The step that keeps everything if that fits and is allowed, else the fastest one."""
        budget_bytes = self._budget_bytes()
        if self.config.policy in ("auto", "save"):
            may_fit = budget_bytes is None or peak_live_bytes(self.problem) <= budget_bytes
            if may_fit or self._can_only_save():
                saved = self._place(self.problem)
                fits = budget_bytes is None or saved.peak_bytes <= budget_bytes
                if fits or self._can_only_save():
                    return self._all_saved(saved, self._declared_budget_bytes())
        if self.known.hardware is None:
            require_store(self.config.host_store)
        self._require_possible(budget_bytes)
        try:
            choice = self._choose(budget_bytes)
        except (MemoError, *UNEXPECTED) as error:
            if not is_bug(error):
                raise
            # Moving is only a possibility: the step may fit while it keeps everything.
            say_dropped(f"{self.cut.name}: everything is kept, nothing is moved", error)
            return self._all_saved(self._place(self.problem), budget_bytes)
        rows = moved_rows(self.movable.step, choice, self.cut.units)
        for note in (*choice.notes, *step_notes(self.problem, rows, self.config)):
            state.add_note(note)
        placed = self._placed(choice)
        plan = replace(
            placed,
            decisions=rows,
            policy=choice.moves.policy,
            timeline=choice.timeline,
            step_lower_bound_s=self._lower_bound_s(budget_bytes),
            compute_s=self.compute_s,
            frontier=tuple(
                replace(point, peak_bytes=placed.peak_bytes) if point.chosen else point
                for point in choice.frontier
            ),
            host_bytes=choice.problem.host_bytes,
        )
        return self._planned(choice.problem, plan)

    def _can_only_save(self) -> bool:
        return self.config.policy == "save" or not self.movable.step.layers

    def _require_possible(self, budget_bytes: int | None) -> None:
        """Raise TooSlow where no plan of this step can be as fast as ``config`` wants."""
        limit_s = min(self.config.max_step_s, self._wanted_s())
        if limit_s == math.inf:
            return
        bound_s = self._lower_bound_s(budget_bytes)
        if bound_s > limit_s:
            fits = f"takes less than {format_seconds(bound_s)}" if bound_s < math.inf else "fits"
            raise TooSlow(f"no plan {fits}", step_s=bound_s, is_bound=True)

    def _wanted_s(self) -> float:
        """Seconds above which other tiles are tried before this step is planned."""
        factor = self.config.max_over_compute
        if not 0 < factor < math.inf:  # 0: the plan is made at once, and compared
            return math.inf
        return factor * self.request.num_members * self.known.whole_compute_s()

    def _lower_bound_s(self, budget_bytes: int | None) -> float:
        library = self.known.library(self.config.host_store)
        return step_lower_bound_s(
            self.movable.step,
            budget_bytes=budget_bytes,
            host_budget_bytes=self._host_budget_bytes(),
            regions=library.regions.values(),
        )

    def _all_saved(self, saved: Plan, budget_bytes: int | None) -> PlannedStep:
        """The step that keeps everything, if it fits."""
        require_budget(replace(saved, budget_bytes=budget_bytes))
        rows = saved_rows(self.problem, self.cut.forward, self.cut.units)
        saved, config = replace(saved, decisions=rows), self.config
        if config.max_step_s < math.inf or config.max_over_compute < 1:  # its seconds are compared
            saved = replace(saved, compute_s=self.compute_s)
        return self._planned(self.problem, saved)

    def _choose(self, budget_bytes: int | None) -> Choice:
        try:
            return self._choose_within(budget_bytes)
        except Infeasible as error:
            declared = self._declared_budget_bytes()
            if error.floor_bytes is None or (declared is not None and error.floor_bytes > declared):
                raise
            state.warn_once(f"the device may have too little memory left for a step: {error}")
            return self._choose_within(error.floor_bytes)

    def _choose_within(self, budget_bytes: int | None) -> Choice:
        return decide(
            self.movable,
            self.known.library(self.config.host_store),
            self.config,
            budget_bytes=budget_bytes,
            host_budget_bytes=self._host_budget_bytes(),
            place=lambda problem: self._place_candidate(problem, budget_bytes),
            wanted_s=self._wanted_s(),
        )

    def _placed(self, choice: Choice) -> Plan:
        """The chosen step placed with all effort; candidates were placed with less."""
        best = self._place(choice.problem)
        return best if best.peak_bytes <= choice.plan.peak_bytes else choice.plan

    def _place_candidate(self, problem: Problem, budget_bytes: int | None) -> Plan:
        """Placed greedily if that fits, which takes no time, else with some effort.

        A plan that fits only where effort is made is often the fastest one near the floor.
        """
        quick = self._place(problem, solver="greedy")
        if budget_bytes is None or quick.peak_bytes <= budget_bytes:
            return quick
        better = self._place(problem, at_most_s=CANDIDATE_PLACEMENT_S)
        return better if better.peak_bytes < quick.peak_bytes else quick

    def _place(
        self, problem: Problem, solver: str | None = None, at_most_s: float = math.inf
    ) -> Plan:
        return placed_step(
            problem,
            name=self.cut.name,
            solver=solver or self.config.placement_solver,
            time_limit_s=min(self.config.placement_time_limit_s, at_most_s),
        )

    def _planned(self, problem: Problem, plan: Plan) -> PlannedStep:
        """``problem`` as planned, proved to be the original step plus moves."""
        plan = replace(plan, budget_bytes=self._declared_budget_bytes())
        plan = require_within_budget(require_valid(problem, plan))
        whole, count = self.known.lowered.whole, self.request.num_members
        require_proved(
            grouped_whole(whole, count) if count > 1 else whole,
            self.problem,
            problem,
            self.known.recomputations(problem, self.problem, count),
        )
        return PlannedStep(problem=problem, plan=plan, lowered=self.known.regions())

    def saved_by_dropping(self, planned: PlannedStep) -> int:
        """How much lower the peak would be if the user dropped the forward's results."""
        problem, plan = planned.problem, planned.plan
        if not problem.keeps_outputs:
            return 0
        dropped = replace(problem, keeps_outputs=False, rebound_bytes=0, loss_bytes=0)
        needs = residency(dropped, plan.offsets, plan.arena_bytes)
        return max(0, plan.peak_bytes - needs.peak_bytes)

    def _declared_budget_bytes(self) -> int | None:
        return self.config.budget_bytes(self.known.device_bytes())

    def _budget_bytes(self) -> int | None:
        """The declared budget, or what the device has left; no more than the device granted."""
        bounds = [self._declared_budget_bytes()]
        if bounds[0] is None and self.known.hardware is None:
            bounds.append(self.cut.facts.bytes_left())
        if self.request.granted_step_bytes is not None:
            bounds.append(step_constant_bytes(self.problem) + self.request.granted_step_bytes)
        return min((bound for bound in bounds if bound is not None), default=None)

    def _host_budget_bytes(self) -> int | None:
        """Host bytes for each live step. Raises ConfigError: more was declared than is left."""
        memory = host_memory()
        declared = self.config.declared_host_budget_bytes(memory.total_bytes)
        if self.known.hardware is None:
            most = self._host_bytes_left(memory)
            if declared is not None and most is not None and declared > most:
                raise ConfigError(
                    f"host_budget: {format_bytes(declared)} is more than the {format_bytes(most)} "
                    "that this rank can have; lower it, or free host memory (with "
                    "host_store='file:DIR' disk space)"
                )
            declared = declared if declared is not None else most
        share = None if declared is None else declared // self.config.max_inflight
        bounds = (share, self.request.granted_host_bytes)
        return min((bound for bound in bounds if bound is not None), default=None)

    def _host_bytes_left(self, memory: HostMemory) -> int | None:
        """This rank's share of the memory, or of the disk, that activations are offloaded to."""
        kind = self.config.host_kind(self.cut.facts.device.type)
        if kind.startswith("file:"):
            return default_file_budget_bytes(kind.removeprefix("file:"), local_world_size())
        return default_host_budget_bytes(memory, local_world_size())


def _explained(error: Infeasible, problem: Problem, request: PlanRequest) -> Infeasible:
    """``error``, which also says what was found since the step was compiled.

    It names two floors: of a step that finds gradients of the one before, and of one that does not.
    They are there from its beginning to its end, so that every plan needs that much more.
    """
    text, fixed = str(error), problem.fixed
    waiting = fixed.new_gradients if problem.live_steps > 1 else 0
    kept = fixed.gradients - fixed.new_gradients - waiting
    if error.floor_bytes is not None and kept <= 0:
        accumulating = format_enough(error.floor_bytes + fixed.new_gradients)
        text += f"; floor where .grad exists before the step (accumulation): {accumulating}"
    elif error.floor_bytes is not None:
        fresh = format_enough(error.floor_bytes - kept)
        text += f"; floor where no .grad exists before the step: {fresh}"
    if request.existing_gradient_bytes:
        text += (
            ". Gradients were kept from the last step, which makes them exist twice: "
            "zero_grad(set_to_none=True) frees them, accumulation needs them"
        )
    if request.earlier_output_bytes:
        text += (
            f". {format_bytes(request.earlier_output_bytes)} of results of earlier steps are held: "
            "let go of them, or keep .detach().cpu() of what is small"
        )
    if request.outside_loss:
        text += f". {LOSS_OUTSIDE}"
    return Infeasible(text, floor_bytes=error.floor_bytes)
