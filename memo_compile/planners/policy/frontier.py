"""Chooses the fastest plan that fits a bound in bytes.

A smaller budget never gives a larger peak. Proof: the candidates and their order (by ``cost_s``)
do not depend on the budget, and placing a candidate always gives the same peak (effort is spared
only where less already fits, and the chosen plan gets it in the end). Let B1 <= B2, and
let ci with peak pi be the first candidate in order whose placed peak is within Bi. If p2 <= B1,
then c2 fits B1, and no earlier one does (it would have fitted B2), so that c1 = c2 and p1 = p2.
Else p1 <= B1 < p2. Candidates whose bytes alive exceed the budget are skipped unplaced, because a
placed peak is never below the bytes alive. It may be far above them, and a plan with more bytes
alive may have the smaller peak: so some more plans follow those that none beats (``beaten``).
And where a plan's peak is above its bytes alive, the same plan comes again, behind all that are as
fast, with fewer bytes alive beside its peak (``CandidateSource.spared``). It has the plan's own
bytes alive, so that both are skipped or neither is, and the proof holds for the longer order: each
of the two parts, those that none beats and what follows them, is in the order of cost, so that what
is skipped leaves the others in their places. Of two such choices the faster is one as well.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from memo_compile.errors import ConfigError, TooSlow
from memo_compile.planners.move_rules import RecomputeOf, facts_of
from memo_compile.planners.policy.candidate import Candidate, costs_with, program_of
from memo_compile.planners.policy.candidates import CandidateSource, SearchedMoves
from memo_compile.planners.policy.chooser import (
    Chooser,
    Decisions,
    beaten,
    preference,
    unbeaten,
)
from memo_compile.planners.policy.lynx_policies import LYNX
from memo_compile.planners.policy.modes import with_launches
from memo_compile.planners.policy.named import NAMED, QUANTA
from memo_compile.step.movable import MovableStep, Moves
from memo_compile.step.plans import FrontierPoint, Plan, Timeline
from memo_compile.step.problem import Problem
from memo_compile.step.simulate import simulate

GOOD_ENOUGH = 0.02
"""Where greedy's plan is at most this share slower than the step that keeps everything, which no
plan beats, the program of the whole step is not solved: that takes most of the time and rarely
saves a third of a percent. The proof above holds: at a smaller budget greedy's plan is the same,
and just as near, or it does not fit."""


ROUNDING = 1e-9
"""Sums of the same seconds in other orders differ by less than this share."""

SAME = 0.01
"""A choice stands if its lowered step is slower than estimated by at most this share."""


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
    refused: Set[Decisions] = frozenset(),
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
    them. What is ``refused`` is not chosen.

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
    chooser = Chooser(budget_bytes, host_budget_bytes, place, source.spared, max_step_s, refused)
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


class _Others(NamedTuple):
    """What is considered beside greedy's plans."""

    source: CandidateSource
    plans: list[Candidate]
    moves: tuple[Moves, ...] = ()
    """Those that are not simulated yet."""

    def simulated(self) -> list[Candidate]:
        """All of them."""
        return [*self.plans, *self.source.valid(self.moves)]


def _search(
    source: CandidateSource,
    chooser: Chooser,
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
        others = _Others(source, [*saved, *(source.steady() if policy == "greedy" else [])])
        if policy == "auto" and facts_of(source.step).talks:  # no choice is slower than Lynx's
            found_moves = source.lynx_moves("lynx-heu", chooser.budget_bytes if spares else None)
            others = others._replace(moves=found_moves)
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
        considered += sorted(source.named(policy, QUANTA), key=preference)
    return considered, chooser.pick(considered)


def _require_fast(
    source: CandidateSource, chooser: Chooser, others: _Others, fast_s: float
) -> None:
    """Raises TooSlow where all plans that may fit take over ``fast_s``, if there are any.

    Only plans that may fit are simulated, and those near the floor only where no other is fast.
    """
    if fast_s == math.inf:
        return
    least_s = 0.0
    for near_floor in (False, True):
        some = source.greedy(near_floor=near_floor, most_bytes=chooser.budget_bytes)
        least_s = chooser.least_s([*others.simulated(), *some])
        if 0 < least_s <= fast_s:
            return
    if least_s > fast_s:
        raise TooSlow("no plan is fast enough", step_s=least_s, is_bound=True)


def _is_fast(source: CandidateSource, chooser: Chooser, others: _Others, fast_s: float) -> bool:
    """True where a plan far from the floor that may fit takes ``fast_s``; as few are simulated."""
    for known in _by_least_s(source, chooser, others, near_floor=False):
        if any(plan.timeline.step_s <= fast_s for plan in known.safe if chooser.may_fit(plan)):
            return True
        if known.next_s > fast_s:
            break
    return False


def _far_from_floor(
    source: CandidateSource,
    chooser: Chooser,
    others: _Others,
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
        considered = [*others.simulated(), *source.greedy(near_floor=False)]
        return considered, picked(unbeaten(considered, chooser.host_budget_bytes), least_s)
    for known in _by_least_s(source, chooser, others, near_floor=False):
        found = picked(known.safe, min(least_s, known.next_s))
        if found is not None or known.next_s >= least_s:
            break
    return known.plans, found


def _near_and_far(
    source: CandidateSource, chooser: Chooser, others: _Others, *, spares: bool
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
        most_bytes = chooser.most_of_floor([*others.plans, *source.near_floor()])
    return _picked([*others.simulated(), *source.greedy(most_bytes=most_bytes)], chooser)


def _picked(
    candidates: Sequence[Candidate], chooser: Chooser
) -> tuple[list[Candidate], tuple[Candidate, Plan] | None]:
    """The candidates to try, and the first that fits; those that some beat after all others."""
    best = unbeaten(candidates, chooser.host_budget_bytes)
    more = beaten(candidates, best)
    return [*best, *more], chooser.pick(best) or chooser.pick(more)


class _Simulated(NamedTuple):
    """The plans that were simulated so far."""

    plans: list[Candidate]
    safe: list[Candidate]
    """Those that none beats, of the others neither, fastest first; the others come after them."""
    next_s: float
    """Seconds that the others take at least."""


def _by_least_s(
    source: CandidateSource, chooser: Chooser, others: _Others, *, near_floor: bool
) -> Iterator[_Simulated]:
    """Plans that may fit are simulated one by one, in the order of bounds.

    Those that surely do not fit beat none that does.
    """
    plans = [*others.plans]
    left = source.bounded(
        near_floor=near_floor, most_bytes=chooser.budget_bytes, others=others.moves
    )
    for number in range(len(left) + 1):
        next_s = left[number][0] * (1 - ROUNDING) if number < len(left) else math.inf
        best = unbeaten(plans, chooser.host_budget_bytes)
        yield _Simulated(plans, [plan for plan in best if plan.cost_s < next_s], next_s)
        if number < len(left):
            plans += source.valid([left[number][1]])
