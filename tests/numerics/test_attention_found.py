"""Attention that is written out by hand, and what only looks like it.

Inductor's patterns take any integer for any other, and put its attention kernels in place of a
softmax over the batch, the heads or the queries (torch 2.13).
"""

import itertools

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import memo_compile
from tests.numerics.training import in_ci

BATCH, TOKENS, WIDTH = 3, 16, 8


class Mixer(nn.Module):
    """One head, so that no copy stands between its products."""

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(BATCH, TOKENS, 3, 1, WIDTH).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) * WIDTH**-0.5).softmax(self.dim)
        return self.out((scores @ v).transpose(1, 2).reshape(BATCH, TOKENS, WIDTH)).square().mean()


def gradients(step, model, x):
    model.zero_grad()
    loss = step(x)
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize(
    ("lowering", "dtype", "dim"),
    in_ci(
        itertools.product(("aten", "inductor"), (torch.float32, torch.bfloat16), (-1, 0, 1, 2)),
        *itertools.product(("aten",), (torch.float32,), (-1, 0, 1, 2)),
    ),
)
def test_only_a_softmax_over_the_keys_is_attention(lowering, dtype, dim):
    torch.manual_seed(dim)
    model, x = Mixer(dim).to(dtype), torch.randn(BATCH, TOKENS, WIDTH, dtype=dtype)
    expected = gradients(model, model, x)
    counters.clear()
    step = torch.compile(model, backend="memo", options={"lowering": lowering})
    found = gradients(step, model, x)
    assert memo_compile.report().active
    near = {"rtol": 1e-4, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 0.1, "atol": 2e-3}
    for ours, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, eager, **near)
    assert bool(counters["inductor"]["fuse_attention"]) == (dim == -1)


def test_plain_inductor_keeps_its_patterns():
    """What is made of memo's graphs is no other backend's."""
    from memo_compile.torch_private import inductor_api

    model, x = Mixer(-1), torch.randn(BATCH, TOKENS, WIDTH)
    gradients(torch.compile(model, backend="memo", options={"lowering": "aten"}), model, x)
    assert any(True for _ in inductor_api._stored_patterns())
