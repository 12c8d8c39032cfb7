"""What recomputation adds to the memory that kernels allocate themselves.

Where the arena stays in memory as a whole (CUDA), it has the most of that memory beside it all the
time. So a region counts where it makes that most larger, and then everywhere: late in the backward,
when most gradients are there. Elsewhere (CPU) it counts while it runs.
"""

from memo_compile.step.movable import MovableStep
from memo_compile.step.residency import ordinary_bytes


class OutsideMemory:
    """The memory of one step beside its arena. Cost: linear in its lines."""

    def __init__(self, step: MovableStep) -> None:
        ordinary = ordinary_bytes(step.problem)
        self._stays = not step.problem.releases_pages
        self._before = (0, *ordinary.after)
        self._most = max(ordinary.most, default=0)

    def added(self, call: int, outside_bytes: int) -> tuple[int, int]:
        """What a region adds whose kernels allocate so much, right before ``call``.

        Bytes while it runs, and bytes of the whole step.
        """
        if not self._stays:
            return outside_bytes, 0
        return 0, self.raised(range(call, call + 1), outside_bytes)

    def raised(self, calls: range, outside_bytes: int) -> int:
        """Bytes that it adds to the whole step at least, before whichever of ``calls`` it runs."""
        if not self._stays or not outside_bytes:
            return 0
        before = min(self._before[calls.start : calls.stop], default=0)
        return max(0, before + outside_bytes - self._most)
