"""Places candidates under a bound in bytes, and names the floor where none fits."""

import bisect
import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field

from memo_compile.errors import Infeasible
from memo_compile.planners.policy.candidate import Candidate
from memo_compile.planners.policy.named import NAMED
from memo_compile.step.interludes import MEASURED_BYTES
from memo_compile.step.movable import MEASURED, Action, Mode, MovableStep, Moves, Schedule
from memo_compile.step.plans import FrontierPoint, Plan
from memo_compile.step.problem import Problem
from memo_compile.units import format_bytes, format_enough

MAX_FLOOR_PLACEMENTS = 6
"""Most placements that are made only to name the floor; each takes seconds for a large step."""

MAX_BEATEN = 6
"""Most plans that others beat and no policy names, tried when nothing else fits, which is rare."""

FLOOR_MARGIN = 0.005
"""A named policy's floor is raised by this share where costs are measured: in the next process they
differ a little, and so does the policy's program, which must keep the named floor there too.
Policies that search have plans that are the same in every process (``steady_moves``)."""

ESTIMATE_ERROR = 0.1
"""An estimated step's bytes alive may exceed those with lowered regions by this share."""


Decisions = tuple[tuple[Mode, ...], Schedule]
"""What a plan's step program is made of."""


def decisions_of(moves: Moves) -> Decisions:
    """The decisions of ``moves``, whichever policy found them."""
    return moves.modes, moves.schedule


class NothingFits(Infeasible):
    """No plan fits. ``problem`` is the step whose placed peak was named as the floor.

    ``candidates_within_budget`` are the steps whose bytes alive are within the budget, or near it
    for a steady plan. Their placed peaks exceed it, but may fall when estimated regions are
    lowered.
    """

    def __init__(
        self,
        message: str,
        *,
        floor_bytes: int | None,
        problem: Problem,
        candidates_within_budget: Sequence[Problem] = (),
    ) -> None:
        super().__init__(message, floor_bytes=floor_bytes)
        self.problem = problem
        self.candidates_within_budget = tuple(candidates_within_budget)


