"""The way from a step and its costs to a checked plan: keep everything, or move what must move.

It asks a KnownStep for all that it must know, and reads no graph: what a step was when it was
lowered may come from a file. No torch here.
"""

import functools
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from memo_compile.check.check_moves import Recomputation, recomputations_of
from memo_compile.check.check_plan import require_valid, require_within_budget
from memo_compile.check.prove import require_proved
from memo_compile.config import MemoConfig, local_world_size
from memo_compile.costs.hardware import HardwareProfile
from memo_compile.costs.host import (
    HostMemory,
    default_file_budget_bytes,
    default_host_budget_bytes,
    host_memory,
    require_store,
)
from memo_compile.driver.decide import decide
from memo_compile.driver.left_whole import UNEXPECTED, is_bug, say_dropped
from memo_compile.driver.recompute_library import RecomputeLibrary
from memo_compile.driver.report_rows import moved_rows, saved_rows, step_notes
from memo_compile.driver.stages import PlannedStep, PlanRequest
from memo_compile.errors import ConfigError, Infeasible, InvalidPlan, MemoError, TooSlow
from memo_compile.planners.begin_order import gathered_bytes, in_begin_order
from memo_compile.planners.host_weights import all_on_host
from memo_compile.planners.moves import apply_moves
from memo_compile.planners.place_step import beneath_ordinary, placed_step, require_budget
from memo_compile.planners.placement import Placement, PlacementProblem
from memo_compile.planners.policy import Choice
from memo_compile.planners.policy.candidate import costs_with
from memo_compile.planners.policy.candidates import SearchMemory
from memo_compile.planners.policy.chooser import Decisions, decisions_of
from memo_compile.planners.recompute_windows import (
    measured_collectives,
    num_collectives,
    window_recompute_s,
)
from memo_compile.planners.step_bound import step_lower_bound_s
from memo_compile.planners.transfers import at_once, late, with_time
from memo_compile.reporting import state
from memo_compile.reporting.compiling import say
from memo_compile.step.communication import has_collectives
from memo_compile.step.movable import MovableStep, Moves, StepCosts
from memo_compile.step.plans import Plan
from memo_compile.step.policy_rules import has_rules
from memo_compile.step.problem import CallKind, Problem, RegionProfile
from memo_compile.step.residency import residency, step_constant_bytes
from memo_compile.step.simulate import peak_live_bytes, simulate
from memo_compile.step.tilings import WholeStep
from memo_compile.step.timed import TimedProgram
from memo_compile.units import format_bytes, format_enough, format_seconds

if TYPE_CHECKING:
    from memo_compile.analysis.regions import LoweredRegion

CANDIDATE_PLACEMENT_S = 1.0
"""Most seconds for the placement of a candidate that does not fit where it is placed greedily."""

NEARLY = 0.005
"""A candidate that lacks at most this share of its arena is placed with all effort, down to the
byte: the search ends a little above the bound, and a few small buffers may stand out."""

MAX_REFUSED = 5
"""So many plans are chosen, one after the other, if the checker refuses each."""

LOSS_OUTSIDE = (
    "large results that the compiled function returns beside its own loss are used outside (by "
    "another loss, or behind a graph break); compute all inside, which needs less, or set "
    "outside_loss=True for a plan that counts with it from the first step on"
)


