"""Chooses the fastest plan that fits a bound in bytes.

A smaller budget never gives a larger peak. Proof: the candidates and their order (by ``cost_s``)
do not depend on the budget, and placing a candidate always gives the same peak (effort is spared
only where less already fits, and the chosen plan gets it in the end). Let B1 <= B2, and
let ci with peak pi be the first candidate in order whose placed peak is within Bi. If p2 <= B1,
then c2 fits B1, and no earlier one does (it would have fitted B2), so that c1 = c2 and p1 = p2.
Else p1 <= B1 < p2. Candidates whose bytes alive exceed the budget are skipped unplaced, because a
placed peak is never below the bytes alive. It may be far above them, and a plan with more bytes
alive may have the smaller peak: so some more plans follow those that none beats (``_beaten``).
And where a plan's peak is above its bytes alive, the same plan comes again, behind all that are as
fast, with fewer bytes alive beside its peak (``CandidateSource.spared``). It has the plan's own
bytes alive, so that both are skipped or neither is, and the proof holds for the longer order: each
of the two parts, those that none beats and what follows them, is in the order of cost, so that what
is skipped leaves the others in their places. Of two such choices the faster is one as well.
"""

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from memo_compile.errors import ConfigError, Infeasible, TooSlow
from memo_compile.planners.move_rules import RecomputeOf, facts_of
from memo_compile.planners.policy.candidate import Candidate, costs_with, program_of
from memo_compile.planners.policy.candidates import CandidateSource, SearchedMoves
from memo_compile.planners.policy.lynx_policies import LYNX
from memo_compile.planners.policy.modes import with_launches
from memo_compile.planners.policy.named import NAMED, QUANTA
from memo_compile.step.interludes import MEASURED_BYTES
from memo_compile.step.movable import MEASURED, Mode, MovableStep, Moves, Schedule
from memo_compile.step.plans import FrontierPoint, Plan, Timeline
from memo_compile.step.problem import Problem
from memo_compile.step.simulate import simulate
from memo_compile.units import format_bytes, format_enough

MAX_FLOOR_PLACEMENTS = 6
"""Most placements that are made only to name the floor; each takes seconds for a large step."""

MAX_MORE = 6
"""Most other plans that are tried when neither the best nor the named ones fit, which is rare."""


GOOD_ENOUGH = 0.02
"""Where greedy's plan is at most this share slower than the step that keeps everything, which no
plan beats, the program of the whole step is not solved: that takes most of the time and rarely
saves a third of a percent. The proof above holds: at a smaller budget greedy's plan is the same,
and just as near, or it does not fit."""


ROUNDING = 1e-9
"""Sums of the same seconds in other orders differ by less than this share."""

SAME = 0.01
"""A choice stands if its lowered step is slower than estimated by at most this share."""


FLOOR_MARGIN = 0.005
"""A named policy's floor is raised by this share where costs are measured: in the next process they
differ a little, and so does the policy's program, which must keep the named floor there too.
Policies that search have plans that are the same in every process (``steady_moves``)."""

ESTIMATED_OVER = 0.1
"""An estimated step's bytes alive may exceed those with lowered regions by this share."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The chosen decisions, the step that they make, and what else was considered."""

    moves: Moves
    problem: Problem
    """The step with copies and recomputation."""
    timeline: Timeline
    plan: Plan
    """What ``place`` made of ``problem``."""
    frontier: tuple[FrontierPoint, ...] = ()
    """Fastest first. A plan's peak is its placed peak, or its bytes alive if it was not placed."""
    notes: tuple[str, ...] = ()
    """What a named policy could not do."""


