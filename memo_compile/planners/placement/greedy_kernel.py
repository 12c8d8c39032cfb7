"""Greedy placement's loop in a form that numba can compile.

Most buffers live for a hundredth of the step. So placed buffers are listed by stretches of
sections, and a buffer is compared only with those that live near it.
"""

from typing import Any

import numpy as np

FREE = -1
"""The same value as ``instance.FREE``."""

STRETCH = 64
"""How many neighbouring sections share one list of the buffers alive in any of them."""


def place_each(
    sequence: Any,
    size: Any,
    align: Any,
    fixed: Any,
    span_start: Any,
    span_lower: Any,
    span_upper: Any,
    best_fit: bool,
    offsets: Any,
) -> None:
    """Fills ``offsets`` (N,) in the order of ``sequence`` (N,); the rest is as in ``Instance``."""
    spans = span_start, span_lower, span_upper
    first = span_lower[span_start[:-1]] // STRETCH
    last = (span_upper[span_start[1:] - 1] - 1) // STRETCH
    # A list per stretch: its newest entry (-1: none); per entry its buffer and the entry before.
    newest = np.full(last.max() + 1 if len(last) else 0, -1)
    placed = np.zeros((last - first + 1).sum(), dtype=np.int64)
    earlier, num_entries = np.zeros_like(placed), 0
    # ``met``: the turn, counted from 1, that looked at a buffer last; it may be in many lists.
    beside, met = np.zeros_like(offsets), np.zeros_like(offsets)
    for count in range(len(sequence)):
        item, num_beside = sequence[count], 0
        if fixed[item] != FREE:
            offsets[item] = fixed[item]
        else:
            for stretch in range(first[item], last[item] + 1):
                entry = newest[stretch]
                while entry >= 0:
                    other, entry = placed[entry], earlier[entry]
                    is_beside = met[other] <= count and share_a_section(item, other, spans)
                    beside[num_beside] = other
                    num_beside += is_beside
                    met[other] = count + 1
            others = beside[:num_beside]
            others = others[np.argsort(offsets[others])]
            offsets[item] = hole(item, others, size, align, best_fit, offsets)
        for stretch in range(first[item], last[item] + 1):
            placed[num_entries], earlier[num_entries] = item, newest[stretch]
            newest[stretch] = num_entries
            num_entries += 1


def hole(item: int, beside: Any, size: Any, align: Any, best_fit: bool, offsets: Any) -> int:
    """The lowest (or smallest) free offset for ``item`` between ``beside``, from low to high."""
    step, least_room = max(align[item], 1), -1
    highest, hole_begin = 0, -1
    for other in beside:
        begin = -(-highest // step) * step
        room = offsets[other] - begin
        if room >= size[item] and (least_room < 0 or room < least_room):
            hole_begin, least_room = begin, room
            if not best_fit:
                break
        highest = max(highest, offsets[other] + size[other])
    return hole_begin if hole_begin >= 0 else -(-highest // step) * step


def share_a_section(item: int, other: int, spans: Any) -> bool:
    """True for two buffers that are alive at one time."""
    span_start, span_lower, span_upper = spans
    for section in range(span_start[item], span_start[item + 1]):
        for their in range(span_start[other], span_start[other + 1]):
            if span_lower[their] < span_upper[section] and span_upper[their] > span_lower[section]:
                return True
    return False