@dataclass(slots=True)
class Chooser:
    """Takes the first candidate that fits; each is placed at most once, and its peak remembered."""

    budget_bytes: int | None
    host_budget_bytes: int | None
    _place: Callable[[Problem], Plan]
    _make_spared: Callable[[Candidate], Sequence[Candidate]]
    """Gives the spared plans of a candidate (``CandidateSource.spared``)."""
    max_step_s: float = math.inf
    refused: Set[Decisions] = frozenset()
    """These are never chosen: the checker has refused their programs."""
    fastest_too_slow_s: float | None = None
    """Seconds of the fastest plan that was refused for ``max_step_s``; None: none was."""
    _lowest_bytes: float = math.inf
    """The smallest placed peak so far of plans that fit the host."""
    _placed: dict[Decisions, Plan] = field(default_factory=dict)

    def pick(
        self, ordered: Iterable[Candidate], *, below_s: float = math.inf
    ) -> tuple[Candidate, Plan] | None:
        """The first candidate that fits, with its placement.

        Where the placement of one has holes and does not fit, its spared plans are tried as well,
        each before the next candidate that is slower. Those that cost ``below_s`` or more are left
        out: the caller calls again, once all cheaper plans are simulated.
        """
        spared_plans: list[Candidate] = []  # sorted by ``preference``
        for candidate in ordered:
            while spared_plans and spared_plans[0].cost_s <= candidate.cost_s:
                if fitting := self._fitting(spared_plans.pop(0)):
                    return fitting
            if fitting := self._fitting(candidate):
                return fitting
            for spared in self._spared_plans_of(candidate):
                if spared.cost_s < below_s:
                    bisect.insort(spared_plans, spared, key=preference)
        return next(filter(None, map(self._fitting, spared_plans)), None)

    def _fitting(self, candidate: Candidate) -> tuple[Candidate, Plan] | None:
        """``candidate`` with its placement; None where it may not be chosen or does not fit."""
        if not self._host_fits(candidate) or not self.may_fit(candidate):
            return None
        if decisions_of(candidate.moves) in self.refused:
            return None
        step_s = candidate.timeline.step_s
        if step_s >= self.max_step_s:
            self.fastest_too_slow_s = min(step_s, self.fastest_too_slow_s or step_s)
            return None
        plan = self._plan_of(candidate)
        fits = self.budget_bytes is None or plan.peak_bytes <= self.budget_bytes
        return (candidate, plan) if fits else None

    def _spared_plans_of(self, candidate: Candidate) -> Sequence[Candidate]:
        """The spared plans of a candidate whose placement has holes; none before it is placed."""
        plan = self._placed_already(candidate)
        has_holes = plan is not None and plan.peak_bytes > candidate.live_bytes
        return self._make_spared(candidate) if has_holes else ()

    def fastest_s(self, candidates: Iterable[Candidate]) -> float:
        """Seconds of the fastest of ``candidates`` that may fit; 0 where none may."""
        may_fit = (plan for plan in candidates if self._host_fits(plan) and self.may_fit(plan))
        return min((plan.timeline.step_s for plan in may_fit), default=0.0)

    def floor_bound_bytes(self, candidates: Iterable[Candidate]) -> int | None:
        """The budget, or the lowest placed peak where that is more; None: nothing fits the host.

        A plan with more bytes alive cannot lower the floor. A few are placed where none is yet.
        """
        assert self.budget_bytes is not None, "without a budget every plan fits"
        if self._lowest_bytes == math.inf:
            self._lowest_placed([*filter(self._host_fits, candidates)])
        lowest_bytes = self._lowest_bytes
        return None if lowest_bytes == math.inf else max(self.budget_bytes, int(lowest_bytes))

    def _host_fits(self, candidate: Candidate) -> bool:
        return self.host_budget_bytes is None or candidate.host_bytes <= self.host_budget_bytes

    def may_fit(self, candidate: Candidate) -> bool:
        """False where more bytes are alive than the budget has."""
        return self.budget_bytes is None or candidate.live_bytes <= self.budget_bytes

    def _placed_already(self, candidate: Candidate) -> Plan | None:
        return self._placed.get(decisions_of(candidate.moves))

    def _plan_of(self, candidate: Candidate) -> Plan:
        """The placement of ``candidate``, made once."""
        plan = self._placed_already(candidate)
        if plan is None:
            plan = self._place(candidate.problem)
            self._placed[decisions_of(candidate.moves)] = plan
            if self._host_fits(candidate):
                self._lowest_bytes = min(self._lowest_bytes, plan.peak_bytes)
        return plan

    def frontier(
        self, considered: Iterable[Candidate], chosen: Candidate
    ) -> tuple[FrontierPoint, ...]:
        """The considered plans that none beats, and the chosen one, fastest first."""
        points = unbeaten(considered, self.host_budget_bytes)
        if chosen not in points:
            points = sorted([*points, chosen], key=preference)
        frontier = []
        for point in points:
            placed = self._placed_already(point)
            frontier.append(
                FrontierPoint(
                    policy=point.moves.policy,
                    step_s=point.timeline.step_s,
                    peak_bytes=point.live_bytes if placed is None else placed.peak_bytes,
                    host_bytes=point.host_bytes,
                    chosen=point is chosen,
                    layers_to_host=_num_layers(point.moves, copies=True),
                    layers_recomputed=_num_layers(point.moves, copies=False),
                )
            )
        return tuple(frontier)

    def infeasible(self, step: MovableStep, considered: Sequence[Candidate]) -> NothingFits:
        """The error: the smallest peak that can be had, what makes it, and what to change."""
        assert self.budget_bytes is not None, "without a budget only the host's memory is short"
        considered = [plan for plan in considered if decisions_of(plan.moves) not in self.refused]
        within_host = [*filter(self._host_fits, considered)]
        beyond_host = [candidate for candidate in considered if not self._host_fits(candidate)]
        lowest = self._floor(step, within_host)  # (peak, step)
        lacking_host = [*filter(self.may_fit, beyond_host)]
        budget = format_bytes(self.budget_bytes)
        if lacking_host:
            assert self.host_budget_bytes is not None
            best = min(lacking_host, key=lambda candidate: (candidate.host_bytes, candidate.cost_s))
            floor = "" if lowest is None else f" (floor {format_enough(lowest[0])} with it)"
            return NothingFits(
                f"budget {budget}: can be kept with {format_bytes(best.host_bytes)} of host memory "
                f"for offloaded activations, but host_budget is "
                f"{format_bytes(self.host_budget_bytes)}{floor}; raise host_budget or "
                "memory_budget, or shorten the sequence",
                floor_bytes=None if lowest is None else lowest[0],
                problem=best.problem if lowest is None else lowest[1],
            )
        lowest = lowest or self._floor(step, beyond_host)
        assert lowest is not None, "there is no candidate at all"
        floor_bytes, problem = lowest
        # A steady plan near the budget may fit once lowered: it did where its floor was named.
        near_bytes = self.budget_bytes * (1 + ESTIMATE_ERROR)
        within_budget = [
            candidate.problem
            for candidate in within_host
            if candidate.live_bytes <= (near_bytes if is_steady(candidate) else self.budget_bytes)
        ]
        return NothingFits(
            f"budget {budget} < floor {format_enough(floor_bytes)} ({_floor_parts(step)}); "
            "raise memory_budget or shorten the sequence",
            floor_bytes=floor_bytes,
            problem=problem,
            candidates_within_budget=within_budget,
        )

    def _floor(
        self, step: MovableStep, candidates: Sequence[Candidate]
    ) -> tuple[int, Problem] | None:
        """The smallest budget that can surely be kept, and the step that keeps it; None: no plan.

        It is kept in another process too, where interludes are measured anew and may take
        ``MEASURED_BYTES`` more. But no more is named than the plan needs that is taken without a
        budget.
        """
        lowest = self._floor_in_this_process(step, candidates)
        if lowest is None or not step.problem.interludes:
            return lowest
        floor_bytes, problem = lowest
        enough_bytes = min(candidates, key=preference).live_bytes
        return max(floor_bytes, min(floor_bytes + MEASURED_BYTES, enough_bytes)), problem

    def _floor_in_this_process(
        self, step: MovableStep, candidates: Sequence[Candidate]
    ) -> tuple[int, Problem] | None:
        """``_floor`` but for interludes. Measured seconds change all plans but the steady ones."""
        if step.costs.source != MEASURED:
            return self._lowest_placed(candidates)
        steady = self._lowest_placed([*filter(is_steady, candidates)])
        if steady is not None:
            return steady
        lowest = self._lowest_placed(candidates)
        return None if lowest is None else (int(lowest[0] * (1 + FLOOR_MARGIN)), lowest[1])

    def _lowest_placed(self, candidates: Sequence[Candidate]) -> tuple[int, Problem] | None:
        """The smallest placed peak among ``candidates``, and its step.

        Steady plans come first: their placements have the fewest holes. Then the others in the
        order of bytes alive, if they can be lower; at most ``MAX_FLOOR_PLACEMENTS`` of those that
        were not placed yet.
        """
        lowest = self._certainly_lowest(candidates)
        if lowest is not None:
            return lowest
        num_left = MAX_FLOOR_PLACEMENTS
        order = sorted(candidates, key=lambda plan: (not is_steady(plan), *_bytes_first(plan)))
        for candidate in order:
            if lowest is not None and candidate.live_bytes >= lowest[0]:
                continue
            if not is_steady(candidate) and self._placed_already(candidate) is None:
                if not num_left:
                    continue
                num_left -= 1
            for choice in (candidate, *self._spared_plans_of(candidate)):
                peak_bytes = self._plan_of(choice).peak_bytes
                if lowest is None or peak_bytes < lowest[0]:
                    lowest = peak_bytes, choice.problem
        return lowest

    def _certainly_lowest(self, candidates: Sequence[Candidate]) -> tuple[int, Problem] | None:
        """Peak and step of a plan placed in no more bytes than any has alive; None without one."""
        least_bytes = min((candidate.live_bytes for candidate in candidates), default=0)
        for candidate in candidates:
            plan = self._placed_already(candidate)
            if plan is not None and plan.peak_bytes <= least_bytes:
                return plan.peak_bytes, candidate.problem
        return None


