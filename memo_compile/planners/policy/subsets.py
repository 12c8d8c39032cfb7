"""Which sets of a layer's slots are worth recomputing: the lower hull of seconds over bytes freed.

All subsets are evaluated at once with numpy, one in each row of a table. Slots beyond
``MAX_GROUPS`` are merged first: two of nearly the same price per byte seldom get other decisions.
"""

from typing import Any

import numpy as np

from memo_compile.planners.move_rules import slots_s
from memo_compile.step.movable import LayerClass

MAX_GROUPS = 12
"""Most groups of slots of which all subsets are evaluated: 2^12 of 100 operators take 10 ms."""

MAX_SETS = 6
"""Most sets, the empty and the largest included, since each chosen one is a region to lower."""

MIN_SHARE = 0.03
"""A set gets no region of its own if it frees less than this share of the recomputable bytes more
than the set before it."""


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
    points = zip(freed[rows].tolist(), seconds[rows].tolist(), rows.tolist(), strict=True)
    hull = lower_hull(sorted(points))
    return tuple(
        frozenset(slot for bit, group in enumerate(groups) if row >> bit & 1 for slot in group)
        for _, _, row in _spaced(hull)
    )


def slot_groups(cls: LayerClass) -> list[tuple[int, ...]]:
    """The recomputable slots, merged into at most MAX_GROUPS of a similar price per byte."""

    def price(group: tuple[int, ...]) -> float:
        return slots_s(cls, group) / max(1, _bytes(cls, group))

    single: list[tuple[int, ...]] = [
        (number,) for number, slot in enumerate(cls.slots) if slot.can_recompute
    ]
    groups = sorted(single, key=lambda group: (price(group), group))
    prices = [price(group) for group in groups]
    while len(groups) > MAX_GROUPS:
        sizes = [_bytes(cls, group) for group in groups]
        loss = [
            (prices[at + 1] - prices[at]) * min(sizes[at], sizes[at + 1])
            for at in range(len(groups) - 1)
        ]
        at = loss.index(min(loss))
        groups[at : at + 2] = [tuple(sorted(groups[at] + groups[at + 1]))]
        prices[at : at + 2] = [price(groups[at])]
    return groups


def _bytes(cls: LayerClass, group: tuple[int, ...]) -> int:
    return sum(cls.slots[slot].size_bytes for slot in group)


def _table(cls: LayerClass, groups: list[tuple[int, ...]]) -> tuple[Any, Any, Any]:
    """Per subset: bytes freed, seconds, and whether everything it needs may be recomputed.

    An operator runs where its slot is recomputed, or where one that runs reads it and it has none.
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


def lower_hull(points: list[tuple[int, float, int]]) -> list[tuple[int, float, int]]:
    """The corners of the lower convex hull of points sorted by bytes, from the empty set on."""
    hull: list[tuple[int, float, int]] = []
    for point in points:
        if hull and point[0] == hull[-1][0]:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(left: tuple[int, float, int], right: tuple[int, float, int]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


def _spaced(hull: list[tuple[int, float, int]]) -> list[tuple[int, float, int]]:
    """At most MAX_SETS corners: first and last, and between them those that lie well apart.

    Those go first without which the hull stays nearly the same, so that a corner after which each
    byte costs much more stays: the last set that makes no attention again.
    """
    first, last = hull[0], hull[-1]
    if last is first:
        return [first]
    kept = [first]
    for point in hull[1:-1]:
        apart = min(point[0] - kept[-1][0], last[0] - point[0])
        if apart >= MIN_SHARE * last[0]:
            kept.append(point)
    kept.append(last)
    while len(kept) > MAX_SETS:
        lost = [triangle(*kept[at - 1 : at + 2]) for at in range(1, len(kept) - 1)]
        kept.pop(1 + lost.index(min(lost)))
    return kept


def triangle(
    left: tuple[int, float, int], corner: tuple[int, float, int], right: tuple[int, float, int]
) -> float:
    """Bytes times seconds between the hull at ``corner`` and the line that would cut it off."""
    return (corner[0] - left[0]) * (right[1] - left[1]) - (right[0] - left[0]) * (
        corner[1] - left[1]
    )