def choose(
    step: MovableStep,
    *,
    budget_bytes: int | None,
    host_budget_bytes: int | None,
    policy: str,
    recompute: RecomputeOf,
    place: Callable[[Problem], Plan],
    alpha: float | None = None,
    exact: bool = False,
    solver: bool = True,
    searched: SearchedMoves | None = None,
    max_step_s: float = math.inf,
    wanted_s: float = math.inf,
    enough_s: float = math.inf,
    spares: bool = False,
) -> Choice:
    """The fastest plan of ``policy`` whose placed peak is at most ``budget_bytes``.

    ``auto`` and ``greedy`` choose from many plans and keep everything when there is no budget or
    when that fits. A named policy is one plan; ``memo`` without ``alpha`` and with a budget may
    take a smaller alpha than its own program's. ``recompute`` raises UnsupportedGraph for a region
    that cannot be used; ``exact`` forbids recomputing a slice of rows. The same inputs give the
    same choice unless the time limit of ``CandidateSource`` ends a search. What ``searched`` holds
    is not searched again, and what is found is added to it. Plans of ``max_step_s`` or more are not
    placed. If greedy has no plan of at most ``wanted_s`` that may fit, no plan is placed: the
    choice waits until it is known how fast other tiles are. Likewise with ``enough_s``, where the
    host has room for all copies: for a short one ``auto`` has better plans. With ``spares`` plans
    are not simulated which surely come behind the chosen one, or do not fit; the frontier lacks
    them.

    Raises:
        TooSlow: all plans are slower.
        NothingFits: no plan fits the budget and the host budget; the message names the floor.
        ConfigError: the policy is unknown.
    """
    recompute = with_launches(step, recompute)
    source = CandidateSource(
        step=step,
        recompute=recompute,
        host_budget_bytes=host_budget_bytes,
        exact=exact,
        solver=solver,
        searched=searched or SearchedMoves(),
    )
    chooser = _Chooser(budget_bytes, host_budget_bytes, place, source.spared, max_step_s)
    wanted_s = wanted_s if source.is_short else min(wanted_s, enough_s)
    considered, found = _search(source, chooser, policy, alpha, wanted_s, spares=spares)
    if found is None and chooser.least_left_s is not None:
        raise TooSlow("all other plans of these tiles are slower", step_s=chooser.least_left_s)
    if found is None:
        raise chooser.infeasible(step, considered)
    candidate, plan = found
    timeline = simulate(candidate.problem, costs_with(step, candidate.moves, recompute))
    return Choice(
        moves=replace(candidate.moves, policy=policy),
        problem=candidate.problem,
        timeline=timeline,
        plan=plan,
        frontier=chooser.frontier(considered, candidate),
        notes=candidate.notes,
    )


def confirmed(
    choice: Choice,
    step: MovableStep,
    *,
    budget_bytes: int | None,
    recompute: RecomputeOf,
    place: Callable[[Problem], Plan],
) -> Choice | None:
    """``choice`` with what is known of its regions now; None where the choice must be made anew.

    It must be where it no longer fits, or is slower by more than ``SAME`` of the step. The module's
    proof is about choices with estimates; lowered regions may shift a peak.
    """
    recompute = with_launches(step, recompute)
    problem, costs = program_of(step, choice.moves, recompute)
    timeline = simulate(problem, costs)
    if timeline.step_s > choice.timeline.step_s * (1 + SAME):
        return None
    plan = place(problem)
    if budget_bytes is not None and plan.peak_bytes > budget_bytes:
        return None
    points = (
        replace(point, step_s=timeline.step_s, peak_bytes=plan.peak_bytes)
        if point.chosen
        else point
        for point in choice.frontier
    )
    return replace(choice, problem=problem, timeline=timeline, plan=plan, frontier=tuple(points))


