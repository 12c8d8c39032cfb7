"""The independent judge of a placement. It shares nothing with the solvers but the data types.

The proof is a sweep over events: at every birth the address range must be free of live ranges.
Live ranges are kept sorted by address and never overlap, so looking at two neighbours suffices.
"""

import bisect
from collections.abc import Mapping
from typing import NamedTuple

from memo_compile.errors import InvalidPlan
from memo_compile.planners.placement.placement_problem import Buffer, Placement, PlacementProblem

_SHOWN = 5
"""Most violations that an error quotes, since one defect usually shows in many pairs."""


class _Live(NamedTuple):
    start: int
    stop: int
    id: str


def check_placement(
    problem: PlacementProblem, placement: Placement | Mapping[str, int], *, capacity: bool = True
) -> None:
    """Raises InvalidPlan unless ``placement`` is valid; the message quotes the first violations.

    It must be complete, aligned, disjoint and within the capacity, and keep fixed offsets.
    ``capacity=False`` is for the lowest placement that was found in vain. The height that a
    ``Placement`` states is checked too.
    """
    stated = placement.height_bytes if isinstance(placement, Placement) else None
    offsets = placement.offsets if isinstance(placement, Placement) else placement
    violations = list(find_violations(problem, offsets, capacity=capacity))
    height = max((offsets[b.id] + b.size for b in problem.buffers if b.id in offsets), default=0)
    if stated is not None and stated != height:
        violations.append(f"height: stated {stated} bytes, the offsets reach {height}")
    if violations:
        unshown = f" (and {len(violations) - _SHOWN} more)" if len(violations) > _SHOWN else ""
        raise InvalidPlan("placement: " + "; ".join(violations[:_SHOWN]) + unshown)


def find_violations(
    problem: PlacementProblem, offsets: Mapping[str, int], *, capacity: bool = True
) -> tuple[str, ...]:
    """One sentence for each broken promise of ``offsets`` (bytes by buffer id); empty if valid."""
    ids = {buffer.id for buffer in problem.buffers}
    violations = [f"{name}: offset for an unknown buffer" for name in offsets if name not in ids]
    placed = []
    for buffer in problem.buffers:
        if buffer.id not in offsets:
            violations.append(f"{buffer.id}: has no offset")
            continue
        placed.append(buffer)
        violations += _single_violations(problem, buffer, offsets[buffer.id], capacity)
    return tuple(violations) + tuple(_overlaps(placed, offsets))


def _single_violations(
    problem: PlacementProblem, buffer: Buffer, offset: int, capacity: bool
) -> list[str]:
    """What is wrong with ``buffer`` at ``offset``, whatever the others do."""
    violations = []
    if offset < 0:
        violations.append(f"{buffer.id}: offset {offset} is negative")
    for alignment in (problem.alignment, buffer.alignment):
        if offset % alignment:
            violations.append(f"{buffer.id}: offset {offset} is not a multiple of {alignment}")
    if buffer.offset is not None and offset != buffer.offset:
        violations.append(f"{buffer.id}: offset {offset}, but {buffer.offset} is fixed")
    if capacity and problem.capacity is not None and offset + buffer.size > problem.capacity:
        violations.append(
            f"{buffer.id}: ends at {offset + buffer.size}, beyond the capacity {problem.capacity}"
        )
    return violations


def _overlaps(buffers: list[Buffer], offsets: Mapping[str, int]) -> list[str]:
    """Pairs that share a byte while both are live. Deaths come before births of the same time."""
    events = []
    for buffer in buffers:
        if buffer.size == 0:
            continue
        entry = _Live(offsets[buffer.id], offsets[buffer.id] + buffer.size, buffer.id)
        # The lifetime minus its gaps, walked here anew: sharing the solvers' walk would share bugs.
        edges = [buffer.lower, *(t for gap in buffer.gaps for t in gap), buffer.upper]
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            if begin < end:
                events += [(begin, 1, entry), (end, 0, entry)]
    events.sort(key=lambda event: event[:2])
    live: list[_Live] = []
    violations = []
    for time, birth, entry in events:
        at = bisect.bisect_left(live, entry)
        if not birth:
            assert live[at] == entry, f"{entry.id} dies at {time} without being live"
            live.pop(at)
            continue
        for other in live[max(at - 1, 0) : at + 1]:
            if other.start < entry.stop and entry.start < other.stop:
                violations.append(
                    f"{other.id} [{other.start}, {other.stop}) and {entry.id} "
                    f"[{entry.start}, {entry.stop}) overlap at time {time}"
                )
        live.insert(at, entry)
    return violations