class KnownStep(Protocol):
    """What a plan is made of: a step that keeps everything, what it costs, how it may change."""

    @property
    def name(self) -> str:
        """What reports and dumps call the step."""
        ...

    @property
    def whole(self) -> WholeStep:
        """The step before tiles and moves, for the checker."""
        ...

    @property
    def hardware(self) -> HardwareProfile | None:
        """The device that is planned for; None: the one that the tensors lie on."""
        ...

    @property
    def device_type(self) -> str:
        """The kind of device that the tensors lie on."""
        ...

    def requested(self, request: PlanRequest) -> Problem:
        """The step that keeps everything, with what exists beside it according to ``request``."""
        ...

    def movable(self, problem: Problem, host_store: str) -> MovableStep:
        """``problem`` as layers with slots."""
        ...

    def library(self, host_store: str) -> RecomputeLibrary:
        """The step's recompute regions."""
        ...

    def compute_s(self) -> float:
        """Seconds of the step that keeps everything."""
        ...

    def whole_compute_s(self) -> float:
        """The same before any region ran in tiles, where that is known."""
        ...

    def searches(self, host_budget_bytes: int | None, *, exact: bool) -> SearchMemory | None:
        """What was found for other budgets, and is to be kept for more; None: nothing is kept."""
        ...

    def place(self, problem: PlacementProblem, *, solver: str, time_limit_s: float) -> Placement:
        """Offsets for the buffers of ``problem``."""
        ...

    def regions(self) -> "Mapping[str, LoweredRegion]":
        """The step's regions as code; empty where there is none."""
        ...

    def labels(self) -> Mapping[str, str | None]:
        """Layer class -> the path of its modules, where it has one."""
        ...

    def leased_bytes(self) -> Mapping[str, int]:
        """Saved activation -> its own bytes."""
        ...

    def device_bytes(self) -> int | None:
        """All memory of the device that is planned for; None where it is unknown."""
        ...

    def bytes_left(self) -> int | None:
        """Memory of the tensors' device that this process may still take; None: unknown."""
        ...


def plan_known(known: KnownStep, config: MemoConfig, request: PlanRequest) -> PlannedStep:
    """The checked plan; ``known`` keeps what can be reused. Raises Infeasible: no plan fits."""
    start = time.perf_counter()
    say("choosing what is kept")
    planner = StepPlanner.of(known, config, request)
    try:
        planned = planner.decide()
    except Infeasible as error:
        raise _explained(error, planner.problem, request) from None
    plan = replace(
        planned.plan,
        dropping_saves_bytes=planner.saved_by_dropping(planned),
        tiles=known.whole.tiles(),
    )
    return replace(planned, plan=plan, planning_s=time.perf_counter() - start)


def require_fast(plan: Plan, config: MemoConfig, known: KnownStep) -> None:
    """Raise TooSlow where ``plan`` is slower than what ``config`` takes at once.

    What counts are the step's seconds before any tiles, because tiles cost time themselves. They
    are asked for only where the plan's own are known: regions are not timed for nothing.
    """
    step_s = plan.compute_s if plan.step_s is None else plan.step_s  # None: no stalls, all is kept
    whole_compute_s = known.whole_compute_s() if step_s else 0.0
    if not step_s or not whole_compute_s:
        return
    attempt = config.attempt
    if step_s > max(attempt.enough_s, attempt.max_over_compute * whole_compute_s):
        raise TooSlow(
            f"the fastest plan takes {step_s / whole_compute_s:.3f} x the computation",
            step_s=step_s,
        )
    if step_s >= attempt.max_step_s:
        raise TooSlow(
            f"the fastest plan takes {format_seconds(step_s)}: others are faster", step_s=step_s
        )


