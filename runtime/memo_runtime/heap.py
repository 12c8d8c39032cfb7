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
"""The kernel may know of so many bytes later than they are taken: of 128 KiB on each core."""


@dataclass(slots=True, kw_only=True)
class HeapWatch:
    """What the process holds that is not the step's, as read when the step began.

    Memory that stays above the plan after trimming is not free heap. It is taken to be someone
    else's, and no second trim is tried for it until the next step begins.
    """

    allowed_bytes: int
    """Memory may exceed the plan by this before the free heap is given back."""
    base_bytes: int | None = None
    """Anonymous resident memory without the step's own; None before the first step."""
    replaced_bytes: int = 0
    """Bytes that are there when the next step begins and that its plan counts: results of the step
    before, which are freed when its forward has ended."""
    beyond_bytes: int = 0
    """By how much memory that is not the step's grew while it ran, as far as it was checked."""

    def begin(self, resident_bytes: int) -> None:
        """A step begins; ``resident_bytes`` of its frame may be in memory from the last step."""
        others = anonymous_bytes() - resident_bytes
        known = None if self.base_bytes is None else self.base_bytes + self.replaced_bytes
        if known is None or others > known + self.allowed_bytes:
            trim_heap()  # where last step's gradients were
            others = anonymous_bytes() - resident_bytes
        self.base_bytes, self.beyond_bytes = others - self.replaced_bytes, 0

    def pause(self) -> None:
        """Count nothing until the next step begins: memory is taken for what is no step's."""
        self.base_bytes = None

    def begin_backward(self, planned_bytes: int) -> None:
        """The backward begins: give back results that the user dropped and what kernels freed.

        Not all of the frame has been written yet, so that a sum would not show what is free.
        """
        if planned_bytes >= MIN_TRIM_BYTES:
            trim_heap()
        self.check(planned_bytes)

    def check(self, planned_bytes: int) -> None:
        """Trim the heap if more is in memory than the ``planned_bytes`` that the step holds now."""
        if self.base_bytes is None:
            return
        if anonymous_bytes() - planned_bytes > self.base_bytes + self.allowed_bytes:
            trim_heap()
            more = max(0, anonymous_bytes() - planned_bytes - self.base_bytes)
            self.base_bytes += more
            self.beyond_bytes += more


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process; it may be behind by COUNTED_LATE_BYTES."""
    # Both are in pages; the shared ones are those of files and of shared memory.
    resident, shared = map(int, os.pread(_statm(os.getpid()), _STATM_BYTES, 0).split()[1:3])
    return (resident - shared) * PAGE_BYTES


_STATM_BYTES = 256
"""It is shorter."""


@functools.lru_cache(maxsize=1)
def _statm(pid: int) -> int:
    """The open file that tells how much memory process ``pid`` has, which is this one."""
    return os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
