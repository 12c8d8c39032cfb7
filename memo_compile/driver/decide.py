"""Decides what is kept, offloaded and recomputed, and lowers the regions that recompute.

The policies choose with estimates of recompute regions; what they choose is lowered. The choice
stands if it still fits with the lowered regions and is no slower (``frontier.confirmed``). Else the
policies choose again, with what is known by then, until they choose nothing but lowered regions.
"""

import itertools
import math
from collections.abc import Callable, Set

from memo_compile.config import MemoConfig
from memo_compile.driver.recompute_library import RecomputeLibrary
from memo_compile.planners.policy import Choice, choose
from memo_compile.planners.policy.candidates import DecisionMemory, SearchMemory
from memo_compile.planners.policy.chooser import Decisions, NothingFits
from memo_compile.planners.policy.frontier import TimeLimits, confirmed
from memo_compile.step.movable import MovableStep
from memo_compile.step.plans import Plan
from memo_compile.step.problem import Problem

LOWERED_ROUND = 5
"""In this round only lowered regions may be chosen. The others also use estimates, which are so
close that the first choice is nearly always confirmed. Where it is not, this round ends the search
with the best lowered step; if none fits, rounds with estimates follow."""


def decide(
    step: MovableStep,
    library: RecomputeLibrary,
    config: MemoConfig,
    *,
    budget_bytes: int | None,
    host_budget_bytes: int | None,
    place: Callable[[Problem], Plan],
    wanted_s: float = math.inf,
    memory: SearchMemory | None = None,
    refused: Set[Decisions] = frozenset(),
) -> Choice:
    """Returns the fastest step that fits, every region that it calls lowered.

    ``memory`` holds what was found of the same step under other budgets, and does not change the
    choice. What is ``refused`` is not chosen.

    Raises:
        TooSlow: all plans are slower than ``config`` wants, or than ``wanted_s``.
        Infeasible: nothing fits; the message names the floor (of lowered regions) and its parts.
            All candidates near the budget were lowered by then, so that the named floor will fit.
    """
    short_frontier = memory is not None  # what is kept for other budgets is no picture of this one
    memory = memory or SearchMemory()
    searched, num_refused = DecisionMemory(of_step=memory), len(library.refused)
    limits = TimeLimits(
        max_step_s=config.attempt.max_step_s,
        wanted_s=wanted_s,
        enough_s=config.attempt.enough_s or math.inf,
    )
    for number in itertools.count(1):
        if len(library.refused) != num_refused:  # a plan found before may call what is refused now
            searched, num_refused = DecisionMemory(of_step=memory), len(library.refused)
        searched.regions = library.known_names()
        only_lowered = number == LOWERED_ROUND
        try:
            choice = choose(
                step,
                budget_bytes=budget_bytes,
                host_budget_bytes=host_budget_bytes,
                policy=config.policy,
                alpha=config.alpha,
                exact=config.exact,
                recompute=library.known if only_lowered else library,
                place=place,
                memory=None if only_lowered else searched,
                limits=limits,
                short_frontier=short_frontier,
                refused=refused,
            )
        except NothingFits as error:
            if library.lower(error.problem) or only_lowered:
                continue
            if any([library.lower(problem) for problem in error.candidates_within_budget]):
                continue  # their placed peaks may fall once estimated regions are lowered
            raise
        num_refused_before = len(library.refused)
        if not library.lower(choice.problem):  # it calls lowered regions only
            return choice
        if len(library.refused) != num_refused_before:  # a region that it calls cannot be used
            continue
        exact = confirmed(choice, step, budget_bytes=budget_bytes, recompute=library, place=place)
        if exact is not None:
            return exact
    raise AssertionError("every round lowers a region, and there are not so many")
