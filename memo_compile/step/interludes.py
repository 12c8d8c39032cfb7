"""Which pages of the arena go back while the user's own code runs between two halves of a group.

A half's transients are dead then, and so is what later halves make. Where the device takes single
pages back, that code may have their place; the next half brings the pages back as it writes.
"""

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from memo_compile.step.ordinary import passing_bytes
from memo_compile.step.problem import ArenaBuffer, Problem, call_starts

MEASURED_BYTES = 2**18
"""What user code takes is counted in units of this: measured anew, it may take one more. Between
two processes readings differed by 20 KiB; the kernel may be behind by 128 KiB for each core."""

IGNORED_BYTES = 2**20
"""Less than this is not counted: a plan's slack covers as much, and a first step's threads and
imports take it."""

PAGE_BYTES = 2**16
"""Linux's largest usual page. Only whole pages go, and an arena need not begin at one."""

MIN_RANGE_BYTES = 2**19
"""Shorter ranges stay: giving back costs a system call and splits a huge page."""

Range = tuple[int, int]
"""Bytes of the arena, ``[start, end)``."""


def most_between(problem: Problem) -> int:
    """The most bytes that the user's own code takes between two halves, as measured."""
    return max((found.most_bytes for found in problem.interludes), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedInterlude:
    """One interlude of a placed step."""

    call: int
    """Index of the call before it."""
    ordinary_bytes: int
    """The most of ordinary memory while it runs."""
    alive: tuple[Range, ...]
    """What of the arena is alive meanwhile, by address."""

    def dead(self, arena_bytes: int) -> Iterator[Range]:
        """What of the first ``arena_bytes`` of the arena can go, by address."""
        free = 0
        for start, end in (*self.alive, (arena_bytes, arena_bytes)):
            first = free + PAGE_BYTES if free else 0
            last = start if start >= arena_bytes else start - PAGE_BYTES
            if min(last, arena_bytes) - first >= MIN_RANGE_BYTES:
                yield first, min(last, arena_bytes)
            free = max(free, end)

    def stays_bytes(self, arena_bytes: int) -> int:
        """What of the first ``arena_bytes`` cannot go."""
        return arena_bytes - sum(end - start for start, end in self.dead(arena_bytes))

    def dropped(self, arena_bytes: int, room_bytes: int) -> tuple[Range, ...]:
        """What goes of the first ``arena_bytes`` so that ``room_bytes`` stay: no more than that."""
        found: list[Range] = []
        excess = arena_bytes - room_bytes
        for start, end in reversed(list(self.dead(arena_bytes))):
            if excess <= 0:
                break
            first = max(start, end - max(excess, MIN_RANGE_BYTES))
            found.append((first, end))
            excess -= end - first
        return tuple(reversed(found))


def pauses(
    problem: Problem,
    buffers: Iterable[ArenaBuffer],
    offsets: Mapping[str, int],
    ordinary_after: list[int],
) -> tuple[PlacedInterlude, ...]:
    """The interludes of a step; ``ordinary_after`` is ordinary memory per call when it has ended.

    Cost: interludes x buffers.
    """
    if not problem.interludes:
        return ()
    starts, found = call_starts(problem), []
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
        found.append(PlacedInterlude(call=call, ordinary_bytes=ordinary, alive=alive))
    return tuple(found)
