"""The package flash-attn: planned, recomputed, right (``tests/steps/flash_attention.py``)."""

import copy
import itertools
import sys
from collections.abc import Callable

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

import memo_compile
from memo_compile.lowering.workspace import attention_bytes
from memo_compile.step.problem import align
from tests.numerics.training import in_ci, memo_compiled
from tests.steps.flash_attention import Kernels, flash_attn_func, flash_attn_varlen_func

HEADS, KEY_HEADS, WIDTH, TOKENS, LAYERS = 4, 2, 16, 23, 3
HIDDEN = HEADS * WIDTH
ENDS = (0, 5, 17, TOKENS)


class Layer(nn.Module):
    """Attention with fewer heads of keys than of queries."""

    def __init__(self, dropout: float, ends: torch.Tensor | None) -> None:
        super().__init__()
        self.dropout, self.ends = dropout, ends
        self.queries, self.output = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.keys = nn.Linear(HIDDEN, 2 * KEY_HEADS * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.queries(x).unflatten(-1, (HEADS, WIDTH))
        key, value = self.keys(x).unflatten(-1, (2, KEY_HEADS, WIDTH)).unbind(-3)
        if self.ends is None:
            mixed = flash_attn_func(query, key, value, self.dropout, causal=True)
        else:
            longest = max(b - a for a, b in itertools.pairwise(ENDS))
            given = (query, key, value, self.ends, longest, self.dropout)
            mixed = flash_attn_varlen_func(*given, causal=True)
        return x + self.output(mixed.flatten(-2)).sin()


def stack(dropout: float = 0.0, *, varlen: bool = False) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    ends = torch.tensor(ENDS, dtype=torch.int32) if varlen else None
    model = nn.Sequential(*(Layer(dropout, ends) for _ in range(LAYERS)))
    return model, torch.randn(*(() if varlen else (2,)), TOKENS, HIDDEN)


@pytest.mark.parametrize(
    ("varlen", "lowering"),
    in_ci(
        itertools.product((False, True), ("aten", "inductor")),
        *((False, "aten"), (True, "aten")),
    ),
)
def test_attention_is_recomputed_and_right(varlen, lowering):
    model, x = stack(varlen=varlen)
    twin = copy.deepcopy(model)
    planned = memo_compiled(model, lowering=lowering, policy="full-recompute")
    optimizers = [torch.optim.SGD(trained.parameters(), lr=0.1) for trained in (model, twin)]
    for _ in range(3):
        for optimizer, step in zip(optimizers, (planned, twin), strict=True):
            optimizer.zero_grad()
            step(x).square().mean().backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
    plan = memo_compile.report().plans[-1]
    assert plan.check.ok
    # Queries, keys and values, and what attention made of them: four sizes of x in each layer.
    assert plan.recomputed_bytes > (LAYERS - 1) * 2 * x.nbytes
    assert memo_compile.report().unplanned_steps == 0


@pytest.mark.parametrize("varlen", in_ci([False, True], False), ids=["rows", "varlen"])
def test_the_forward_writes_its_output_into_the_arena(varlen, monkeypatch):
    """Where the package's kernels are there; else its output exists twice while it is copied."""
    memory, kernels = [], Kernels()
    for number_of_kernels in (0, 1):
        if number_of_kernels:
            monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
        model, x = stack(varlen=varlen)
        twin = copy.deepcopy(model)
        planned = memo_compiled(model, lowering="inductor", debug="poison")
        for _ in range(2):
            for step in (planned, twin):
                step.zero_grad()
                step(x).square().mean().backward()
            for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
        plan = memo_compile.report().plans[-1]
        assert plan.check.ok
        names = [kind for kind in plan.outside_bytes_by_kind if "flash_attn" in kind]
        memory.append([plan.outside_bytes_by_kind[name] for name in names if "fwd" not in name])
        assert kernels.num_given == 2 * LAYERS * number_of_kernels
    (copied,), (made,) = ([max(found)] for found in memory)
    assert copied - made == align(x.nbytes)


@pytest.mark.full
def test_attention_with_dropout_is_not_recomputed():
    recomputed = []
    for dropout in (0.0, 0.1):
        model, x = stack(dropout)
        memo_compiled(model, lowering="aten", policy="full-recompute")(x).sum().backward()
        recomputed.append(memo_compile.report().plans[-1].recomputed_bytes)
    assert recomputed[1] <= recomputed[0] - (LAYERS - 1) * x.nbytes


@pytest.mark.parametrize(("varlen", "rows"), [(False, 2 * 128), (True, TOKENS + 3 * 128)])
def test_the_backward_s_own_memory_is_counted(varlen, rows):
    """As the package's ``mha_bwd`` and ``mha_varlen_bwd`` allocate it; keys for every head too."""
    found: list[int] = []

    def look(backward: fx.GraphModule, _: object) -> Callable[..., object]:
        found.extend(filter(None, map(attention_bytes, backward.graph.nodes)))
        return make_boxed_func(backward)

    sums, (model, x) = rows * HEADS * (32 + 1) * 4, stack(varlen=varlen)
    traced = aot_autograd(fw_compiler=lambda gm, _: make_boxed_func(gm), bw_compiler=look)
    torch.compile(model, backend=traced)(x).sum().backward()
    expanded = 2 * x.nbytes
    assert found == [align(sums) + align(expanded)] * LAYERS
