"""The split where a rank has several stages, which share its memory: units are moved one by one.

What a stage must recompute depends on its rank's other stages, so that no table of stage times
says it. As in the paper, from the split that is best without recomputation one unit goes from a
stage to a neighbour while that helps: the ranks come closer to fitting, then the slowest rank gets
faster, then the slowest stage.
"""

import math
from collections.abc import Iterator

from memo_compile.papers.lynx.partition import split_ranges
from memo_compile.pipelines.stage_plans import StageCost, StagePlans

Cut = tuple[int, ...]
"""Units of each stage."""

Worth = tuple[float, float, float]
"""Bytes that ranks lack, seconds of the slowest rank, of the slowest stage."""


def ranges_of(cut: Cut) -> list[tuple[int, int]]:
    """Per stage its units, ``[begin, end)``."""
    ends = [sum(cut[: stage + 1]) for stage in range(len(cut))]
    return [(end - count, end) for count, end in zip(cut, ends, strict=True)]


def rank_costs(plans: StagePlans, cut: Cut) -> list[StageCost]:
    """What each rank takes."""
    num_ranks, ranges = plans.orders.num_ranks, ranges_of(cut)
    return [plans.rank_cost(rank, tuple(ranges[rank::num_ranks])) for rank in range(num_ranks)]


def looped_split(plans: StagePlans) -> Cut:
    """A split that no move of one unit makes better. Its ranks need not fit."""

    def least(_: int, begin: int, end: int) -> float | None:
        return plans.least_s(begin, end) if end > begin else None

    num_stages = plans.orders.num_stages
    cut = split_ranges(len(plans.units.units), num_stages, least, least)
    assert cut is not None, "there are as many layers as stages"
    worth = _worth(plans, cut)
    while True:
        better = _better(plans, cut, worth)
        if better is None:
            return cut
        cut, worth = better


def _better(plans: StagePlans, cut: Cut, worth: Worth) -> tuple[Cut, Worth] | None:
    """The first neighbour that is better, those of the least seconds first; None: there is none."""
    for other in sorted(_neighbours(cut), key=lambda own: _least_worth(plans, own)):
        if worth[0] == 0 and _least_worth(plans, other) >= worth[1:]:
            return None
        if (found := _worth(plans, other)) < worth:
            return other, found
    return None


def _neighbours(cut: Cut) -> Iterator[Cut]:
    """One unit goes over one border."""
    for border in range(len(cut) - 1):
        for change in (-1, 1):
            moved = list(cut)
            moved[border] += change
            moved[border + 1] -= change
            if min(moved) > 0:
                yield tuple(moved)


def _least_worth(plans: StagePlans, cut: Cut) -> tuple[float, float]:
    """Seconds of the slowest rank, and of the slowest stage, if nothing is recomputed."""
    seconds = [plans.least_s(*own) for own in ranges_of(cut)]
    num_ranks = plans.orders.num_ranks
    return max(math.fsum(seconds[rank::num_ranks]) for rank in range(num_ranks)), max(seconds)


def _worth(plans: StagePlans, cut: Cut) -> Worth:
    costs, budget = rank_costs(plans, cut), plans.budget_bytes() or 0
    lacking = sum(max(1, (cost.floor_bytes or 0) - budget) for cost in costs if not cost.fits)
    _, slowest_stage = _least_worth(plans, cut)
    return lacking, max(cost.seconds for cost in costs), slowest_stage