@dataclass(frozen=True, kw_only=True)
class StepPlanner:
    """One request of one step on its way to a plan."""

    known: KnownStep
    config: MemoConfig
    request: PlanRequest
    problem: Problem
    """The step that keeps everything."""

    @classmethod
    def of(cls, known: KnownStep, config: MemoConfig, request: PlanRequest) -> "StepPlanner":
        """What plans ``known`` for ``request``."""
        config, problem = request.applied_to(config), known.requested(request)
        if config.weights != "device":
            before, problem = problem.fixed.on_host, all_on_host(problem)
            if config.weights == "auto" and problem.fixed.on_host > before:
                require_host_budget(config, problem.fixed.on_host)
        return cls(known=known, config=config, request=request, problem=problem)

    @functools.cached_property
    def kept(self) -> Problem:
        """The step that keeps everything, its collectives in the order that all ranks keep."""
        return in_begin_order(self.problem)

    @functools.cached_property
    def step(self) -> MovableStep:
        """The step as layers with slots."""
        return self.known.movable(self.problem, self.config.host_store)

    @property
    def compute_s(self) -> float:
        """Seconds of the step that keeps everything."""
        return self.known.compute_s()

    def decide(self) -> PlannedStep:
        """The step that keeps everything if that fits and is allowed, else the fastest one."""
        budget_bytes = self._budget_bytes()
        keeps = self.config.policy in ("auto", "save") and not self.request.shares
        if keeps and not (self.problem.host_weights or self._moves_pinned()):
            may_fit = budget_bytes is None or peak_live_bytes(self.kept) <= budget_bytes
            if may_fit or self._can_only_save():
                saved = self._place_within(self.kept, budget_bytes)
                fits = budget_bytes is None or saved.peak_bytes <= budget_bytes
                if fits or self._can_only_save():
                    return self._all_saved(saved, self._declared_budget_bytes())
        if self.known.hardware is None and self.config.moves:
            why = (
                "the step does not fit while it keeps everything, and needs it to move activations"
            )
            if self.config.policy not in ("auto", "greedy"):
                why = f"policy {self.config.policy!r} moves activations to it"
            require_store(self.config.host_store, why)
        self._require_possible(budget_bytes)
        try:
            return self._moved(budget_bytes)
        except (MemoError, *UNEXPECTED) as error:
            if not is_bug(error):
                raise
            # Moving is only a possibility: the step may fit while it keeps everything.
            say_dropped(f"{self.known.name}: everything is kept, nothing is moved", error)
            if self.problem.host_weights:
                raise
            return self._all_saved(self._place(self.kept), budget_bytes)

    def _moved(self, budget_bytes: int | None) -> PlannedStep:
        """The fastest step that fits; the next one where the checker refuses it (a fault of memo).

        Raises Infeasible: nothing fits. InvalidPlan: no other plan may be tried.
        """
        for _ in range(MAX_REFUSED):
            choice = self._choose(budget_bytes)
            try:
                return self._as_chosen(choice, budget_bytes)
            except InvalidPlan as error:
                if self.config.policy not in ("auto", "greedy"):
                    raise
                policy = choice.moves.policy
                say_dropped(f"{self.known.name}: a plan of policy {policy} is left out", error)
                self._refused.add(decisions_of(choice.moves))
        raise InvalidPlan(f"the checker refuses {MAX_REFUSED} plans; the log says why")

    def _as_chosen(self, choice: Choice, budget_bytes: int | None) -> PlannedStep:
        """``choice`` as a plan. Raises InvalidPlan: the checker refuses it."""
        rows = moved_rows(self.step, choice, self.known.labels())
        costs = costs_with(self.step, choice.moves, self.known.library(self.config.host_store))
        placed = self._placed(choice)
        problem, placed = self._with_windows(choice.problem, placed, costs)
        target = self.known.device_type if self.known.hardware is None else ""
        for note in (*choice.notes, *step_notes(problem, rows, self.config, device_type=target)):
            state.add_note(note)
        timeline = placed.timeline or choice.timeline
        plan = replace(
            placed,
            decisions=rows,
            policy=choice.moves.policy,
            timeline=timeline,
            step_lower_bound_s=self._bound_s(budget_bytes),
            compute_s=self.compute_s,
            frontier=tuple(
                replace(point, peak_bytes=placed.peak_bytes) if point.chosen else point
                for point in choice.frontier
            ),
            host_bytes=choice.problem.host_bytes + self.problem.fixed.on_host,
        )
        return self._planned(problem, plan, choice.moves)

    def as_told(self, problem: Problem, plan: Plan, moves: Moves | None) -> PlannedStep:
        """What another rank has planned of an equal step, its regions lowered here.

        Raises a MemoError where it is no plan of this step, or takes more memory than is here.
        """
        step_regions: Mapping[str, RegionProfile] = self.problem.regions
        if moves is not None:
            require_store(self.config.host_store, "another rank plans to move activations to it")
            library = self.known.library(self.config.host_store)
            library.lower(apply_moves(self.step, moves, library))
            step_regions = apply_moves(self.step, moves, library.known).regions
        if problem.regions != step_regions:
            raise InvalidPlan("its regions are lowered otherwise here")
        planned = self._planned(problem, self._proved(problem, plan), moves)
        budget_bytes, host_bytes = self._budget_bytes(), self._host_budget_bytes()
        if budget_bytes is not None and plan.peak_bytes > budget_bytes:
            raise Infeasible("there is less memory here", floor_bytes=None)
        if host_bytes is not None and problem.host_bytes > host_bytes:
            raise Infeasible("there is less host memory here", floor_bytes=None)
        return planned

    def _with_windows(self, problem: Problem, plan: Plan, costs: StepCosts) -> tuple[Problem, Plan]:
        """The step waits for other ranks as late as memory allows, and says how long that is.

        ``problem`` and ``plan`` as they are where nobody is talked to, or more would not fit. What
        the checker refuses is left out. Raises InvalidPlan: it refuses all of them.
        """
        if not has_collectives(problem):
            return problem, self._proved(problem, plan)
        problem, plan = self._first_accepted(self._placed_orders(problem, plan, costs))
        plan = replace(
            plan,
            timeline=simulate(problem, costs),
            num_collectives=num_collectives(problem),
            measured_collectives=measured_collectives(problem, costs),
            window_recompute_s=window_recompute_s(problem, costs),
        )
        return problem, plan

    def _first_accepted(self, orders: Iterator[tuple[Problem, Plan]]) -> tuple[Problem, Plan]:
        """The first that the checker accepts. Raises InvalidPlan: it accepts none."""
        refused = None
        for problem, plan in orders:
            try:
                return problem, self._proved(problem, plan)
            except InvalidPlan as error:
                what = "an order of waits for other ranks is left out"
                say_dropped(f"{self.known.name}: {what}", error)
                refused = error
        assert refused is not None, "there is at least the step as it is"
        raise refused

    def _placed_orders(
        self, problem: Problem, plan: Plan, costs: StepCosts
    ) -> Iterator[tuple[Problem, Plan]]:
        """What does the same as ``problem`` and fits, the most hidden first; the plainest last."""
        budget_bytes = self._budget_bytes()
        for other in self._orders(problem, plan, costs, budget_bytes):
            placed = self._place_within(other, budget_bytes)
            if budget_bytes is None or placed.peak_bytes <= budget_bytes:
                yield other, placed
        yield problem, plan
        plainest = at_once(problem)
        placed = self._place_within(plainest, budget_bytes)
        if budget_bytes is None or placed.peak_bytes <= budget_bytes:
            yield plainest, placed

    def _orders(
        self, problem: Problem, plan: Plan, costs: StepCosts, budget_bytes: int | None
    ) -> Iterator[Problem]:
        """Programs that do the same as ``problem``, the most hidden first."""
        if not self.config.comm_windows:
            yield at_once(problem)
            return
        waiting_late, tried = TimedProgram(late(problem), costs), []
        most = budget_bytes or plan.peak_bytes + gathered_bytes(problem)
        for limit_bytes in (most, plan.peak_bytes):
            better = with_time(waiting_late, limit_bytes, copies=False).program.problem
            if better.calls not in tried:
                tried.append(better.calls)
                yield better

    def _moves_pinned(self) -> bool:
        """True where a rule of the user says what becomes of a tensor."""
        classes = self.step.classes.values() if has_rules() else ()
        return any(slot.pinned for cls in classes for slot in cls.slots)

    def _can_only_save(self) -> bool:
        return self.config.policy == "save" or not self.step.layers

    def _require_possible(self, budget_bytes: int | None) -> None:
        """Raise TooSlow where no plan of this step can be as fast as ``config`` wants."""
        limit_s = min(self.config.attempt.max_step_s, self._wanted_s())
        if limit_s == math.inf:
            return
        bound_s = self._bound_s(budget_bytes)
        if bound_s > limit_s:
            fits = f"takes less than {format_seconds(bound_s)}" if bound_s < math.inf else "fits"
            raise TooSlow(f"no plan {fits}", step_s=bound_s, is_bound=True)

    def _wanted_s(self) -> float:
        """Seconds above which other tiles are tried before this step is planned."""
        factor = self.config.attempt.max_over_compute
        if not 0 < factor < math.inf:  # 0: the plan is made at once, and compared
            return math.inf
        return factor * self.known.whole_compute_s()

    def _bound_s(self, budget_bytes: int | None) -> float:
        """Seconds that no plan within the budget goes below, by what is known of regions now."""
        return step_lower_bound_s(
            self.step,
            budget_bytes=budget_bytes,
            host_budget_bytes=self._host_budget_bytes(),
            regions=self.known.library(self.config.host_store).regions.values(),
        )

    def _all_saved(self, saved: Plan, budget_bytes: int | None) -> PlannedStep:
        """The step that keeps everything, if it fits."""
        require_budget(replace(saved, budget_bytes=budget_bytes))
        rows = saved_rows(self.problem, self.known.leased_bytes(), self.known.labels())
        attempt, problem = self.config.attempt, self.kept
        if has_collectives(problem):  # else its seconds are not asked for
            problem, saved = self._with_windows(problem, saved, self.step.costs)
        else:
            saved = self._proved(problem, saved)
        saved = replace(saved, decisions=rows)
        if (
            attempt.max_step_s < math.inf or attempt.max_over_compute < 1
        ):  # its seconds are compared
            saved = replace(saved, compute_s=self.compute_s)
        return self._planned(problem, saved)

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
        policy = "kwai" if self.request.shares else self.config.policy
        host_bytes = self._host_budget_bytes()
        return decide(
            self.step,
            self.known.library(self.config.host_store),
            replace(self.config, policy=policy),
            budget_bytes=budget_bytes,
            host_budget_bytes=host_bytes,
            place=lambda problem: self._place_candidate(problem, budget_bytes),
            wanted_s=self._wanted_s(),
            memory=self.known.searches(host_bytes, exact=self.config.exact),
            refused=self._refused,
        )

    @functools.cached_property
    def _refused(self) -> set[Decisions]:
        """What the checker has refused."""
        return set()

    def _placed(self, choice: Choice) -> Plan:
        """The chosen step, as low as it can be placed; under a budget as it was found to fit."""
        if self._takes_the_first():
            return choice.plan
        best = self._place(choice.problem)
        return best if best.peak_bytes <= choice.plan.peak_bytes else choice.plan

    def _place_candidate(self, problem: Problem, budget_bytes: int | None) -> Plan:
        """Placed greedily if that fits, which takes no time, else with some effort.

        A plan that fits only where effort is made is often the fastest one near the floor.
        """
        quick = self._place(problem, solver="greedy")
        if budget_bytes is None or quick.peak_bytes <= budget_bytes or _is_lowest(problem, quick):
            return quick
        better = self._place(problem, at_most_s=CANDIDATE_PLACEMENT_S)
        better = better if better.peak_bytes < quick.peak_bytes else quick
        if 0 < better.peak_bytes - budget_bytes <= NEARLY * better.arena_bytes:
            best = self._placed_without_holes(problem, better)
            better = best if best.peak_bytes < better.peak_bytes else better
        if better.peak_bytes <= budget_bytes:
            return better
        return beneath_ordinary(problem, better, place=self.known.place)

    def _place_within(self, problem: Problem, budget_bytes: int | None) -> Plan:
        """The first placement within the budget; with all effort where none is, or none fits."""
        if budget_bytes is None or not self._takes_the_first():
            return self._place(problem)
        quick = self._place_candidate(problem, budget_bytes)
        if quick.peak_bytes <= budget_bytes:
            return quick
        return min(quick, self._place(problem), key=lambda plan: plan.peak_bytes)

    def _takes_the_first(self) -> bool:
        """True under a budget that somebody named: what it leaves free helps nobody.

        The effort is most of the time of planning. What the device has left is no such budget:
        what a step leaves free there is for others.
        """
        is_free = self.config.placement_solver == "auto"
        return is_free and self._declared_budget_bytes() is not None

    def _placed_without_holes(self, problem: Problem, plan: Plan) -> Plan:
        """The step in an arena of what is alive at one time, or as near as all effort comes.

        It does not depend on the budget, so that a larger one takes what a smaller one does.
        """
        try:
            return self._place(problem, capacity_bytes=plan.lower_bound_bytes)
        except Infeasible:  # which the search has proved
            return plan

    def _place(
        self,
        problem: Problem,
        solver: str | None = None,
        at_most_s: float = math.inf,
        capacity_bytes: int | None = None,
    ) -> Plan:
        return placed_step(
            problem,
            name=self.known.name,
            solver=solver or self.config.placement_solver,
            time_limit_s=min(self.config.placement_time_limit_s, at_most_s),
            capacity_bytes=capacity_bytes,
            place=self.known.place,
        )

    def _planned(self, problem: Problem, plan: Plan, moves: Moves | None = None) -> PlannedStep:
        """``problem`` as planned by ``plan``, which is proved."""
        plan = require_within_budget(replace(plan, budget_bytes=self._declared_budget_bytes()))
        return PlannedStep(problem=problem, plan=plan, lowered=self.known.regions(), moves=moves)

    def _proved(self, problem: Problem, plan: Plan) -> Plan:
        """``plan`` with its verdict: ``problem`` is the original step plus moves.

        Raises InvalidPlan: it is not.
        """
        plan = require_valid(problem, plan)
        require_proved(self.known.whole, self.problem, problem, self.recomputations(problem))
        return plan

    def recomputations(self, moved: Problem) -> Mapping[str, Recomputation]:
        """What each RECOMPUTE call of ``moved`` makes, and from what."""
        if all(call.kind is not CallKind.RECOMPUTE for call in moved.calls):
            return {}  # else the layers are read off the graph, and its regions timed, for nothing
        library = self.known.library(self.config.host_store)
        return recomputations_of(self.step, moved, library.regions.values())

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
            bounds.append(self.known.bytes_left())
        if self.request.granted_step_bytes is not None:
            bounds.append(step_constant_bytes(self.problem) + self.request.granted_step_bytes)
        return min((bound for bound in bounds if bound is not None), default=None)

    def _host_budget_bytes(self) -> int | None:
        """Host bytes for activations of each live step.

        Raises ConfigError: more was declared than is left.
        """
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
        if declared is not None:  # training state comes first
            declared = max(0, declared - self.problem.fixed.on_host)
        num_steps = self.config.max_inflight * self.config.num_frames
        share = None if declared is None else declared // num_steps
        bounds = (share, self.request.granted_host_bytes)
        return min((bound for bound in bounds if bound is not None), default=None)

    def _host_bytes_left(self, memory: HostMemory) -> int | None:
        """This rank's share of the memory, or of the disk, for activations and training state.

        What this step's stores hold already is no longer free, and is the step's all the same.
        """
        kind = self.config.host_kind(self.known.device_type)
        if kind.startswith("file:"):
            folder = kind.removeprefix("file:")
            free: int | None = default_file_budget_bytes(folder, local_world_size())
        else:
            free = default_host_budget_bytes(memory, local_world_size())
        if free is None:
            return None
        from memo_runtime.host_store import bytes_held  # needs torch, as no remembered plan does

        return free + bytes_held(kind, self.problem.fixed.on_host)


