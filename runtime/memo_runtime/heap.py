"""Keeps the C allocator's free heap from adding to what a step was planned to hold (CPU).

Gradients and what kernels allocate themselves come from the heap; what is freed there stays in
memory until ``malloc_trim``. That costs a millisecond and new page faults, so it is done only when
the process holds more than the plan says, and between the halves of a large step.
"""

import functools
import os
from dataclasses import dataclass

from memo_runtime.pages import PAGE_BYTES, trim_heap

MIN_TRIM_BYTES = 32 * 2**20
"""A step that holds fewer bytes is over too soon for a trim between its halves to be worth it."""

COUNTED_LATE_BYTES = 2**17 * (os.cpu_count() or 1)
"""The kernel's counter may lag by so many bytes: 128 KiB on each core."""


@dataclass(slots=True, kw_only=True)
class HeapWatch:
    """Compares the process's memory with the plan while a step runs, and trims the heap.

    Memory that stays above the plan after a trim is not free heap but someone else's: it is added
    to ``base_bytes``, so that no second trim is tried for it until the next step begins.
    """

    allowed_bytes: int
    """Memory may exceed the plan by this before the free heap is given back."""
    base_bytes: int | None = None
    """Anonymous resident memory that is not the step's; None before the first step."""
    replaced_bytes: int = 0
    """Bytes that exist when the next step begins though its plan counts them: results of the step
    before, which are freed when its forward has ended."""
    beyond_bytes: int = 0
    """By how much memory that is not the step's grew while it ran, as far as it was checked."""

    def begin(self, resident_bytes: int) -> None:
        """Begins a step; ``resident_bytes`` of its frame may be in memory from the last one.

        Trims the heap if more memory is not the step's than when the last step began.
        """
        other_bytes = anonymous_bytes() - resident_bytes
        last_bytes = None if self.base_bytes is None else self.base_bytes + self.replaced_bytes
        if last_bytes is None or other_bytes > last_bytes + self.allowed_bytes:
            trim_heap()  # where last step's gradients were
            other_bytes = anonymous_bytes() - resident_bytes
        self.base_bytes, self.beyond_bytes = other_bytes - self.replaced_bytes, 0

    def pause(self) -> None:
        """Stops checking until the next step begins: other code takes memory."""
        self.base_bytes = None

    def begin_backward(self, planned_bytes: int) -> None:
        """Before a backward, gives back results that the user dropped and what kernels freed.

        Not all of the frame has been written yet, so that a sum would not show what is free.
        """
        if planned_bytes >= MIN_TRIM_BYTES:
            trim_heap()
        self.check(planned_bytes)

    def check(self, planned_bytes: int) -> None:
        """Trims the heap if more is in memory than the ``planned_bytes`` of the step now."""
        if self.base_bytes is None:
            return
        if anonymous_bytes() - planned_bytes > self.base_bytes + self.allowed_bytes:
            trim_heap()  # what stays above the plan was no free heap
            growth = max(0, anonymous_bytes() - planned_bytes - self.base_bytes)
            self.base_bytes += growth
            self.beyond_bytes += growth


def anonymous_bytes() -> int:
    """Returns this process's anonymous resident memory; it may lag by COUNTED_LATE_BYTES."""
    # Both are in pages; shared ones are those of files and of shared memory.
    resident, shared = map(int, os.pread(_statm(os.getpid()), _STATM_BYTES, 0).split()[1:3])
    return (resident - shared) * PAGE_BYTES


_STATM_BYTES = 256
"""The file is shorter."""


@functools.lru_cache(maxsize=1)
def _statm(pid: int) -> int:
    """Opens the file with the memory of this process, ``pid``: once, and anew after a fork."""
    return os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