def _search(
    source: CandidateSource,
    chooser: "_Chooser",
    policy: str,
    alpha: float | None,
    wanted_s: float,
    *,
    spares: bool,
) -> tuple[list[Candidate], tuple[Candidate, Plan] | None]:
    """The candidates of ``policy``, and the chosen one with its placement."""
    if policy in ("auto", "greedy"):
        saved = source.named("save")
        found = chooser.pick(saved)
        if found is not None:
            return saved, found
        others = [*saved, *(source.steady() if policy == "greedy" else [])]
        if policy == "auto" and facts_of(source.step).talks:  # no choice is slower than Lynx's
            others += source.lynx("lynx-heu", chooser.budget_bytes if spares else None)
        fast_s = min(wanted_s, chooser.max_step_s)
        if not (spares and _is_fast(source, chooser, others, fast_s)):
            _require_fast(source, chooser, others, fast_s)
        ordered, found = _far_from_floor(source, chooser, others, fast_s, spares=spares)
        if found is None:
            ordered, found = _near_and_far(source, chooser, others, spares=spares)
        limit_s = saved[0].cost_s * (1 + GOOD_ENOUGH)
        if policy == "greedy" or (found is not None and found[0].cost_s <= limit_s):
            return ordered, found
        most_bytes = chooser.most_of_floor(ordered) if spares and found is None else None
        ordered, best = _picked(source.auto(most_bytes), chooser)
        # a plan that beats greedy's in cost and bytes alive may have no place, nor what follows it
        both = [own for own in (best, found) if own is not None]
        return ordered, min(both, key=lambda own: own[0].cost_s, default=None)
    if policy in LYNX:
        return _picked(source.lynx(policy), chooser)
    if policy not in NAMED:
        known = ", ".join((*NAMED, *LYNX))
        raise ConfigError(f"policy: expected auto, greedy, {known}, got {policy!r}")
    considered = source.named(policy, (alpha,))
    if policy == "memo" and alpha is None and chooser.budget_bytes is not None:
        considered += sorted(source.named(policy, QUANTA), key=_preference)
    return considered, chooser.pick(considered)


def _require_fast(
    source: CandidateSource, chooser: "_Chooser", others: Sequence[Candidate], fast_s: float
) -> None:
    """Raises TooSlow where all plans that may fit take over ``fast_s``, if there are any.

    Only plans that may fit are simulated, and those near the floor only where no other is fast.
    """
    if fast_s == math.inf:
        return
    least_s = 0.0
    for near_floor in (False, True):
        some = source.greedy(near_floor=near_floor, most_bytes=chooser.budget_bytes)
        least_s = chooser.least_s([*others, *some])
        if 0 < least_s <= fast_s:
            return
    if least_s > fast_s:
        raise TooSlow("no plan is fast enough", step_s=least_s, is_bound=True)


def _is_fast(
    source: CandidateSource, chooser: "_Chooser", others: Sequence[Candidate], fast_s: float
) -> bool:
    """True where a plan far from the floor that may fit takes ``fast_s``; as few are simulated."""
    for known in _by_least_s(source, chooser, others, near_floor=False):
        if any(plan.timeline.step_s <= fast_s for plan in known.safe if chooser.may_fit(plan)):
            return True
        if known.next_s > fast_s:
            break
    return False


def _far_from_floor(
    source: CandidateSource,
    chooser: "_Chooser",
    others: Sequence[Candidate],
    fast_s: float,
    *,
    spares: bool,
) -> tuple[list[Candidate], tuple[Candidate, Plan] | None]:
    """The choice without plans near the floor, where it would be the same with them.

    It is where one that none beats fits and is as fast as the fastest of those could be: what is
    slower comes after it. Plans near the floor take longest to simulate.
    """
    least_s = source.near_floor_least_s()

    def picked(best: Iterable[Candidate], below_s: float) -> tuple[Candidate, Plan] | None:
        fast = (plan for plan in best if plan.cost_s < below_s and plan.timeline.step_s <= fast_s)
        return chooser.pick(fast, below_s=below_s, most_s=fast_s)

    if not spares:
        considered = [*others, *source.greedy(near_floor=False)]
        return considered, picked(unbeaten(considered, chooser.host_budget_bytes), least_s)
    for known in _by_least_s(source, chooser, others, near_floor=False):
        found = picked(known.safe, min(least_s, known.next_s))
        if found is not None or known.next_s >= least_s:
            break
    return known.plans, found


