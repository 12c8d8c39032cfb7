"""Chooses the fastest plan that fits a bound in bytes. A smaller budget never gives a larger peak.

Proof. The candidates and their order (by ``cost_s``) do not depend on the budget, and placing a
candidate always gives the same peak (the placement stops early only where less already fits, and
the chosen plan gets its full effort in the end). Let B1 <= B2, and let ci with peak pi be the first
candidate in order whose placed peak is within Bi. If p2 <= B1, then c2 fits B1, and no earlier one
does (it would have fitted B2), so that c1 = c2 and p1 = p2. Else p1 <= B1 < p2. For example, plans
with peaks 9, 7, 5 in the order of cost: a budget of 8 takes 7, one of 7 the same, one of 6 takes 5.

Skipped plans. Candidates whose bytes alive exceed the budget are not placed, because a placed peak
is never below the bytes alive. It may be far above them, and a plan with more bytes alive may have
the smaller peak: so ``beaten`` plans follow those that none beats. Each of these two parts is in
the order of cost, so that what is skipped leaves the others in their places.

Spared plans. Where a plan's peak is above its bytes alive, it comes again behind all that are as
fast, with copies that leave a share of the peak free (``CandidateSource.spared``). As many of its
bytes are alive, so that both are skipped or neither is, and the proof holds for the longer order.
Of two such choices, greedy's and that with the solver's plans, the faster is one as well.
"""

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace

from memo_compile.errors import ConfigError, TooSlow
from memo_compile.planners.move_rules import RecomputeOf
from memo_compile.planners.policy.candidate import Candidate, costs_with, program_of
from memo_compile.planners.policy.candidates import CandidateSource, DecisionMemory
from memo_compile.planners.policy.chooser import Chooser, Decisions, beaten, preference, unbeaten
from memo_compile.planners.policy.lynx_policies import LYNX
from memo_compile.planners.policy.modes import with_launches
from memo_compile.planners.policy.named import NAMED, QUANTA
from memo_compile.step.movable import MovableStep, Moves
from memo_compile.step.plans import FrontierPoint, Plan, Timeline
from memo_compile.step.problem import Problem
from memo_compile.step.simulate import simulate

GOOD_ENOUGH_SHARE = 0.02
"""Where greedy's plan is at most this share slower than the step that keeps everything, which no
plan beats, the program of the whole step is not solved: that takes most of the time and rarely
saves a third of a percent. The proof above holds: at a smaller budget greedy's plan is the same,
and just as near, or it does not fit."""


NUM_SMALLEST = 4
"""Where nothing fits, so many plans that may need the fewest bytes are simulated, and one of them
is placed: what needs more than that is no floor."""

ROUNDING = 1e-9
"""Sums of the same seconds in other orders differ by less than this share."""

