"""Which pages of the arena are given back while the user's code runs between two halves of a group.

The temporary buffers of the half that has run are dead then, and those of later halves are not yet
written. Where the device takes single pages back (CPU), the user's code may use that memory; the
next half gets the pages again as it writes to them.
"""

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from memo_compile.step.ordinary import passing_bytes
from memo_compile.step.problem import ArenaBuffer, Problem, call_starts

MEASURED_BYTES = 2**18
"""Unit in which the memory of user code is counted: a second reading may be one unit larger.
Readings of two processes differed by 20 KiB; the kernel's count may lag by 128 KiB a core."""

IGNORED_BYTES = 2**20
"""User code that takes less is not counted: the threads and imports of a first step take as much,
and a plan's slack covers it."""

PAGE_BYTES = 2**16
"""Linux's largest usual page. Only whole pages are given back; an arena may begin inside one."""

MIN_RANGE_BYTES = 2**19
"""Shorter ranges are not given back: each costs a system call and splits a huge page."""

Range = tuple[int, int]
"""Bytes of the arena, ``[start, end)``."""


def most_between(problem: Problem) -> int:
    """Returns the most bytes that the user's code takes between two halves, as measured."""
    return max((interlude.most_bytes for interlude in problem.interludes), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedInterlude:
    """One interlude of a placed step."""

    call: int
    """Index of the call before it."""
    ordinary_bytes: int
    """The most ordinary memory while it runs."""
    alive: tuple[Range, ...]
    """Ranges of the arena that are alive while it runs, by address."""

    def dead(self, arena_bytes: int) -> Iterator[Range]:
        """Yields the ranges of the first ``arena_bytes`` that can be given back, by address.

        A page may reach over the border of a live range, so one page beside each is left alone.
        """
        live_end = 0
        for start, end in (*self.alive, (arena_bytes, arena_bytes)):
            first = live_end + PAGE_BYTES if live_end else 0
            last = start if start >= arena_bytes else start - PAGE_BYTES
            if min(last, arena_bytes) - first >= MIN_RANGE_BYTES:
                yield first, min(last, arena_bytes)
            live_end = max(live_end, end)

    def stays_bytes(self, arena_bytes: int) -> int:
        """Returns how many of the first ``arena_bytes`` cannot be given back."""
        return arena_bytes - sum(end - start for start, end in self.dead(arena_bytes))

    def dropped(self, arena_bytes: int, room_bytes: int) -> tuple[Range, ...]:
        """Returns ranges of the first ``arena_bytes`` to give back, by address.

        The highest are taken, and no more than leaves ``room_bytes``, if so much can be given back.
        """
        ranges: list[Range] = []
        excess = arena_bytes - room_bytes
        for start, end in reversed(list(self.dead(arena_bytes))):
            if excess <= 0:
                break
            first = max(start, end - max(excess, MIN_RANGE_BYTES))
            ranges.append((first, end))
            excess -= end - first
        return tuple(reversed(ranges))


def placed_interludes(
    problem: Problem,
    buffers: Iterable[ArenaBuffer],
    offsets: Mapping[str, int],
    ordinary_after: list[int],
) -> tuple[PlacedInterlude, ...]:
    """Returns the interludes of a placed step, each with the ranges of the arena that are alive.

    ``ordinary_after`` holds for each call the bytes of ordinary memory when it has ended.
    Cost: interludes x buffers.
    """
    if not problem.interludes:
        return ()
    starts, interludes = call_starts(problem), []
    placed = sorted(
        ((offsets[buffer.id], buffer) for buffer in buffers), key=operator.itemgetter(0)
    )
    for call, passing in passing_bytes(problem):
        line = starts[call + 1] - 1
        alive = tuple(
            (offset, offset + buffer.size_bytes)
            for offset, buffer in placed
            if buffer.start <= line < buffer.end
        )
        ordinary = ordinary_after[call] + passing
        interludes.append(PlacedInterlude(call=call, ordinary_bytes=ordinary, alive=alive))
    return tuple(interludes)