def _near_and_far(
    source: CandidateSource, chooser: "_Chooser", others: Sequence[Candidate], *, spares: bool
) -> tuple[list[Candidate], tuple[Candidate, Plan] | None]:
    """The choice among all of greedy's plans.

    With ``spares``, where none fits, without those that surely need more than the floor.
    """
    most_bytes = None
    if spares:
        for known in _by_least_s(source, chooser, others, near_floor=True):
            found = chooser.pick(known.safe, below_s=known.next_s)
            if found is not None:
                return known.plans, found
        most_bytes = chooser.most_of_floor([*others, *source.near_floor()])
    return _picked([*others, *source.greedy(most_bytes=most_bytes)], chooser)


def _picked(
    candidates: Sequence[Candidate], chooser: "_Chooser"
) -> tuple[list[Candidate], tuple[Candidate, Plan] | None]:
    """The candidates to try, and the first that fits; those that some beat after all others."""
    best = unbeaten(candidates, chooser.host_budget_bytes)
    more = _beaten(candidates, best)
    return [*best, *more], chooser.pick(best) or chooser.pick(more)


class _Simulated(NamedTuple):
    """The plans that were simulated so far."""

    plans: list[Candidate]
    safe: list[Candidate]
    """Those that none beats, of the others neither, fastest first; the others come after them."""
    next_s: float
    """Seconds that the others take at least."""


def _by_least_s(
    source: CandidateSource, chooser: "_Chooser", others: Sequence[Candidate], *, near_floor: bool
) -> Iterator[_Simulated]:
    """Plans that may fit are simulated one by one, in the order of bounds.

    Those that surely do not fit beat none that does.
    """
    plans = [*others]
    left = source.bounded(near_floor=near_floor, most_bytes=chooser.budget_bytes)
    for number in range(len(left) + 1):
        next_s = left[number][0] * (1 - ROUNDING) if number < len(left) else math.inf
        best = unbeaten(plans, chooser.host_budget_bytes)
        yield _Simulated(plans, [plan for plan in best if plan.cost_s < next_s], next_s)
        if number < len(left):
            plans += source.simulated(left[number][1])


def _preference(candidate: Candidate) -> tuple[float, int, int]:
    return candidate.cost_s, candidate.live_bytes, candidate.host_bytes


def unbeaten(candidates: Iterable[Candidate], host_budget_bytes: int | None) -> list[Candidate]:
    """The candidates that fit the host and that none beats in cost and in bytes, fastest first."""
    kept: list[Candidate] = []
    for candidate in sorted(candidates, key=_preference):
        if host_budget_bytes is not None and candidate.host_bytes > host_budget_bytes:
            continue
        if not kept or candidate.live_bytes < kept[-1].live_bytes:
            kept.append(candidate)
    return kept


def _beaten(candidates: Sequence[Candidate], best: Sequence[Candidate]) -> list[Candidate]:
    """What is tried after ``best``: named and steady plans and the smallest others, fastest first.

    With named plans no choice needs more than full recomputation; steady ones keep a named floor.
    """
    known = {id(candidate) for candidate in best}
    named: list[Candidate] = []
    others: list[Candidate] = []
    for candidate in sorted(candidates, key=_bytes_first):
        is_named = candidate.moves.policy in NAMED or is_steady(candidate)
        if id(candidate) not in known:
            (named if is_named else others).append(candidate)
    return sorted([*named, *others[:MAX_MORE]], key=_preference)


def is_steady(candidate: Candidate) -> bool:
    """True for a plan that is the same whatever seconds are measured."""
    schedule = candidate.moves.schedule
    at_once = schedule.at_once and not schedule.widen
    return at_once or candidate.moves.policy == "full-recompute"


def _bytes_first(candidate: Candidate) -> tuple[int, float]:
    return candidate.live_bytes, candidate.cost_s


