"""Makes inputs for a compilation that look to autograd as if other code had computed them."""

from collections.abc import Callable
from typing import Any

import torch


class _Computed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return make()


def not_a_leaf(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Returns the tensor that ``make`` allocates, as no leaf (``clone`` would change strides)."""
    tensor: torch.Tensor = _Computed.apply(torch.empty(0, requires_grad=True), make)
    return tensor
