"""The largest size that fits, found from the bytes that a few sizes need."""

import math
from collections.abc import Callable
from typing import NamedTuple

NEAR = 1.2
"""Greed's smallest plan, in tiles everywhere, may take so many times what the whole choice does."""

LONGER, LONGEST = 4, 64
"""The next length is LONGER times the last while all fit and their bytes are unknown, and at most
LONGEST times it otherwise."""

HALVED_EACH = 6
"""Every so many tries the search halves what is left, in case the fitted line misleads it."""


class Need(NamedTuple):
    """What a plan of few bytes takes, infinite where it is unknown, and whether one fits."""

    num_bytes: float
    fits: bool


def need_of(available_bytes: int, least: Callable[[], float], whole: Callable[[], float]) -> Need:
    """What a size needs, and whether it fits.

    ``least`` tells what greed's smallest plan takes, which is known soon. Only where that is just
    too large the whole choice is asked as well.
    """
    num_bytes = least()
    if available_bytes < num_bytes <= NEAR * available_bytes:
        num_bytes = min(num_bytes, whole())
    return Need(num_bytes, num_bytes <= available_bytes)


class LengthSearch:
    """The most granules that fit: ``low`` do, ``high`` do not; None: not known yet."""

    def __init__(
        self, *, start: int, budget_bytes: int, constant_bytes: int, rounder: int = 1
    ) -> None:
        """``start`` is tried first; after it multiples of ``rounder`` come before other counts."""
        self.low = 0
        self._low_bytes: float = constant_bytes
        self._high: int | None = None
        self._high_bytes = math.inf
        self._start, self._rounder = max(1, start), rounder
        self._budget_bytes, self._constant_bytes = budget_bytes, constant_bytes
        self._longer = self._shorter = 1
        """Granules that the next length differs from ``low`` or ``high`` at least; doubled where
        the line missed."""
        self.num_told = 0
        """How many counts were tried."""
        self.is_flat = False
        """The last two sizes that fit need as many bytes: a line says nothing of larger ones."""

    def largest(
        self, need: Callable[[int], Need], most: int, max_tries: float = math.inf
    ) -> int | None:
        """Ask ``need`` until ``low`` is the most granules that fit, ``most`` or fewer.

        None then; the count that would come next where so many tries did not tell.
        """
        while self.low < most and (count := self.next_count()) is not None:
            count = min(count, most)
            if self.num_told >= max_tries:
                return count
            self.tell(count, need(count))
        return None

    def tell(self, count: int, need: Need) -> None:
        """``count`` granules fit, or do not, and need as many bytes."""
        self.num_told += 1
        if need.fits:
            self._longer = 1 if self.low < self._guess() else 2 * self._longer
            self._shorter = 1
            self.is_flat = self.low > 0 and need.num_bytes == self._low_bytes < math.inf
            self.low, self._low_bytes = count, need.num_bytes
        else:
            missed = self._high is not None and count >= self._high - self._shorter
            self._shorter = 2 * self._shorter if missed else 1
            self._high, self._high_bytes = count, need.num_bytes

    def next_count(self) -> int | None:
        """What to try next; None when the answer is ``low``.

        Uneven counts, which divide into no tiles and so may need far more, are tried only between
        two neighbouring multiples of ``rounder``.
        """
        count = self._nearest_count()
        if count is None or not self.num_told:
            return count
        above = (self.low // self._rounder + 1) * self._rounder
        if self._high is not None and above >= self._high:
            return count
        return max(above, count // self._rounder * self._rounder)

    def _nearest_count(self) -> int | None:
        if self._high is None and not self.low:
            return self._start
        if self._high is None and self.is_flat:
            return LONGEST * self.low
        if self._high is None:
            return min(max(self._guess(), self.low + self._longer), LONGEST * self.low)
        if self._high - self.low <= 1:
            return None
        if self.num_told % HALVED_EACH == 0:
            return (self.low + self._high) // 2
        wanted = max(self._guess(), self.low + self._longer)
        return max(self.low + 1, min(wanted, self._high - self._shorter))

    def _guess(self) -> int:
        """From a line through what is known; without one 0, or ``LONGER`` times where all fit."""
        points = [
            (count, num_bytes)
            for count, num_bytes in (
                (0, self._constant_bytes),
                (self.low, self._low_bytes),
                (self._high, self._high_bytes),
            )
            if count is not None and num_bytes < math.inf
        ]
        (before, less), (after, more) = points[-2:] if len(points) > 1 else (*points, *points)
        if more <= less:
            return LONGER * self.low if self._high is None else 0
        return int(before + (after - before) * (self._budget_bytes - less) / (more - less))
