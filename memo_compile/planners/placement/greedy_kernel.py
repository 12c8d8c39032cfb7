"""Greedy placement's loop in a form that numba can compile. Nothing here allocates."""

from typing import Any

FREE = -1
"""As ``instance.FREE``."""


def place_each(
    sequence: Any,
    size: Any,
    align: Any,
    fixed: Any,
    span_start: Any,
    span_lower: Any,
    span_upper: Any,
    best_fit: bool,
    by_offset: Any,
    offsets: Any,
) -> None:
    """Fill ``offsets`` (N,) in the order of ``sequence`` (N,); ``by_offset`` (N,) is scratch."""
    for count in range(len(sequence)):
        item, at = sequence[count], count
        if fixed[item] != FREE:
            offsets[item] = fixed[item]
        else:
            beside = by_offset[:count]
            spans = span_start, span_lower, span_upper
            offsets[item] = hole(item, beside, size, align, spans, best_fit, offsets)
        while at > 0 and offsets[by_offset[at - 1]] > offsets[item]:
            by_offset[at] = by_offset[at - 1]
            at -= 1
        by_offset[at] = item


def hole(
    item: int, placed: Any, size: Any, align: Any, spans: Any, best_fit: bool, offsets: Any
) -> int:
    """The lowest (or smallest) free offset for ``item`` among ``placed``, from low to high."""
    step, least = max(align[item], 1), -1
    highest, found = 0, -1
    for other in placed:
        if not share_a_section(item, other, spans):
            continue
        begin = -(-highest // step) * step
        room = offsets[other] - begin
        if room >= size[item] and (least < 0 or room < least):
            found, least = begin, room
            if not best_fit:
                break
        highest = max(highest, offsets[other] + size[other])
    return found if found >= 0 else -(-highest // step) * step


def share_a_section(item: int, other: int, spans: Any) -> bool:
    """True for two buffers that are alive at one time."""
    span_start, span_lower, span_upper = spans
    for own in range(span_start[item], span_start[item + 1]):
        for their in range(span_start[other], span_start[other + 1]):
            if span_lower[their] < span_upper[own] and span_upper[their] > span_lower[own]:
                return True
    return False
