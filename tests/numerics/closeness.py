"""Whether losses and gradients are eager's: each judged by its own size and by eager's own error.

A gradient a thousand times smaller than the largest one is held to as many digits. What rounding
leaves of a gradient that cancels has no digits: there the same step in float64 tells how far eager
itself is off, and a few times that is allowed.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.models import ModelCase
from tests.numerics.training import FLOOR, Optimizer, Run, distance, gradients_of, size, train

OWN_ERROR = 4.0
"""Times eager's distance from float64, which is one sample of what rounding does to a tensor."""


class _InFloat64(TorchFunctionMode):
    """What a model does in float32 whatever its parameters are, norms and losses, is float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        wider = {torch.float32: torch.float64}
        args = [
            wider.get(value, value) if isinstance(value, torch.dtype) else value for value in args
        ]
        kwargs = {
            key: wider.get(value, value) if isinstance(value, torch.dtype) else value
            for key, value in (kwargs or {}).items()
        }
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)


def eagerly(model: nn.Module) -> nn.Module:
    return model


def in_float64(case: ModelCase) -> ModelCase:
    """The same model, inputs and loss in float64 throughout."""
    model, inputs, loss = case

    def precise(model: nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
        with _InFloat64():
            return loss(model, **inputs)

    wide = {
        name: value.double() if value.is_floating_point() else value
        for name, value in inputs.items()
    }
    return copy.deepcopy(model).double(), wide, precise


class Reference:
    """A case's steps in eager, and the same steps in float64: what other runs are held against."""

    def __init__(self, case: ModelCase, optimizers: Sequence[Optimizer], steps: int = 3) -> None:
        self.case, self.optimizers, self.steps = case, optimizers, steps
        self.eager = train(case, eagerly, optimizers, steps)
        self.exact = train(in_float64(case), eagerly, optimizers, steps, self.eager.starts)

    def train(self, compiled: Callable[[nn.Module], nn.Module]) -> Run:
        """The same steps by another runner; each begins where eager's begins."""
        return train(self.case, compiled, self.optimizers, self.steps, self.eager.starts)

    def faults(self, ours: Run, relative: float = FLOOR) -> list[str]:
        """One line for every loss and gradient that is further off than it may be."""
        return [
            f"{name}: {off:.2e} off, {bound:.2e} allowed; largest {size(exact):.2e}"
            for (name, mine), (_, eager), (_, exact) in zip(
                _named(ours), _named(self.eager), _named(self.exact), strict=True
            )
            if not (off := distance(mine, exact))
            <= (bound := relative * size(exact) + OWN_ERROR * distance(eager, exact))
        ]

    def assert_close(self, ours: Run, relative: float = FLOOR) -> None:
        """Losses and gradients of every step are eager's."""
        for mine, theirs in zip(ours.gradients, self.eager.gradients, strict=True):
            assert mine.keys() == theirs.keys()
        faults = self.faults(ours, relative)
        assert not faults, "\n".join(faults)


def assert_equals_eager(ours: nn.Module, eager: nn.Module, relative: float = FLOOR) -> None:
    """The gradients that two models hold now agree, each relative to its own largest entry."""
    mine, theirs = gradients_of(ours), gradients_of(eager)
    assert mine.keys() == theirs.keys()
    faults = relative_faults(mine, theirs, relative)
    assert not faults, "\n".join(faults)


def relative_faults(
    ours: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], relative: float
) -> list[str]:
    """One line for every tensor that differs by more than ``relative`` of its own largest entry."""
    return [
        f"{name}: {off:.2e} off, largest {size(theirs):.2e}"
        for name, theirs in reference.items()
        if not (off := distance(ours[name], theirs)) <= relative * size(theirs)
    ]


def _named(run: Run) -> Iterator[tuple[str, torch.Tensor]]:
    for step, (loss, gradients) in enumerate(zip(run.losses, run.gradients, strict=True)):
        yield f"step {step}: loss", loss
        for name in sorted(gradients):
            yield f"step {step}: {name}", gradients[name]
