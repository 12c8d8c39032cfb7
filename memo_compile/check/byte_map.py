"""A map from byte ranges to what they hold."""

import bisect
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class ByteMap(Generic[T]):
    """Disjoint ranges ``[start, end)``, each with a tag. Painting a range replaces what was there.

    Cost of one operation: log of the number of ranges, and the ranges it touches.
    """

    __slots__ = ("_pieces", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._pieces: list[tuple[int, int, T]] = []

    def paint(self, start: int, end: int, tag: T) -> None:
        """``[start, end)`` holds ``tag``."""
        low, high = self._touched(start, end)
        kept: list[tuple[int, int, T]] = []
        for piece_start, piece_end, old in self._pieces[low:high]:
            if piece_start < start:
                kept.append((piece_start, start, old))
            if piece_end > end:
                kept.append((end, piece_end, old))
        kept.append((start, end, tag))
        kept.sort(key=lambda piece: piece[0])
        self._pieces[low:high] = kept
        self._starts[low:high] = [piece[0] for piece in kept]

    def pieces(self, start: int, end: int) -> list[tuple[int, int, T]]:
        """What lies in ``[start, end)``, cut to it, in order; equal neighbours are one piece."""
        low, high = self._touched(start, end)
        found: list[tuple[int, int, T]] = []
        for piece_start, piece_end, tag in self._pieces[low:high]:
            first, last = max(start, piece_start), min(end, piece_end)
            if found and found[-1][1] == first and found[-1][2] == tag:
                found[-1] = (found[-1][0], last, tag)
            else:
                found.append((first, last, tag))
        return found

    def gaps(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The parts of ``[start, end)`` that hold nothing, in order."""
        at = start
        for first, last, _ in self.pieces(start, end):
            if first > at:
                yield at, first
            at = last
        if at < end:
            yield at, end

    def _touched(self, start: int, end: int) -> tuple[int, int]:
        """Indices of the pieces that share a byte with ``[start, end)``."""
        low = bisect.bisect_right(self._starts, start)
        if low and self._pieces[low - 1][1] > start:
            low -= 1
        return low, max(low, bisect.bisect_left(self._starts, end))
