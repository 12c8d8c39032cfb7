"""How long a placement is searched: seconds of a quiet machine, counted by the work that is done.

A clock would end the search elsewhere on a busy machine, and a step would then have another plan.
So each piece of work is taken to last as long as it did where it was measured, and the clock only
ends what takes ``SLOWER`` times as long. That is of the processor's time, which others do not take.
"""

import logging
import time
from typing import Self

log = logging.getLogger("memo")

SLOWER = 8.0
"""A processor that is so many times slower than the one that was measured ends its searches by the
clock."""

COMPILED_S, COMPILED_NODE_S = 1e-9, 4e-6
"""Seconds of a unit of work of the compiled search (``kernel.WORK``), and of each of its nodes: for
170 to 4,000 buffers 0.8 to 1.3 times what was measured."""

PLAIN_S, PLAIN_NODE_S = 1e-7, 8e-5
"""The same in plain Python: 0.7 to 1.3 times."""

ORDER_S, ORDER_PAIR_S = 5e-6, 3e-10
"""Seconds of a greedy order for each buffer, and for each pair of buffers: for 1,168 buffers of
Llama-3-8B a seventh of what it takes in plain Python."""

COMPILED_ORDER_S, NEAR_PAIR_S = 3e-7, 5e-9
"""The same where it is compiled, with pairs that live near each other only: for 800 to 22,000
buffers of Llama-3-8B and 70B 0.7 to 1.1 times what was measured."""


class Effort:
    """What a search may still take; parts of it are spent from the whole."""

    def __init__(self, seconds: float, whole: "Effort | None" = None) -> None:
        """``seconds`` may be infinite."""
        self._left_s = seconds
        self._whole = whole
        self._until_s = time.thread_time() + SLOWER * seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left, at least 0."""
        if self._left_s > 0 and time.thread_time() > self._until_s:
            log.warning(
                "memo: a placement's search is ended by the clock: the plan may be another one on "
                "a faster machine"
            )
            self._left_s = 0.0
        return max(0.0, self._counted_s())

    @property
    def is_over(self) -> bool:
        """True when nothing is left."""
        return self.left_s <= 0

    def _counted_s(self) -> float:
        """Seconds that the work leaves, of this part and of the whole."""
        if self._whole is None:
            return self._left_s
        return min(self._left_s, self._whole._counted_s())

    def spend(self, seconds: float) -> None:
        """So much has been done."""
        self._left_s -= seconds
        if self._whole is not None:
            self._whole.spend(seconds)

    def restart_clock(self) -> None:
        """What was done since the beginning was no search: the compiler's work is not counted."""
        self._until_s = time.thread_time() + SLOWER * max(0.0, self._left_s)
        if self._whole is not None:
            self._whole.restart_clock()

    def part(self, seconds: float) -> Self:
        """At most ``seconds`` of what is left."""
        return type(self)(min(seconds, self.left_s), self)
