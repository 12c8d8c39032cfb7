"""Attention's kernels on CUDA: what they return, and where it lies."""

import ctypes

import pytest
import torch
from torch import nn
from torch.nn import functional

import memo_compile

WIDTH, HEADS, TOKENS, NUM_LAYERS = 256, 4, 128, 4


class Attention(nn.Module):
    """One layer of attention, with dropout and with fewer heads of keys where asked."""

    def __init__(self, dropout: float, key_heads: int) -> None:
        super().__init__()
        self.dropout, self.key_heads = dropout, key_heads
        self.queries = nn.Linear(WIDTH, WIDTH)
        self.keys = nn.Linear(WIDTH, 2 * key_heads * WIDTH // HEADS)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        query = self.queries(x).view(batch, tokens, HEADS, -1).transpose(1, 2)
        keys = self.keys(x).view(batch, tokens, self.key_heads, 2, -1)
        key, value = keys.permute(3, 0, 2, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            dropout_p=self.dropout,
            enable_gqa=self.key_heads != HEADS,
        )
        return x + self.output(mixed.transpose(1, 2).reshape(x.shape))


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def attention_model(dtype: torch.dtype, dropout: float, key_heads: int = HEADS):
    layers = [Attention(dropout, key_heads) for _ in range(NUM_LAYERS)]
    model = nn.Sequential(*layers).to("cuda", dtype)
    return model, torch.zeros(2, TOKENS, WIDTH, device="cuda", dtype=dtype)


def num_host_copies() -> int:
    """Copies between the device and the host until now, as the emulated device counts them."""
    counts = (ctypes.c_long * 6)()
    ctypes.CDLL(None).memo_device_counts(counts)
    return counts[5]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # efficient, and flash
def test_random_states_reach_the_backward_where_the_kernel_put_them(dtype, dropout):
    model, x = attention_model(dtype, dropout)
    planned = torch.compile(model, backend="memo", options={"strict": True})
    planned(x).sum().backward()
    before = num_host_copies()
    planned(x).sum().backward()
    assert num_host_copies() == before  # each would hold up the host
    torch.cuda.synchronize()
    report = memo_compile.report()
    assert report.active
    assert report.unplanned_steps == 0
    assert all(plan.check.ok for plan in report.plans)


@pytest.mark.parametrize("policy", ["full-recompute", "full-offload"])
def test_fewer_heads_of_keys_than_of_queries_have_a_cost(policy):
    model, x = attention_model(torch.bfloat16, 0.0, key_heads=2)
    options = {"strict": True, "policy": policy}
    planned = torch.compile(model, backend="memo", options=options)
    planned(x).sum().backward()
    torch.cuda.synchronize()
    report = memo_compile.report()
    assert report.active
    assert all(plan.check.ok for plan in report.plans)


@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_regions_are_timed_with_random_states_where_their_kernels_read_them(lowering):
    """Memory-efficient attention reads them in the host's memory; on the device they end it."""
    model, x = attention_model(torch.float32, 0.1)
    options = {"strict": True, "policy": "full-offload", "lowering": lowering}
    planned = torch.compile(model, backend="memo", options=options)
    for _ in range(2):
        planned(x).sum().backward()
    torch.cuda.synchronize()
    report = memo_compile.report()
    assert report.active
    assert report.plans[-1].offloaded_bytes > 0
    assert report.plans[-1].check.ok