def require_host_budget(config: MemoConfig, host_bytes: int) -> None:
    """Raises ConfigError: memo itself would let more lie on the host than was declared."""
    declared = config.declared_host_budget_bytes(host_memory().total_bytes)
    if declared is not None and host_bytes > declared:
        raise ConfigError(
            "weights, gradients and optimizer state on the host would take "
            f"{format_bytes(host_bytes)}, more than host_budget {format_bytes(declared)}"
        )


def _is_lowest(problem: Problem, plan: Plan) -> bool:
    """True where no placement of ``problem`` has a lower peak."""
    has_holes = plan.arena_bytes > plan.lower_bound_bytes
    return not has_holes and plan.peak_bytes == peak_live_bytes(problem)


def _explained(error: Infeasible, problem: Problem, request: PlanRequest) -> Infeasible:
    """``error``, which also says what was found since the step was compiled.

    It names two floors: of a step that finds gradients of the one before, and of one that does not.
    They are there from its beginning to its end, so that every plan needs that much more; but where
    new ones leave early the named one is only known to be enough.
    """
    text, fixed = str(error), problem.fixed
    waiting = fixed.new_gradients if problem.live_steps > 1 else 0
    kept = fixed.gradients - fixed.new_gradients - waiting
    if error.floor_bytes is not None and kept <= 0:
        accumulating = format_enough(error.floor_bytes + fixed.new_gradients)
        text += f"; floor where .grad exists before the step (accumulation): {accumulating}"
    elif error.floor_bytes is not None:
        fresh = format_enough(error.floor_bytes - (0 if problem.leaving else kept))
        most = "at most " if problem.leaving else ""
        text += f"; floor where no .grad exists before the step: {most}{fresh}"
    if request.existing_gradient_bytes:
        twice = "" if problem.leaving else ", which makes them exist twice"
        text += (
            f". Gradients were kept from the last step{twice}: "
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
