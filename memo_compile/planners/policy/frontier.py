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
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace

from memo_compile.errors import ConfigError, TooSlow
from memo_compile.planners.move_rules import RecomputeOf
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


NUM_SMALL = 4
"""Where nothing fits, so many plans that may need the fewest bytes are simulated, and one of them
is placed: what needs more than that is no floor."""

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
    sparing: bool = False,
    refused: Set[Decisions] = frozenset(),
) -> Choice:
    """The fastest plan of ``policy`` whose placed peak is at most ``budget_bytes``.

    ``auto`` and ``greedy`` choose from many plans and keep everything when there is no budget or
    when that fits. A named policy is one plan; ``memo`` without ``alpha`` and with a budget may
    take a smaller alpha than its own program's. ``recompute`` raises UnsupportedGraph for a region
    that cannot be used; ``exact`` forbids recomputing a slice of rows. The same inputs give the
    same choice. What ``searched`` holds is not searched again, and what is found is added to it.
    Plans of ``max_step_s`` or more are not placed. If greedy has no plan of at most ``wanted_s``
    that may fit, no plan is placed: the choice waits until it is known how fast other tiles are.
    Likewise with ``enough_s``, where the host has room for all copies: for a short one ``auto`` has
    better plans. With ``sparing`` the frontier lacks plans that surely come behind the chosen one,
    or do not fit: they are not simulated. What is ``refused`` is not chosen.

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
    notes: tuple[str, ...] = ()
    if policy in ("auto", "greedy"):
        fast_s = min(wanted_s if source.is_short else min(wanted_s, enough_s), max_step_s)
        considered, picked = _searched(source, chooser, policy, fast_s)
        if picked is not None and len(considered) > 1 and not sparing:
            considered = list(dict.fromkeys([*considered, *source.plans(*source.quick)]))
    elif policy in NAMED:
        notes = source.named_plan(policy, alpha).notes
        considered = source.saved() if policy == "save" else source.named(policy, (alpha,))
        if policy == "memo" and alpha is None and budget_bytes is not None:
            considered += sorted(source.named(policy, QUANTA), key=preference)
        picked = chooser.pick(considered)
    elif policy in LYNX:
        considered, picked = _picked(source.plans(policy), chooser)
    else:
        policies = ", ".join((*NAMED, *LYNX))
        raise ConfigError(f"policy: expected auto, greedy, {policies}, got {policy!r}")
    if picked is None and chooser.least_left_s is not None:
        raise TooSlow("all other plans of these tiles are slower", step_s=chooser.least_left_s)
    if picked is None:
        raise chooser.infeasible(step, considered)
    candidate, plan = picked
    timeline = simulate(candidate.problem, costs_with(step, candidate.moves, recompute))
    return Choice(
        moves=replace(candidate.moves, policy=policy),
        problem=candidate.problem,
        timeline=timeline,
        plan=plan,
        frontier=chooser.frontier(considered, candidate),
        notes=notes,
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


_Found = tuple[Candidate, Plan] | None
"""The chosen plan with its placement; None where none fits."""


def _searched(
    source: CandidateSource, chooser: Chooser, policy: str, fast_s: float
) -> tuple[list[Candidate], _Found]:
    """The plans that were simulated, and the chosen one: of all, or without the solver's."""
    saved = source.saved()
    picked = chooser.pick(saved)
    if picked is not None:
        return saved, picked
    quick = source.quick if policy == "auto" else (*source.quick, "steady")
    plans, picked = _cheapest_first(source, chooser, saved, source.moves(*quick), fast_s)
    is_near = picked is not None and picked[0].cost_s <= saved[0].cost_s * (1 + GOOD_ENOUGH)
    if policy == "greedy" or is_near:
        return plans, picked
    plans, best = _cheapest_first(source, chooser, saved, source.moves(*source.all))
    # What beats the first choice in cost and in bytes alive may have no place, nor what follows it.
    both = [choice for choice in (best, picked) if choice is not None]
    return plans, min(both, key=lambda choice: choice[0].cost_s, default=None)


def _cheapest_first(
    source: CandidateSource,
    chooser: Chooser,
    saved: Sequence[Candidate],
    moves: Sequence[Moves],
    fast_s: float = math.inf,
) -> tuple[list[Candidate], _Found]:
    """Simulates ``moves`` in the order of what each costs at least, until the choice is certain.

    It is when a plan fits that costs less than all others cost at least. Where none fits, those
    follow that may need no more than the smallest peak. Raises TooSlow: no plan takes ``fast_s``.
    """
    plans, budget_bytes = [*saved], chooser.budget_bytes
    left = [
        proposal
        for proposal in moves
        if budget_bytes is None or source.least_bytes(proposal) <= budget_bytes
    ]
    left.sort(key=source.least_s)
    is_fast = fast_s == math.inf
    for number in range(len(left) + 1):
        next_s = math.inf
        if number < len(left):
            next_s = source.least_s(left[number]) * (1 - ROUNDING)
        if not is_fast:
            is_fast = _is_fast(chooser.least_s(plans), next_s, fast_s)
        if is_fast:
            best = unbeaten(plans, chooser.host_budget_bytes)
            safe = [plan for plan in best if plan.cost_s < next_s]
            if picked := chooser.pick(safe, below_s=next_s):
                return plans, picked
        if number < len(left):
            plans += source.valid([left[number]])
    small = source.valid(sorted(moves, key=source.least_bytes)[:NUM_SMALL])
    most_bytes = None if budget_bytes is None else chooser.most_of_floor([*plans, *small])
    near = [
        proposal
        for proposal in moves
        if most_bytes is None or source.least_bytes(proposal) <= most_bytes
    ]
    return _picked(list(dict.fromkeys([*plans, *small, *source.valid(near)])), chooser)


def _is_fast(least_s: float, next_s: float, fast_s: float) -> bool:
    """True where a plan that may fit takes ``fast_s``, or none may; False: it is not known yet.

    The fastest of them takes ``least_s``, others at least ``next_s``. Raises TooSlow: none does.
    """
    if fast_s < least_s <= next_s:
        raise TooSlow("no plan is fast enough", step_s=least_s, is_bound=True)
    return 0 < least_s <= fast_s or (not least_s and next_s == math.inf)


def _picked(candidates: Sequence[Candidate], chooser: Chooser) -> tuple[list[Candidate], _Found]:
    """The plans to try, and the first that fits; those that some beat after all others."""
    best = unbeaten(candidates, chooser.host_budget_bytes)
    slower = beaten(candidates, best)
    return [*best, *slower], chooser.pick(best) or chooser.pick(slower)
