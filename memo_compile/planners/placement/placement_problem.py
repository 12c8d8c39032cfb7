"""The placement problem and its answer as plain data.

A buffer is a rectangle of known width (its lifetime) and height (its size); placement chooses the
offset. Two buffers that are alive at the same time must not share a byte.

Aliases and in-place pairs are ONE buffer here: merge them before (one size, the union of the
lifetimes). Separate arenas (device, host) are separate problems.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from memo_compile.errors import InputError
from memo_compile.planners.solver import SolveStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """``size`` bytes that are live over the half-open ``[lower, upper)`` minus ``gaps``.

    Raises InputError: a field makes no sense; the message names the buffer and the field.
    """

    id: str
    lower: int
    upper: int
    size: int
    """Bytes; 0 is allowed and takes no room."""
    alignment: int = 1
    """The offset is a multiple of this many bytes."""
    offset: int | None = None
    """Bytes; set when the offset is given and must be kept."""
    gaps: tuple[tuple[int, int], ...] = ()
    """Half-open spans inside the lifetime in which the bytes belong to nobody; ascending."""
    hint: int | None = None
    """Bytes; an offset to try first. It binds nobody."""
    block: str | None = None
    """The call of a training step whose transient this is."""

    def __post_init__(self) -> None:
        if self.lower >= self.upper:
            raise self._error("lower", f"expected lower < upper, got {self.lower} >= {self.upper}")
        if self.size < 0:
            raise self._error("size", f"expected at least 0 bytes, got {self.size}")
        if self.alignment < 1:
            raise self._error("alignment", f"expected at least 1 byte, got {self.alignment}")
        for name in ("offset", "hint"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise self._error(name, f"expected at least 0 bytes, got {value}")
        if self.offset is not None and self.offset % self.alignment:
            raise self._error("offset", f"{self.offset} is not a multiple of {self.alignment}")
        self._check_gaps()

    def _check_gaps(self) -> None:
        """Raises InputError: gaps overlap, leave the lifetime, or fill it."""
        end = self.lower
        for lower, upper in self.gaps:
            if lower >= upper:
                raise self._error("gaps", f"expected lower < upper, got {lower}-{upper}")
            if lower < end or upper > self.upper:
                raise self._error(
                    "gaps",
                    f"expected ascending spans inside [{self.lower}, {self.upper}), "
                    f"got {lower}-{upper}",
                )
            end = upper
        if not self.segments():
            raise self._error("gaps", "they leave no time in which the buffer is live")

    def _error(self, name: str, message: str) -> InputError:
        return InputError(f"buffer {self.id!r}: {name}: {message}")

    def segments(self) -> tuple[tuple[int, int], ...]:
        """The half-open spans in which the buffer holds its bytes: the lifetime without gaps."""
        spans, start = [], self.lower
        for lower, upper in self.gaps:
            if lower > start:
                spans.append((start, lower))
            start = upper
        if start < self.upper:
            spans.append((start, self.upper))
        return tuple(spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementProblem:
    """Buffers that share one arena.

    Raises InputError: an id twice, a fixed offset off the alignment, or two fixed buffers that
    share a byte at the same time.
    """

    buffers: tuple[Buffer, ...]
    capacity: int | None = None
    """Bytes of the arena; with None the smallest height is sought."""
    alignment: int = 1
    """Every offset is a multiple of this many bytes and of its buffer's own alignment."""

    def __post_init__(self) -> None:
        if self.capacity is not None and self.capacity < 0:
            raise InputError(f"capacity: expected at least 0 bytes, got {self.capacity}")
        if self.alignment < 1:
            raise InputError(f"alignment: expected at least 1 byte, got {self.alignment}")
        if (twice := _first_duplicate(self.buffers)) is not None:
            raise InputError(f"buffer {twice!r}: id: used twice; ids must be unique")
        self._check_fixed()

    def _check_fixed(self) -> None:
        """Raises InputError: a fixed offset is not aligned, or two of them clash."""
        for buffer in self.buffers:
            if buffer.offset is not None and buffer.offset % self.alignment:
                raise InputError(
                    f"buffer {buffer.id!r}: offset: {buffer.offset} is not a multiple of the "
                    f"alignment {self.alignment}"
                )
        for first, second in fixed_collisions(self.buffers):
            raise InputError(
                f"buffers {first.id!r} and {second.id!r}: offset: their fixed offsets overlap "
                f"({_span(first)} and {_span(second)} while both are live)"
            )

    def alignment_of(self, buffer: Buffer) -> int:
        """Bytes that the offset of ``buffer`` is a multiple of: the problem's and its own."""
        return math.lcm(self.alignment, buffer.alignment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where each buffer lies, how high that is, and what is proved about it."""

    offsets: Mapping[str, int]
    """Bytes from the arena's start, for every buffer; empty when INFEASIBLE was proved first."""
    height_bytes: int
    """Largest offset + size; 0 when ``offsets`` is empty."""
    lower_bound_bytes: int
    """No valid placement is lower than this."""
    status: SolveStatus
    """OPTIMAL: a smaller height is proved impossible. FEASIBLE: valid, and within the capacity.
    INFEASIBLE: proved; ``conflict`` names buffers that cannot fit together. TIME_LIMIT: nothing
    that fits was found in time, ``offsets`` holds the lowest found."""
    seconds: float
    solver: str
    """Which solver found these offsets: greedy, mip or search, and at which levels."""
    conflict: tuple[str, ...] = ()


def fixed_collisions(buffers: Iterable[Buffer]) -> Iterator[tuple[Buffer, Buffer]]:
    """Pairs with fixed offsets that share a live byte, by time. Quadratic in what lives at once."""
    fixed = [(b.offset, b) for b in buffers if b.offset is not None and b.size > 0]
    spans = sorted(
        (lower, upper, index) for index, (_, b) in enumerate(fixed) for lower, upper in b.segments()
    )
    live: list[tuple[int, int]] = []
    for lower, upper, index in spans:
        while live and live[0][0] <= lower:
            heapq.heappop(live)
        start, buffer = fixed[index]
        for other_start, other in (fixed[at] for _, at in live):
            if start < other_start + other.size and other_start < start + buffer.size:
                yield other, buffer
        heapq.heappush(live, (upper, index))


def _first_duplicate(buffers: Iterable[Buffer]) -> str | None:
    """The first id that an earlier buffer has as well."""
    seen: set[str] = set()
    for buffer in buffers:
        if buffer.id in seen:
            return buffer.id
        seen.add(buffer.id)
    return None


def _span(buffer: Buffer) -> str:
    assert buffer.offset is not None
    return f"[{buffer.offset}, {buffer.offset + buffer.size})"