def _floor_parts(step: MovableStep) -> str:
    """What the floor is made of: memory that is always there, and the layer that saves most."""
    fixed = step.problem.fixed
    parts = [
        f"parameters {format_bytes(fixed.parameters)}",
        f"gradients {format_bytes(fixed.gradients)}",
        f"optimizer state {format_bytes(fixed.optimizer_state)}",
    ]
    if step.layers:
        layer = max(step.layers, key=lambda layer: step.class_of(layer).saved_bytes)
        cls, slots = step.class_of(layer), step.class_of(layer).slots
        largest = max(range(len(slots)), key=lambda slot: (slots[slot].size_bytes, -slot))
        info = step.problem.tensors.get(layer.values[largest])
        where = f" at {info.source}" if info is not None and info.source else ""
        size = format_bytes(cls.saved_bytes)
        parts.append(f"largest layer {layer.forward} saves {size}{where}")
    return ", ".join(parts)


def preference(candidate: Candidate) -> tuple[float, int, int]:
    """The order in which candidates are tried: cheapest first."""
    return candidate.cost_s, candidate.live_bytes, candidate.host_bytes


def unbeaten(candidates: Iterable[Candidate], host_budget_bytes: int | None) -> list[Candidate]:
    """The candidates that fit the host and that none beats in cost and in bytes, fastest first."""
    best: list[Candidate] = []
    for candidate in sorted(candidates, key=preference):
        if host_budget_bytes is not None and candidate.host_bytes > host_budget_bytes:
            continue
        if not best or candidate.live_bytes < best[-1].live_bytes:
            best.append(candidate)
    return best


