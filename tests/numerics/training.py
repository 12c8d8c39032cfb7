"""Trains one model in several ways from the same start, and compares what comes out."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import memo_compile
from tests.models import Loss, ModelCase

ATEN = {"lowering": "aten", "strict": True, "debug": "poison"}
"""Options of nearly every run here: op by op, dead ranges filled with NaN, never stepping aside."""

INDUCTOR = {"lowering": "inductor", "strict": True, "debug": "poison"}

FLOOR = 1e-5
"""Of a tensor's own largest entry: what float32 rounding in another order may differ by."""

Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


Starts = Sequence[Mapping[str, torch.Tensor]]
"""Parameters by name before every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Losses of every step, and the gradients of every step by parameter name."""

    losses: tuple[torch.Tensor, ...]
    gradients: tuple[Mapping[str, torch.Tensor], ...]
    starts: Starts


def in_ci(values: Iterable[object], *kept: object) -> list[object]:
    """Parameters of a slow test: ``kept`` run always, the others in `make numerics-full`.

    A tuple is the values of several parameters.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in kept else pytest.mark.full,
        )
        for value in values
    ]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def memo_compiled(model: nn.Module, **options: object) -> nn.Module:
    return torch.compile(model, backend="memo", options={**ATEN, **options})


def train(
    case: ModelCase,
    compiled: Callable[[nn.Module], nn.Module],
    optimizers: Sequence[Optimizer],
    steps: int = 3,
    starts: Starts = (),
) -> Run:
    """``steps`` steps with each optimizer of a copy of the case's model; the case is unchanged.

    A step begins with the parameters of ``starts``, if given: so that steps are compared one by
    one, and what AdamW makes of rounding does not grow from step to step.
    """
    model, inputs, loss = case
    copied = copy.deepcopy(model)
    runner = compiled(copied)
    losses, gradients, began = [], [], []
    updates = [make(copied) for make in optimizers]
    for number, update in enumerate(update for update in updates for _ in range(steps)):
        if starts:
            _set_parameters(copied, starts[number])
        began.append(
            {name: parameter.detach().clone() for name, parameter in copied.named_parameters()}
        )
        update.zero_grad()
        value = loss(runner, **inputs)
        value.backward()
        losses.append(value.detach().clone())
        gradients.append(gradients_of(copied))
        update.step()
    return Run(losses=tuple(losses), gradients=tuple(gradients), starts=tuple(began))


@torch.no_grad()
def _set_parameters(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named = model.named_parameters()
    return {
        name: parameter.grad.detach().clone()
        for name, parameter in named
        if parameter.grad is not None
    }


def one_step(model: nn.Module, loss: Loss, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    value = loss(model, **inputs)
    value.backward()
    return value.detach()


def gradient_error(ours: nn.Module, reference: nn.Module) -> float:
    """The largest difference of two gradients, relative to that parameter's own largest entry."""
    mine, theirs = gradients_of(ours), gradients_of(reference)
    assert mine.keys() == theirs.keys()
    smallest = torch.finfo(torch.float32).tiny
    return max(distance(mine[key], theirs[key]) / (size(theirs[key]) + smallest) for key in theirs)


def distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """The largest difference of two entries; infinite when one is not a number."""
    found = (first.double() - second.double()).abs().max().item() if first.numel() else 0.0
    return found if found == found else float("inf")


def size(tensor: torch.Tensor) -> float:
    return tensor.double().abs().max().item() if tensor.numel() else 0.0


def assert_planned(num_plans: int | None = None) -> None:
    """Every step of this test ran in its plan, and the checker has nothing against any plan."""
    report = memo_compile.report()
    assert report.active
    assert report.unplanned_steps == 0
    assert all(plan.check.ok and plan.check.num_reads > 0 for plan in report.plans)
    if num_plans is not None:
        assert len(report.plans) == num_plans
