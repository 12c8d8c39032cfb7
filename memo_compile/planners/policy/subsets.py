"""Which sets of a layer's slots are worth recomputing: the lower hull of seconds over bytes freed.

A set on the hull is the cheapest for some price of a byte. Of sets that free 2 GiB in 10 ms, 3 GiB
in 30 ms and 4 GiB in 40 ms, the second is not on it: (2, 10) and (4, 40) pass below it.

All subsets are evaluated at once with numpy, one in each row of a table. Slots beyond
``MAX_GROUPS`` are merged first: two of nearly the same price per byte seldom get other decisions.
"""

from typing import Any, NamedTuple

import numpy as np

from memo_compile.planners.move_rules import slots_bytes, slots_s
from memo_compile.step.movable import LayerClass

MAX_GROUPS = 12
"""Most groups of slots of which all subsets are evaluated: 2^12 of 100 operators take 10 ms."""

MAX_SETS = 6
"""Most sets, the empty and the largest included, since each chosen one is a region to lower."""

MIN_SHARE = 0.03
"""A set gets no region of its own if it frees less than this share of the recomputable bytes more
than the set before it."""


class HullPoint(NamedTuple):
    """What stands at one corner of a hull; points compare by bytes, then by seconds."""

    num_bytes: int
    seconds: float
    number: int
    """Which of the caller's choices it is."""


def recompute_sets(cls: LayerClass) -> tuple[frozenset[int], ...]:
    """Sets of slots to recompute, ascending in bytes freed; the first is empty.

    The last one frees all that can be freed. No other set lies below the line through two
    neighbours: for each price of a byte one of them is the cheapest.
    """
    groups = slot_groups(cls)
    if not groups:
        return (frozenset(),)
    freed, seconds, possible = _table(cls, groups)
    rows = np.flatnonzero(possible)
    points = map(HullPoint, freed[rows].tolist(), seconds[rows].tolist(), rows.tolist())
    hull = lower_hull(sorted(points))
    return tuple(
        frozenset(
            slot for bit, group in enumerate(groups) if point.number >> bit & 1 for slot in group
        )
        for point in _spaced(hull)
    )


def slot_groups(cls: LayerClass) -> list[tuple[int, ...]]:
    """The recomputable slots, merged into at most MAX_GROUPS of a similar price per byte."""

    def price(group: tuple[int, ...]) -> float:
        return slots_s(cls, group) / max(1, slots_bytes(cls, group))

    single: list[tuple[int, ...]] = [
        (number,) for number, slot in enumerate(cls.slots) if slot.can_recompute
    ]
    groups = sorted(single, key=lambda group: (price(group), group))
    prices = [price(group) for group in groups]
    while len(groups) > MAX_GROUPS:
        sizes = [slots_bytes(cls, group) for group in groups]
        losses = [  # of the seconds that other decisions for the two could save
            (prices[at + 1] - prices[at]) * min(sizes[at], sizes[at + 1])
            for at in range(len(groups) - 1)
        ]
        at = losses.index(min(losses))
        groups[at : at + 2] = [tuple(sorted(groups[at] + groups[at + 1]))]
        prices[at : at + 2] = [price(groups[at])]
    return groups


def _table(cls: LayerClass, groups: list[tuple[int, ...]]) -> tuple[Any, Any, Any]:
    """Per subset: bytes freed, seconds, and whether everything it needs may be recomputed.

    In subset n group g is recomputed if bit g of n is set. An operator runs in the subsets that
    recompute its slot; one without a slot in those where an operator that runs reads its result.
    """
    rows = np.arange(1 << len(groups), dtype=np.int64)
    none = np.zeros(len(rows), dtype=bool)
    recomputed_of = {
        slot: (rows >> bit & 1).astype(bool) for bit, group in enumerate(groups) for slot in group
    }
    freed = np.zeros(len(rows), dtype=np.int64)
    for slot, recomputed in recomputed_of.items():
        freed += recomputed * cls.slots[slot].size_bytes
    seconds, possible = np.zeros(len(rows)), ~none
    read = [none.copy() for _ in cls.ops]
    for op, is_read in zip(reversed(cls.ops), reversed(read), strict=True):
        runs = is_read if op.slot is None else recomputed_of.get(op.slot, none)
        seconds += runs * op.seconds
        for source in op.inputs:
            read[source] |= runs
        if not op.can_recompute:
            possible &= ~runs
    return freed, seconds, possible


def lower_hull(points: list[HullPoint]) -> list[HullPoint]:
    """The corners of the lower convex hull of ``points``, which are sorted, from the first on."""
    hull: list[HullPoint] = []
    for point in points:
        if hull and point.num_bytes == hull[-1].num_bytes:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(left: HullPoint, right: HullPoint) -> float:
    return (right.seconds - left.seconds) / (right.num_bytes - left.num_bytes)


def _spaced(hull: list[HullPoint]) -> list[HullPoint]:
    """At most MAX_SETS corners: first and last, and between them those that lie well apart.

    Corners are left out first without which the hull stays nearly the same. So one after which each
    byte costs much more stays: the last set that makes no attention again.
    """
    first, last = hull[0], hull[-1]
    if last is first:
        return [first]
    kept = [first]
    for point in hull[1:-1]:
        gap_bytes = min(point.num_bytes - kept[-1].num_bytes, last.num_bytes - point.num_bytes)
        if gap_bytes >= MIN_SHARE * last.num_bytes:
            kept.append(point)
    kept.append(last)
    while len(kept) > MAX_SETS:
        areas = [corner_area(*kept[at - 1 : at + 2]) for at in range(1, len(kept) - 1)]
        kept.pop(1 + areas.index(min(areas)))
    return kept


def corner_area(left: HullPoint, corner: HullPoint, right: HullPoint) -> float:
    """Twice the triangle, in bytes times seconds, that a hull without ``corner`` would lose."""
    right_bytes, right_s = right.num_bytes - left.num_bytes, right.seconds - left.seconds
    return (corner.num_bytes - left.num_bytes) * right_s - right_bytes * (
        corner.seconds - left.seconds
    )