CONFIRMED_SHARE = 0.01
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """Seconds that a step may take, as other tiles of its graph leave it."""

    max_step_s: float = math.inf
    """Plans that take so long, or longer, are not placed."""
    wanted_s: float = math.inf
    """If greedy has no plan of at most this that may fit, no plan is placed: the choice waits until
    it is known how fast other tiles are."""
    enough_s: float = math.inf
    """Likewise, but only where the host has room for all copies: elsewhere ``auto`` has better."""


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
    memory: DecisionMemory | None = None,
    limits: TimeLimits = TimeLimits(),
    short_frontier: bool = False,
    refused: Set[Decisions] = frozenset(),
) -> Choice:
    """The fastest plan of ``policy`` whose placed peak is at most ``budget_bytes``.

    ``auto`` and ``greedy`` choose from many plans and keep everything when there is no budget or
    when that fits. A named policy is one plan; ``memo`` without ``alpha`` and with a budget may
    take a smaller alpha than its own program's. ``recompute`` raises UnsupportedGraph for a region
    that cannot be used; ``exact`` forbids recomputing a slice of rows. The same inputs give the
    same choice. What ``memory`` holds is not searched again, and what is searched is added to it.
    With ``short_frontier`` plans are not simulated that surely come behind the chosen one, or do
    not fit, and the frontier lacks them. What is ``refused`` is not chosen.

    Raises:
        TooSlow: all plans are slower than ``limits`` allow.
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
        memory=memory or DecisionMemory(),
    )
    max_step_s = limits.max_step_s
    chooser = Chooser(budget_bytes, host_budget_bytes, place, source.spared, max_step_s, refused)
    notes: tuple[str, ...] = ()
    if policy in ("auto", "greedy"):
        enough_s = math.inf if source.host_is_short else limits.enough_s
        fast_s = min(max_step_s, limits.wanted_s, enough_s)  # none is placed if all are slower
        considered, pick = _pick_of_searches(source, chooser, policy, fast_s)
        if pick is not None and len(considered) > 1 and not short_frontier:  # users see them all
            considered = list(dict.fromkeys([*considered, *source.plans(*source.quick)]))
    elif policy in NAMED:
        notes = source.named_plan(policy, alpha).notes
        considered = source.saved() if policy == "save" else source.named(policy, (alpha,))
        if policy == "memo" and alpha is None and budget_bytes is not None:
            considered += sorted(source.named(policy, QUANTA), key=preference)
        pick = chooser.pick(considered)
    elif policy in LYNX:
        considered, pick = _pick_of(source.plans(policy), chooser)
    else:
        policies = ", ".join((*NAMED, *LYNX))
        raise ConfigError(f"policy: expected auto, greedy, {policies}, got {policy!r}")
    too_slow_s = chooser.fastest_too_slow_s
    if pick is None and too_slow_s is not None:
        raise TooSlow("all other plans of these tiles are slower", step_s=too_slow_s)
    if pick is None:
        raise chooser.infeasible(step, considered)
    candidate, plan = pick
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
    """``choice`` after its regions are lowered; None where the choice must be made anew.

    That is where it no longer fits, or is slower by more than ``CONFIRMED_SHARE`` of the step. The
    module's proof is about choices with estimates; lowered regions may shift a peak.
    """
    recompute = with_launches(step, recompute)
    problem, costs = program_of(step, choice.moves, recompute)
    timeline = simulate(problem, costs)
    if timeline.step_s > choice.timeline.step_s * (1 + CONFIRMED_SHARE):
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


_Pick = tuple[Candidate, Plan] | None
"""The chosen plan with its placement; None where none fits."""


def _pick_of_searches(
    source: CandidateSource, chooser: Chooser, policy: str, fast_s: float
) -> tuple[list[Candidate], _Pick]:
    """The plans that were simulated, and the pick of ``auto`` or ``greedy``.

    Save-all first, then the quick searches, then all of them: until a pick is good enough. Raises
    TooSlow: no plan takes ``fast_s``.
    """
    saved = source.saved()
    pick = chooser.pick(saved)
    if pick is not None:
        return saved, pick
    quick = source.quick if policy == "auto" else (*source.quick, "steady")
    plans, pick = _cheapest_first(source, chooser, saved, source.moves(*quick), fast_s)
    is_near = pick is not None and pick[0].cost_s <= saved[0].cost_s * (1 + GOOD_ENOUGH_SHARE)
    if policy == "greedy" or is_near:
        return plans, pick
    plans, solver_pick = _cheapest_first(source, chooser, saved, source.moves(*source.all))
    # What beats the first pick in cost and in bytes alive may not fit once placed: both count.
    picks = [choice for choice in (solver_pick, pick) if choice is not None]
    return plans, min(picks, key=lambda choice: choice[0].cost_s, default=None)


def _cheapest_first(
    source: CandidateSource,
    chooser: Chooser,
    saved: Sequence[Candidate],
    moves: Sequence[Moves],
    fast_s: float = math.inf,
) -> tuple[list[Candidate], _Pick]:
    """Simulates ``moves`` in the order of what each costs at least, until the choice is certain.

    It is when a plan fits that costs less than all others cost at least: if the next takes 11 s at
    least, a plan of 10 s may be picked, one of 12 not yet. Where none fits, those follow that may
    need no more than the smallest peak. Raises TooSlow: no plan takes ``fast_s``.
    """

    def may_have(most_bytes: int | None) -> list[Moves]:
        if most_bytes is None:
            return [*moves]
        return [proposal for proposal in moves if source.least_bytes(proposal) <= most_bytes]

    plans, budget_bytes = [*saved], chooser.budget_bytes
    waiting = sorted(may_have(budget_bytes), key=source.least_s)
    is_fast = fast_s == math.inf
    for proposal in (*waiting, None):
        next_s = math.inf if proposal is None else source.least_s(proposal) * (1 - ROUNDING)
        if not is_fast:
            is_fast = _is_fast(chooser.fastest_s(plans), next_s, fast_s)
        if is_fast:
            best = unbeaten(plans, chooser.host_budget_bytes)
            safe = [plan for plan in best if plan.cost_s < next_s]
            if pick := chooser.pick(safe, below_s=next_s):
                return plans, pick
        plans += [] if proposal is None else source.valid([proposal])
    small = source.valid(sorted(moves, key=source.least_bytes)[:NUM_SMALLEST])
    bound_bytes = None if budget_bytes is None else chooser.floor_bound_bytes([*plans, *small])
    near_floor = source.valid(may_have(bound_bytes))
    return _pick_of(list(dict.fromkeys([*plans, *small, *near_floor])), chooser)


def _is_fast(fastest_s: float, next_s: float, fast_s: float) -> bool:
    """True where a plan that may fit takes ``fast_s``, or none may fit; False: not known yet.

    The fastest simulated one that may fit takes ``fastest_s`` (0: none), what is not simulated at
    least ``next_s``. Raises TooSlow: none takes ``fast_s``.
    """
    if fast_s < fastest_s <= next_s:
        raise TooSlow("no plan is fast enough", step_s=fastest_s, is_bound=True)
    return 0 < fastest_s <= fast_s or (not fastest_s and next_s == math.inf)


def _pick_of(candidates: Sequence[Candidate], chooser: Chooser) -> tuple[list[Candidate], _Pick]:
    """The plans that are tried, and the first that fits: those first that none beats."""
    best = unbeaten(candidates, chooser.host_budget_bytes)
    others = beaten(candidates, best)
    return [*best, *others], chooser.pick(best) or chooser.pick(others)
