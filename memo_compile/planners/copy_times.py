"""When copies begin and end beside the computation, in simulated time.

Copies of one direction share a lane: each begins when it is issued and the one before has ended.
Both functions walk over *places*: place p is the border before call p. A copy is issued or waited
for at a place.
"""

import bisect
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

TOLERANCE = 1e-9
"""Of the whole time: a copy that would end later than its reader by less is not begun earlier."""


@dataclass(frozen=True, slots=True)
class CopyOut:
    """A copy to the host, issued at place ``issued``, waited for at place ``deadline`` at last."""

    issued: int
    deadline: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CopyBack:
    """A copy from the host that call ``needed`` reads.

    It may be issued from place ``earliest`` on, and must be at place ``latest`` at last.
    """

    earliest: int
    latest: int
    needed: int
    seconds: float


def waits_of(call_s: Sequence[float], copies: Sequence[CopyOut]) -> list[int]:
    """Per copy the first place at which it has ended, or its deadline, where calls then stall.

    ``copies`` are in the order of their lane, which is that of ``issued``. A deadline of
    ``len(call_s)`` is the end.
    """
    waits = [len(call_s)] * len(copies)
    due: dict[int, float] = {}
    ends: list[float] = []
    pending: deque[int] = deque()
    now = lane = 0.0
    upcoming = 0
    for place, seconds in enumerate(call_s):
        while upcoming < len(copies) and copies[upcoming].issued <= place:
            copy = copies[upcoming]
            lane = max(lane, now) + copy.seconds
            ends.append(lane)
            due[copy.deadline] = max(lane, due.get(copy.deadline, 0.0))
            pending.append(upcoming)
            upcoming += 1
        now = max(now, due.get(place, 0.0))
        while pending and ends[pending[0]] <= now:
            waits[pending.popleft()] = place
        now += seconds
    return waits


def issues_of(call_s: Sequence[float], copies: Sequence[CopyBack]) -> list[int]:
    """Per copy the last place at which it can be issued without a call beginning later.

    ``copies`` are in the order of their lane; their ``latest`` ascend. Calls begin as if every
    copy were issued as early as it may be; then each is put off, the last one first.
    """
    earliest = _ascending(copies)
    borders, starts = _earliest_run(call_s, copies, earliest)
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


def _earliest_run(
    call_s: Sequence[float], copies: Sequence[CopyBack], earliest: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Per place the end of the call before it; per call its begin, after what it waits for."""
    borders, starts = [], []
    due: dict[int, float] = {}
    now = lane = 0.0
    upcoming = 0
    for place, seconds in enumerate(call_s):
        borders.append(now)
        while upcoming < len(copies) and earliest[upcoming] <= place:
            lane = max(lane, now) + copies[upcoming].seconds
            due[copies[upcoming].needed] = lane
            upcoming += 1
        now = max(now, due.get(place, 0.0))
        starts.append(now)
        now += seconds
    return borders, starts
