"""A buffer that the program writes between forward and backward: as eager, which kept a copy."""

import copy

import pytest
import torch
from torch import nn

import memo_compile
from tests.numerics.training import ATEN, in_ci

WIDTH, LAYERS = 32, 3


class Averaged(nn.Module):
    """Adds a buffer, and scales by a value that is computed of one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("offset", torch.rand(4 * WIDTH))
        self.register_buffer("means", torch.rand(4, WIDTH) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.tanh(self.up(x) + self.offset)
        return x + self.down(wide) * self.means[0:1].sqrt()


def gradients(model: nn.Module, run: nn.Module) -> list[torch.Tensor]:
    start = copy.deepcopy(model.state_dict())
    for _ in range(2):
        model.load_state_dict(start)
        model.zero_grad()
        loss = run(torch.ones(64, WIDTH)).square().mean()
        for buffer in model.buffers():
            buffer.mul_(0.5)
        loss.backward()
    model.load_state_dict(start)
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("policy", in_ci(["full-recompute", "full-offload"], "full-recompute"))
def test_a_buffer_may_be_written_between_the_halves(policy):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Averaged() for _ in range(LAYERS)))
    expected = gradients(model, model)
    model = copy.deepcopy(model)
    planned = torch.compile(model, backend="memo", options={**ATEN, "policy": policy})
    for ours, theirs in zip(gradients(model, planned), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    (plan,) = memo_compile.report().plans
    assert [cls.num_layers for cls in plan.layer_classes] == [LAYERS]
    assert (plan.recomputed_bytes > 0) == (policy == "full-recompute")
