"""What torch calls donated buffers: inputs of a backward that its kernels may write over."""

import contextlib
from collections.abc import Iterator, Sequence

from torch._inductor import graph


@contextlib.contextmanager
def donating(positions: Sequence[int]) -> Iterator[None]:
    """Inside, kernels of a backward may write over these inputs once nothing reads them."""
    asked = vars(graph)
    before = asked["get_donated_idxs"]
    asked["get_donated_idxs"] = lambda: list(positions)
    try:
        yield
    finally:
        asked["get_donated_idxs"] = before