@dataclass(slots=True)
class _Chooser:
    """Places candidates, each at most once, and remembers their peaks."""

    budget_bytes: int | None
    host_budget_bytes: int | None
    _place: Callable[[Problem], Plan]
    _spared: Callable[[Candidate], Sequence[Candidate]]
    max_step_s: float = math.inf
    least_left_s: float | None = None
    """Seconds of the fastest plan that was left because it takes ``max_step_s`` or more."""
    _placed: dict[tuple[tuple[Mode, ...], Schedule], Plan] = field(default_factory=dict)

    def pick(
        self, ordered: Iterable[Candidate], *, below_s: float = math.inf, most_s: float = math.inf
    ) -> tuple[Candidate, Plan] | None:
        """The first candidate that fits, with its placement.

        What ``_spared`` makes of one that has no place comes before the next that is slower. It is
        left out where it costs ``below_s`` or its step takes more than ``most_s``: it comes later.
        """
        spared: list[Candidate] = []
        for candidate in ordered:
            while spared and spared[0].cost_s <= candidate.cost_s:
                if found := self._fitting(spared.pop(0)):
                    return found
            if found := self._fitting(candidate):
                return found
            for other in self._spared_of(candidate):
                if other.cost_s < below_s and other.timeline.step_s <= most_s:
                    bisect.insort(spared, other, key=_preference)
        return next(filter(None, map(self._fitting, spared)), None)

    def _fitting(self, candidate: Candidate) -> tuple[Candidate, Plan] | None:
        """``candidate`` with its placement, where it fits."""
        if not self._host_fits(candidate) or not self.may_fit(candidate):
            return None
        step_s = candidate.timeline.step_s
        if step_s >= self.max_step_s:
            self.least_left_s = min(step_s, self.least_left_s or step_s)
            return None
        plan = self._plan_of(candidate)
        fits = self.budget_bytes is None or plan.peak_bytes <= self.budget_bytes
        return (candidate, plan) if fits else None

    def _spared_of(self, candidate: Candidate) -> Sequence[Candidate]:
        """What ``_spared`` makes of a candidate whose placement has holes."""
        plan = self._placed_already(candidate)
        has_holes = plan is not None and plan.peak_bytes > candidate.live_bytes
        return self._spared(candidate) if has_holes else ()

    def least_s(self, candidates: Iterable[Candidate]) -> float:
        """Seconds of the fastest of the plans that may fit; 0 where none may."""
        may_fit = (plan for plan in candidates if self._host_fits(plan) and self.may_fit(plan))
        return min((plan.timeline.step_s for plan in may_fit), default=0.0)

    def most_of_floor(self, candidates: Iterable[Candidate]) -> int | None:
        """Bytes of the budget, or of the lowest of ``candidates``; None: the host has no room."""
        lowest = self._lowest([own for own in candidates if self._host_fits(own)])
        assert self.budget_bytes is not None, "without a budget every plan fits"
        return None if lowest is None else max(self.budget_bytes, lowest[0])

    def _host_fits(self, candidate: Candidate) -> bool:
        return self.host_budget_bytes is None or candidate.host_bytes <= self.host_budget_bytes

    def may_fit(self, candidate: Candidate) -> bool:
        """False where more bytes are alive than the budget has."""
        return self.budget_bytes is None or candidate.live_bytes <= self.budget_bytes

    def _placed_already(self, candidate: Candidate) -> Plan | None:
        return self._placed.get((candidate.moves.modes, candidate.moves.schedule))

    def _plan_of(self, candidate: Candidate) -> Plan:
        plan = self._placed_already(candidate)
        if plan is None:
            plan = self._place(candidate.problem)
            self._placed[candidate.moves.modes, candidate.moves.schedule] = plan
        return plan

    def frontier(
        self, considered: Iterable[Candidate], chosen: Candidate
    ) -> tuple[FrontierPoint, ...]:
        """The considered plans that none beats, and the chosen one, fastest first."""
        points = unbeaten(considered, self.host_budget_bytes)
        if chosen not in points:
            points = sorted([*points, chosen], key=_preference)
        found = []
        for point in points:
            placed = self._placed_already(point)
            found.append(
                FrontierPoint(
                    policy=point.moves.policy,
                    step_s=point.timeline.step_s,
                    peak_bytes=point.live_bytes if placed is None else placed.peak_bytes,
                    host_bytes=point.host_bytes,
                    chosen=point is chosen,
                )
            )
        return tuple(found)

    def infeasible(self, step: MovableStep, considered: Sequence[Candidate]) -> NothingFits:
        """The error: the smallest peak that can be had, what makes it, and what to change."""
        assert self.budget_bytes is not None, "without a budget only the host's memory is short"
        within = [candidate for candidate in considered if self._host_fits(candidate)]
        beyond = [candidate for candidate in considered if not self._host_fits(candidate)]
        lowest = self._floor(step, within)
        enough = [candidate for candidate in beyond if self.may_fit(candidate)]
        budget = format_bytes(self.budget_bytes)
        if enough:
            assert self.host_budget_bytes is not None
            need = min(enough, key=lambda candidate: (candidate.host_bytes, candidate.cost_s))
            floor = "" if lowest is None else f" (floor {format_enough(lowest[0])} with it)"
            return NothingFits(
                f"budget {budget}: can be kept with {format_bytes(need.host_bytes)} of host memory "
                f"for offloaded activations, but host_budget is "
                f"{format_bytes(self.host_budget_bytes)}{floor}; raise host_budget or "
                "memory_budget, or shorten the sequence",
                floor_bytes=None if lowest is None else lowest[0],
                problem=need.problem if lowest is None else lowest[1],
            )
        lowest = lowest or self._floor(step, beyond)
        assert lowest is not None, "there is no candidate at all"
        floor_bytes, problem = lowest
        # A steady plan near the budget may fit once lowered: it did where its floor was named.
        near = self.budget_bytes * (1 + ESTIMATED_OVER)
        return NothingFits(
            f"budget {budget} < floor {format_enough(floor_bytes)} ({_floor_parts(step)}); "
            "raise memory_budget or shorten the sequence",
            floor_bytes=floor_bytes,
            problem=problem,
            candidates_within_budget=[
                candidate.problem
                for candidate in within
                if candidate.live_bytes <= (near if is_steady(candidate) else self.budget_bytes)
            ],
        )

    def _floor(
        self, step: MovableStep, candidates: Sequence[Candidate]
    ) -> tuple[int, Problem] | None:
        """The smallest budget that can surely be kept, and the step that keeps it.

        In another process too, where interludes are measured anew.
        """
        found = self._floor_here(step, candidates)
        again = MEASURED_BYTES if step.problem.interludes else 0
        return None if found is None else (found[0] + again, found[1])

    def _floor_here(
        self, step: MovableStep, candidates: Sequence[Candidate]
    ) -> tuple[int, Problem] | None:
        if step.costs.source != MEASURED:
            return self._lowest(candidates)
        steady = self._lowest([candidate for candidate in candidates if is_steady(candidate)])
        if steady is not None:
            return steady
        lowest = self._lowest(candidates)
        return None if lowest is None else (int(lowest[0] * (1 + FLOOR_MARGIN)), lowest[1])

    def _lowest(self, candidates: Sequence[Candidate]) -> tuple[int, Problem] | None:
        """The smallest placed peak among ``candidates``, and its step.

        Steady plans come first: their placements have the fewest holes. Then the others in the
        order of bytes alive, if they can be lower; at most ``MAX_FLOOR_PLACEMENTS`` of those that
        were not placed yet.
        """
        best: tuple[int, Problem] | None = None
        left = MAX_FLOOR_PLACEMENTS
        for candidate in sorted(
            candidates, key=lambda own: (not is_steady(own), *_bytes_first(own))
        ):
            if best is not None and candidate.live_bytes >= best[0]:
                continue
            if not is_steady(candidate) and self._placed_already(candidate) is None:
                if not left:
                    continue
                left -= 1
            for own in (candidate, *self._spared_of(candidate)):
                peak = self._plan_of(own).peak_bytes
                if best is None or peak < best[0]:
                    best = peak, own.problem
        return best


def _floor_parts(step: MovableStep) -> str:
    """What the floor is made of: memory that is always there, and the layer that saves most."""
    fixed = step.problem.fixed
    parts = [
        f"{name} {format_bytes(size_bytes)}"
        for name, size_bytes in (
            ("parameters", fixed.parameters),
            ("gradients", fixed.gradients),
            ("optimizer state", fixed.optimizer_state),
        )
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
