"""A step whose backward can run no more gives its frame to the next, while its loss still lives."""

from dataclasses import replace

import pytest
import torch
from memo_runtime.leases import leases
from torch import nn

import memo_compile
from memo_compile.errors import Infeasible
from tests.numerics.training import ATEN

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"  # Dynamo hides it by a filter
)

WIDTH, LAYERS = 32, 3


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(torch.tanh(self.inner(x)) * self.scale)


def compiled(*, by_block: bool = False, **options: object) -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Scaled() for _ in range(LAYERS)))
    how = {"backend": "memo", "options": {**ATEN, **options}}
    if not by_block:
        return torch.compile(model, **how)
    for block in model:
        block.compile(**how)
    return model


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(64, WIDTH)).square().mean()


def refused_step(model: nn.Module) -> torch.Tensor:
    """The loss of a step whose backward was refused, because a buffer was written in between."""
    loss = loss_of(model)
    for name, buffer in model.named_buffers():
        if "scale" in name:
            buffer.mul_(0.9)
    with pytest.raises(RuntimeError, match=r"in-?place"):
        loss.backward()
    return loss


def train_step(model: nn.Module) -> None:
    loss_of(model).backward()
    model.zero_grad()


def enough_for_one() -> int:
    train_step(compiled())
    return int(memo_compile.report().plans[-1].peak_bytes * 1.1)


def test_the_next_forward_takes_its_frame_under_a_budget():
    model = compiled(memory_budget=enough_for_one())
    train_step(model)
    held = refused_step(model)
    for _ in range(2):
        train_step(model)
    with pytest.raises(RuntimeError):
        held.backward()
    held = loss_of(model)  # a batch that is skipped, as far as anybody can tell one to come
    with pytest.raises(Infeasible, match="del loss"):
        loss_of(model)
    held.backward()


def test_the_next_forward_takes_its_frame_without_a_budget():
    model = compiled()
    held = refused_step(model)
    train_step(model)
    assert memo_compile.report().unplanned_steps == 0
    del held


def test_blocks_go_on_as_a_group():
    model = compiled(by_block=True)
    for _ in range(2):
        train_step(model)
    (group,) = memo_compile.report().groups
    before = memo_compile.report().unplanned_steps
    held = refused_step(model)
    for _ in range(2):
        train_step(model)
    (after,) = memo_compile.report().groups
    assert replace(after, measured_s=group.measured_s) == group
    assert memo_compile.report().unplanned_steps == before
    del held


def test_a_backward_that_runs_keeps_its_frame():
    model = compiled()
    seen = []
    last = list(model.parameters())[-2]

    def write(_: torch.Tensor) -> None:
        (lease,) = [lease for lease in leases._live.values() if lease.active]
        with torch.no_grad():
            last.add_(0.0)
        leases.end_refused()
        seen.append(lease.active)

    last.register_post_accumulate_grad_hook(write)
    x = torch.ones(64, WIDTH, requires_grad=True)
    loss = model(x).square().mean()
    loss.backward()
    assert x.grad is not None
    assert seen == [True]
