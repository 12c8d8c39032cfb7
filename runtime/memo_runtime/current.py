"""What the region that is running now writes into: one table of ready-made views per call.

Generated code reads ``current.views[k]`` where it would have allocated its k-th buffer. The table
is thread-local, because a backward may run on an autograd thread beside a forward.
"""

import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch


class Current(threading.local):
    """Thread-local state of the running call."""

    views: Sequence[torch.Tensor] = ()
    """The call's arena buffers, in the region's order."""
    inputs: Mapping[int, torch.Tensor] = MappingProxyType({})
    """Poison mode: the bytes of each input whose storage dies in this call."""

    def poison(self, index: int) -> None:
        """Fill buffer ``index`` with NaN: its life has ended."""
        poison(self.views[index])

    def input_done(self, index: int) -> None:
        """Fill input ``index`` with NaN if this call was its last reader."""
        if index in self.inputs:
            poison(self.inputs[index])


def poison(tensor: torch.Tensor) -> None:
    """Overwrite ``tensor`` with NaN, or with all bits set where its type has no NaN."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(-1 if tensor.dtype.is_signed else 255)


current = Current()
