"""Keeps the C allocator's free heap from adding to what a step was planned to hold (CPU).

Gradients and what kernels allocate themselves come from the heap; what is freed there stays in
memory until ``malloc_trim``. That costs a millisecond and new page faults, so it is done only when
the process holds more than the plan says, and between the halves of a large step.
"""

from dataclasses import dataclass
from pathlib import Path

from memo_runtime.pages import PAGE_BYTES, trim_heap

_STATM = Path("/proc/self/statm")

MIN_TRIM_BYTES = 32 * 2**20
"""A step that holds less is over too soon to be worth a trim between its halves."""


@dataclass(slots=True, kw_only=True)
class HeapWatch:
    """What the process holds that is not the step's, as read when the step began.

    What stays above the plan after trimming is not the heap's: it is taken to be someone else's,
    and until the next step begins no second trim is tried for it.
    """

    allowed_bytes: int
    """By so much memory may be above the plan before the free heap is given back."""
    base_bytes: int | None = None
    """Anonymous resident memory without the step's own; None before the first step."""
    replaced_bytes: int = 0
    """Of what is there when the next step begins, so much is in its plan: results of the step
    before, which go when its forward has ended."""
    beyond_bytes: int = 0
    """By so much memory that is not the step's grew while it ran, where that was looked at."""

    def begin(self, resident_bytes: int) -> None:
        """A step begins; of its frame ``resident_bytes`` may be in memory from the last one."""
        others = anonymous_bytes() - resident_bytes
        known = None if self.base_bytes is None else self.base_bytes + self.replaced_bytes
        if known is None or others > known + self.allowed_bytes:
            trim_heap()  # where last step's gradients were
            others = anonymous_bytes() - resident_bytes
        self.base_bytes, self.beyond_bytes = others - self.replaced_bytes, 0

    def begin_backward(self, planned_bytes: int) -> None:
        """The backward begins: results that the user dropped and what forward kernels freed go.

        Not all of the frame has been written yet, so what is free does not show in a sum.
        """
        if planned_bytes >= MIN_TRIM_BYTES:
            trim_heap()
        self.check(planned_bytes)

    def check(self, planned_bytes: int) -> None:
        """At most ``planned_bytes`` are the step's now; if there are more, the heap is trimmed."""
        if self.base_bytes is None:
            return
        if anonymous_bytes() - planned_bytes > self.base_bytes + self.allowed_bytes:
            trim_heap()
            more = max(0, anonymous_bytes() - planned_bytes - self.base_bytes)
            self.base_bytes += more
            self.beyond_bytes += more


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process; the kernel may be behind by 128 KiB per core."""
    # In pages; shared are those of files and of shared memory.
    resident, shared = map(int, _STATM.read_bytes().split()[1:3])
    return (resident - shared) * PAGE_BYTES
