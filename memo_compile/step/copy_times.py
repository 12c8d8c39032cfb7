"""When copies begin and end beside the computation, in simulated time.

Copies of one direction share a lane: each begins when it is issued and the one before has ended.
Both functions walk over *places*: place p is the border before call p. A copy is issued or waited
for at a place.
"""

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

TOLERANCE = 1e-9
"""A copy may end after its reader begins, by this share of the step: that is rounding."""


@dataclass(slots=True)
class CopyLane:
    """Copies of one direction: first in, first out."""

    free_s: float = 0.0
    """When the last copy has ended."""

    def copy(self, issued_s: float, seconds: float) -> tuple[float, float]:
        """When a copy that is issued at ``issued_s`` begins and ends."""
        begin = max(issued_s, self.free_s)
        self.free_s = begin + seconds
        return begin, self.free_s


@dataclass(frozen=True, slots=True)
class CopyOut:
    """A copy to the host, issued at place ``issued``, waited for at ``deadline`` at the latest."""

    issued: int
    deadline: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CopyBack:
    """A reload that call ``needed`` reads, issued between places ``earliest`` and ``latest``."""

    earliest: int
    latest: int
    needed: int
    seconds: float


def waits_of(call_s: Sequence[float], copies: Sequence[CopyOut]) -> list[int]:
    """Per copy the first place at which it has ended, or its deadline, where calls then stall.

    ``copies`` are in the order of their lane, which is that of ``issued``. A deadline of
    ``len(call_s)`` is the end.
    """
    _, starts, ends = _run(call_s, [(copy.issued, copy.deadline, copy.seconds) for copy in copies])
    waits = [
        max(copy.issued, bisect.bisect_left(starts, end))
        for copy, end in zip(copies, ends, strict=False)
    ]
    return waits + [len(call_s)] * (len(copies) - len(ends))


def issues_of(call_s: Sequence[float], copies: Sequence[CopyBack]) -> list[int]:
    """Per copy the last place at which it can be issued without a call beginning later.

    ``copies`` are in the order of their lane; their ``latest`` ascend. Calls begin as if every
    copy were issued as early as it may be; then each is put off, the last one first.
    """
    earliest = _ascending(copies)
    lane = [
        (place, copy.needed, copy.seconds) for place, copy in zip(earliest, copies, strict=True)
    ]
    borders, starts, _ = _run(call_s, lane)
    tolerance = TOLERANCE * (starts[-1] if starts else 0.0)
    issues = [0] * len(copies)
    next_s, next_place = math.inf, len(call_s)
    for index in reversed(range(len(copies))):
        copy = copies[index]
        next_s = min(next_s, starts[copy.needed]) - copy.seconds
        place = bisect.bisect_right(borders, next_s + tolerance) - 1
        next_place = max(earliest[index], min(place, next_place, copy.latest))
        issues[index] = next_place
    return issues


def _ascending(copies: Sequence[CopyBack]) -> list[int]:
    """Per copy the place from which it may be issued, after those before it on the lane."""
    found, most = [], 0
    for copy in copies:
        most = min(max(most, copy.earliest), copy.latest)
        found.append(most)
    return found


def _run(
    call_s: Sequence[float], copies: Sequence[tuple[int, int, float]]
) -> tuple[list[float], list[float], list[float]]:
    """Runs calls beside copies (place of issue, place of wait, seconds), in their lane's order.

    Per place the end of the call before it; per call its begin, after what it waits for; per copy
    its end, as far as copies are issued before the last call.
    """
    borders: list[float] = []
    starts: list[float] = []
    ends: list[float] = []
    due: dict[int, float] = {}
    now, at, lane = 0.0, 0, CopyLane()
    events = {max(0, place) for issued, wait, _ in copies for place in (issued, wait)}
    for event in sorted(place for place in events if place < len(call_s)):
        apart = list(itertools.accumulate(call_s[at:event], initial=now))  # where nothing happens
        now, at = apart.pop(), event + 1
        borders += [*apart, now]
        while len(ends) < len(copies) and copies[len(ends)][0] <= event:
            _, wait, copy_seconds = copies[len(ends)]
            ends.append(lane.copy(now, copy_seconds)[1])
            due[wait] = ends[-1]
        now = max(now, due.get(event, 0.0))
        starts += [*apart, now]
        now += call_s[event]
    apart = list(itertools.accumulate(call_s[at:], initial=now))[:-1]
    return [*borders, *apart], [*starts, *apart], ends
