"""When copies begin and end beside the computation, in simulated time.

Copies of one direction share a lane: each begins once it is issued and the copy before it has
ended. ``waits_of`` and ``issues_of`` find *places* for waits and for issues: place p lies directly
before call p.
"""

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

TOLERANCE = 1e-9
"""A copy may end this share of the step after its reader begins: rounding of sums of seconds."""


@dataclass(slots=True)
class CopyLane:
    """Copies of one direction: first in, first out."""

    free_s: float = 0.0
    """When the last copy has ended."""

    def copy(self, issued_s: float, seconds: float) -> tuple[float, float]:
        """Adds a copy that is issued at ``issued_s``; returns when it begins and when it ends."""
        begin = max(issued_s, self.free_s)
        self.free_s = begin + seconds
        return begin, self.free_s


@dataclass(frozen=True, slots=True)
class CopyOut:
    """A copy to the host: the place of its issue, and the last place for its wait."""

    issued: int
    deadline: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CopyBack:
    """A reload that call ``needed`` reads; issued between places ``earliest`` and ``latest``."""

    earliest: int
    latest: int
    needed: int
    seconds: float


def waits_of(call_s: Sequence[float], copies: Sequence[CopyOut]) -> list[int]:
    """Returns for each copy the first place at which it has ended, at the latest its deadline.

    A copy that has not ended by its deadline stalls the calls behind that. ``copies`` are in the
    order of their lane, which is that of ``issued``. A deadline of ``len(call_s)`` is the end.
    """
    lane = [(copy.issued, copy.deadline, copy.seconds) for copy in copies]
    _, starts, ends = _run_beside(call_s, lane)
    waits = [
        max(copy.issued, bisect.bisect_left(starts, end))
        for copy, end in zip(copies, ends, strict=False)
    ]
    return waits + [len(call_s)] * (len(copies) - len(ends))


def issues_of(call_s: Sequence[float], copies: Sequence[CopyBack]) -> list[int]:
    """Returns for each copy the last place at which its issue makes no call begin later.

    ``copies`` are in the order of their lane; their ``latest`` ascend. First every copy is issued
    as early as it may be, which says when calls begin; then each is put off, the last one first.
    """
    earliest = _earliest_in_order(copies)
    lane = [
        (place, copy.needed, copy.seconds) for place, copy in zip(earliest, copies, strict=True)
    ]
    place_s, starts, _ = _run_beside(call_s, lane)
    tolerance = TOLERANCE * (starts[-1] if starts else 0.0)
    issues = [0] * len(copies)
    begin_s, issue = math.inf, len(call_s)
    for index in reversed(range(len(copies))):
        copy = copies[index]
        begin_s = min(begin_s, starts[copy.needed]) - copy.seconds
        place = bisect.bisect_right(place_s, begin_s + tolerance) - 1
        issue = max(earliest[index], min(place, issue, copy.latest))
        issues[index] = issue
    return issues


def _earliest_in_order(copies: Sequence[CopyBack]) -> list[int]:
    """Returns for each copy the first place at which it may be issued behind those before it."""
    places, place = [], 0
    for copy in copies:
        place = min(max(place, copy.earliest), copy.latest)
        places.append(place)
    return places


def _run_beside(
    call_s: Sequence[float], copies: Sequence[tuple[int, int, float]]
) -> tuple[list[float], list[float], list[float]]:
    """Runs calls beside copies (place of issue, place of wait, seconds), in their lane's order.

    Returns for each place when the call before it ends; for each call when it begins, after what
    it waits for; for each copy when it ends, as far as copies are issued before the last call.
    """
    place_s: list[float] = []
    starts: list[float] = []
    ends: list[float] = []
    wait_ends: dict[int, float] = {}
    now, next_call, lane = 0.0, 0, CopyLane()
    events = {max(0, place) for issued, wait, _ in copies for place in (issued, wait)}
    for event in sorted(place for place in events if place < len(call_s)):
        # the calls before the event begin one right after the other
        undisturbed = list(itertools.accumulate(call_s[next_call:event], initial=now))
        now, next_call = undisturbed.pop(), event + 1
        place_s += [*undisturbed, now]
        while len(ends) < len(copies) and copies[len(ends)][0] <= event:
            _, wait, copy_seconds = copies[len(ends)]
            ends.append(lane.copy(now, copy_seconds)[1])
            wait_ends[wait] = ends[-1]
        now = max(now, wait_ends.get(event, 0.0))
        starts += [*undisturbed, now]
        now += call_s[event]
    undisturbed = list(itertools.accumulate(call_s[next_call:], initial=now))[:-1]
    return [*place_s, *undisturbed], [*starts, *undisturbed], ends
