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
        """Gives ``[start, end)`` the tag ``tag``."""
        low, high = self._touched(start, end)
        pieces: list[tuple[int, int, T]] = []
        for piece_start, piece_end, old in self._pieces[low:high]:
            if piece_start < start:
                pieces.append((piece_start, start, old))
            if piece_end > end:
                pieces.append((end, piece_end, old))
        pieces.append((start, end, tag))
        pieces.sort(key=lambda piece: piece[0])
        self._pieces[low:high] = pieces
        self._starts[low:high] = [piece[0] for piece in pieces]

    def pieces(self, start: int, end: int) -> list[tuple[int, int, T]]:
        """Returns the tagged parts of ``[start, end)`` in order; equal neighbours are one part."""
        low, high = self._touched(start, end)
        joined: list[tuple[int, int, T]] = []
        for piece_start, piece_end, tag in self._pieces[low:high]:
            first, last = max(start, piece_start), min(end, piece_end)
            if joined and joined[-1][1] == first and joined[-1][2] == tag:
                joined[-1] = (joined[-1][0], last, tag)
            else:
                joined.append((first, last, tag))
        return joined

    def gaps(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yields the parts of ``[start, end)`` without a tag, in order."""
        at = start
        for first, last, _ in self.pieces(start, end):
            if first > at:
                yield at, first
            at = last
        if at < end:
            yield at, end

    def _touched(self, start: int, end: int) -> tuple[int, int]:
        """Returns bounds in ``_pieces`` of those that share a byte with ``[start, end)``."""
        low = bisect.bisect_right(self._starts, start)
        if low and self._pieces[low - 1][1] > start:
            low -= 1
        return low, max(low, bisect.bisect_left(self._starts, end))
