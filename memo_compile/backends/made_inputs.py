"""Tensors as other differentiable code would hand them to a graph that is being compiled."""

from collections.abc import Callable
from typing import Any

import torch


class _Made(torch.autograd.Function):
    """Memory that nobody has written, as differentiable code would return it."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, memory: Callable[[], torch.Tensor]) -> torch.Tensor:
        return memory()


def not_a_leaf(memory: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What ``memory`` makes, at its strides, as no leaf of autograd: ``clone`` would pack it."""
    made: torch.Tensor = _Made.apply(torch.empty(0, requires_grad=True), memory)
    return made
