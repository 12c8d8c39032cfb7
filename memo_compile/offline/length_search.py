"""Searches the largest size that fits, guided by the bytes that the tried sizes need."""

import math
from collections.abc import Callable
from typing import NamedTuple

NEAR = 1.2
"""Greedy's smallest plan, in tiles everywhere, takes at most so many times the bytes of the plan
that the full search chooses."""

LONGER, LONGEST = 4, 64
"""The next length is LONGER times the last while all fit and their bytes are unknown, and at most
LONGEST times it otherwise."""

HALVED_EACH = 6
"""Every so many tries the search halves the interval, in case the fitted line misleads it."""


class Need(NamedTuple):
    """What a step of some size needs."""

    num_bytes: float
    """Of a small plan of the step; infinite where that is unknown."""
    fits: bool


def need_of(available_bytes: int, least: Callable[[], float], full: Callable[[], float]) -> Need:
    """Returns the need of one size, with as little planning as decides whether it fits.

    ``least`` returns the bytes of greedy's smallest plan, in little time. ``full`` returns
    those of the full search, and is called only where the smallest plan is just too large.
    """
    num_bytes = least()
    if available_bytes < num_bytes <= NEAR * available_bytes:
        num_bytes = min(num_bytes, full())
    return Need(num_bytes, num_bytes <= available_bytes)


class LengthSearch:
    """Searches the largest count of granules that fits.

    ``low`` granules fit and ``_high`` do not (None: no count is known that does not). Between
    these the next count is read off a line through the bytes of the counts that were tried.
    """

    def __init__(
        self,
        *,
        start: int,
        budget_bytes: int,
        constant_bytes: int,
        rounder: int = 1,
        precision: float = 0.0,
    ) -> None:
        """``start`` is tried first; after it multiples of ``rounder`` come before other counts.

        The search ends where the answer is known to the share ``precision`` of it.
        """
        self.low = 0
        self._low_bytes: float = constant_bytes
        self._high: int | None = None
        self._high_bytes = math.inf
        self._start, self._rounder, self._precision = max(1, start), rounder, precision
        self._budget_bytes, self._constant_bytes = budget_bytes, constant_bytes
        self._step_up = self._step_down = 1
        """Least distance of the next count from ``low`` and from ``_high``; doubled where the line
        missed."""
        self.num_tried = 0
        self.is_flat = False
        """True where the last two counts that fit need equal bytes, so that a line says nothing of
        larger ones."""

    def largest(
        self,
        need: Callable[[int], Need],
        most: int,
        is_enough: Callable[[int], bool] = lambda num_tried: False,
    ) -> int | None:
        """Calls ``need`` until ``low`` is the largest count that fits, or ``most``; returns None.

        Where ``is_enough``, called with the number of counts that were tried, ends the search
        before that, returns the count to try next.
        """
        while self.low < most and (count := self.next_count()) is not None:
            count = min(count, most)
            if is_enough(self.num_tried):
                return count
            self.add(count, need(count))
        return None

    @property
    def least_too_large(self) -> int | None:
        """Returns the smallest count that was seen not to fit; None: there is none."""
        return self._high

    def add(self, count: int, need: Need) -> None:
        """Notes what ``count`` granules need."""
        self.num_tried += 1
        if need.fits:
            # The line that foretold no count above ``low`` was too low.
            self._step_up = 1 if self.low < self._guess() else 2 * self._step_up
            self._step_down = 1
            self.is_flat = self.low > 0 and need.num_bytes == self._low_bytes < math.inf
            self.low, self._low_bytes = count, need.num_bytes
        else:
            # The line that foretold a count as near to ``_high`` as is tried was too high.
            is_too_high = self._high is not None and count >= self._high - self._step_down
            self._step_down = 2 * self._step_down if is_too_high else 1
            self._high, self._high_bytes = count, need.num_bytes

    def next_count(self) -> int | None:
        """Returns the count to try next; None when ``low`` is the answer.

        Counts that are no multiple of ``rounder`` divide into no tiles and so may need far more
        bytes. They are tried only between two neighbouring multiples that are decided.
        """
        count = self._nearest_count()
        if count is None or not self.num_tried:
            return count
        next_multiple = (self.low // self._rounder + 1) * self._rounder
        if self._high is not None and next_multiple >= self._high:
            return count
        return max(next_multiple, count // self._rounder * self._rounder)

    def _nearest_count(self) -> int | None:
        """Returns the count to try next, whether or not it is a multiple of ``rounder``."""
        if self._high is None and not self.low:
            return self._start
        if self._high is None and self.is_flat:
            return LONGEST * self.low
        if self._high is None:
            return min(max(self._guess(), self.low + self._step_up), LONGEST * self.low)
        if self._high - self.low <= max(1, int(self._precision * self.low)):
            return None
        if self.num_tried % HALVED_EACH == 0:
            return (self.low + self._high) // 2
        guess = max(self._guess(), self.low + self._step_up)
        return max(self.low + 1, min(guess, self._high - self._step_down))

    def _guess(self) -> int:
        """Returns the count whose bytes equal the budget, on a line through the last two points.

        Points: 0 granules, ``low`` and ``_high``, as far as their bytes are known. Where no line
        rises: ``LONGER`` times ``low`` while every count fits, else 0.
        """
        points = [
            (count, num_bytes)
            for count, num_bytes in (
                (0, self._constant_bytes),
                (self.low, self._low_bytes),
                (self._high, self._high_bytes),
            )
            if count is not None and num_bytes < math.inf
        ]
        (few, few_bytes), (many, many_bytes) = points[-2:] if len(points) > 1 else points * 2
        if many_bytes <= few_bytes:
            return LONGER * self.low if self._high is None else 0
        left_bytes = self._budget_bytes - few_bytes
        return int(few + (many - few) * left_bytes / (many_bytes - few_bytes))