def beaten(candidates: Sequence[Candidate], best: Sequence[Candidate]) -> list[Candidate]:
    """What is tried after ``best``, which none beats: the plans that some beat, fastest first.

    All named and steady ones, and of the others the ``MAX_BEATEN`` smallest. With named plans no
    choice needs more than full recomputation; steady ones keep a named floor.
    """
    best_ids = {id(candidate) for candidate in best}
    always_tried: list[Candidate] = []
    others: list[Candidate] = []
    for candidate in sorted(candidates, key=_bytes_first):
        is_named = candidate.moves.policy in NAMED or is_steady(candidate)
        if id(candidate) not in best_ids:
            (always_tried if is_named else others).append(candidate)
    return sorted([*always_tried, *others[:MAX_BEATEN]], key=preference)


def is_steady(candidate: Candidate) -> bool:
    """True for a steady plan: it is the same whatever seconds are measured."""
    schedule = candidate.moves.schedule
    at_once = not schedule.layers and not schedule.widen
    return at_once or candidate.moves.policy == "full-recompute"


def _bytes_first(candidate: Candidate) -> tuple[int, float]:
    return candidate.live_bytes, candidate.cost_s


def _num_layers(moves: Moves, *, copies: bool) -> int:
    """Counts the layers that copy something to the host, or that recompute something."""
    action = Action.OFFLOAD if copies else Action.RECOMPUTE
    return sum(
        bool(mode.slots(action))
        or (copies and mode.recompute_rows is not None and bool(mode.slots(Action.RECOMPUTE)))
        for mode in moves.modes
    )
