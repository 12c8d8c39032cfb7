"""Buffers that a forward reads before and after it writes them, around repeating layers."""

import copy

import torch
from torch import nn

import memo_compile
from tests.numerics.closeness import assert_equals_eager


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class _Counting(nn.Module):
    """Reads ``count`` for the epilogue, writes it before the layers, reads it again after them."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block(width) for _ in range(4))
        self.register_buffer("count", torch.ones(width))
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.count * 1.0
        self.count.add_(1)
        for layer in self.layers:
            x = layer(x)
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return (x * before).sum() + (x * self.count).sum() + (x * self.average).sum()


def test_old_and_new_values_and_gradients_equal_eager():
    torch.manual_seed(0)
    model = _Counting()
    twin = copy.deepcopy(model)
    options = {"lowering": "aten", "strict": True, "debug": "poison"}
    planned = torch.compile(model, backend="memo", options=options)
    x = torch.randn(8, 32)
    for _ in range(3):
        for trained in (model, twin):
            trained.zero_grad()
        ours, theirs = planned(x), twin(x)
        ours.backward()
        theirs.backward()
        torch.testing.assert_close(ours, theirs)
        for name, buffer in twin.named_buffers():
            torch.testing.assert_close(model.get_buffer(name), buffer, msg=name)
        assert_equals_eager(model, twin)
    (plan,) = memo_compile.report().plans
    assert [cls.num_layers for cls in plan.layer_classes] == [4]
