"""Trains one model in several ways from the same start, and compares what comes out."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

import memo_compile
from tests.models import Loss, ModelCase

ATEN = {"lowering": "aten", "strict": True, "debug": "poison"}
"""Options of nearly every run here: op by op, dead ranges filled with NaN, never stepping aside."""

INDUCTOR = {"lowering": "inductor", "strict": True, "debug": "poison"}

FLOOR = 1e-5
"""Relative to the largest gradient: what float32 rounding in another order may differ by."""

Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Losses of every step, and the gradients of every step by parameter name."""

    losses: tuple[torch.Tensor, ...]
    gradients: tuple[Mapping[str, torch.Tensor], ...]


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
) -> Run:
    """``steps`` steps with each optimizer of a copy of the case's model; the case is unchanged."""
    model, inputs, loss = case
    copied = copy.deepcopy(model)
    runner = compiled(copied)
    losses, gradients = [], []
    updates = [make(copied) for make in optimizers]
    for update in [one for one in updates for _ in range(steps)]:
        update.zero_grad()
        value = loss(runner, **inputs)
        value.backward()
        losses.append(value.detach().clone())
        gradients.append(gradients_of(copied))
        update.step()
    return Run(losses=tuple(losses), gradients=tuple(gradients))


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named = model.named_parameters()
    return {name: one.grad.detach().clone() for name, one in named if one.grad is not None}


def one_step(model: nn.Module, loss: Loss, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    value = loss(model, **inputs)
    value.backward()
    return value.detach()


def error(ours: Run, reference: Run) -> float:
    """The largest difference of a loss or gradient, relative to the largest gradient."""
    assert len(ours.losses) == len(reference.losses)
    scale = max(g.abs().max().item() for step in reference.gradients for g in step.values())
    worst = 0.0
    for mine, theirs in zip(ours.losses, reference.losses, strict=True):
        worst = max(worst, _difference(mine, theirs) / max(scale, theirs.abs().max().item()))
    for mine, theirs in zip(ours.gradients, reference.gradients, strict=True):
        assert mine.keys() == theirs.keys()
        worst = max(worst, *(_difference(mine[key], theirs[key]) / scale for key in theirs))
    return worst


def gradient_error(ours: nn.Module, reference: nn.Module) -> float:
    """The same for the gradients that two models hold now."""
    mine, theirs = gradients_of(ours), gradients_of(reference)
    assert mine.keys() == theirs.keys()
    scale = max(one.abs().max().item() for one in theirs.values())
    return max(_difference(mine[key], theirs[key]) / scale for key in theirs)


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    found = (one.double() - other.double()).abs().max().item()
    return found if found == found else float("inf")


def assert_planned(num_plans: int | None = None) -> None:
    """Every step of this test ran in its plan, and the checker has nothing against any plan."""
    report = memo_compile.report()
    assert report.active
    assert report.unplanned_steps == 0
    assert all(plan.check.ok and plan.check.num_reads > 0 for plan in report.plans)
    if num_plans is not None:
        assert len(report.plans) == num_plans
