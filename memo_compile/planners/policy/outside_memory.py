"""What recomputation adds to the memory that kernels allocate themselves.

Where the arena stays in memory as a whole (CUDA), it has the most of that memory beside it all the
time. So a region counts where it makes that most larger, and then everywhere: late in the backward,
when most gradients are there.
"""

from collections.abc import Iterable

from memo_compile.step.movable import MovableStep
from memo_compile.step.residency import ordinary_bytes


class OutsideMemory:
    """The memory of one step beside its arena. Cost: linear in its lines."""

    def __init__(self, step: MovableStep) -> None:
        ordinary = ordinary_bytes(step.problem)
        self._stays = not step.problem.releases_pages
        self._before = (0, *ordinary.after)
        self._most = max(ordinary.most, default=0)

    def raised(self, calls: range, outside_bytes: int) -> int:
        """Bytes that a region adds to the whole step, at least, which runs before one of ``calls``.

        0 where the arena does not stay: there it counts while it runs.
        """
        if not self._stays or not outside_bytes:
            return 0
        before = min(self._before[calls.start : calls.stop], default=0)
        return max(0, before + outside_bytes - self._most)

    def may_raise(self, calls: Iterable[int], outside_bytes: Iterable[int]) -> bool:
        """True where one of such regions adds bytes to the whole step, before one of ``calls``."""
        most = max(outside_bytes, default=0)
        return any(self.raised(range(call, call + 1), most) for call in calls)
