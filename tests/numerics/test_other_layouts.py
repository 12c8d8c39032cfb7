"""Tensors that are no single strided block are left to Inductor, and the report says so."""

import copy
import gc

import pytest
import torch
from memo_runtime.arena import arena_of
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import memo_compile
from memo_compile.errors import UnsupportedGraph
from memo_compile.reporting import state
from tests.numerics.small import CPU
from tests.numerics.training import FLOOR, gradient_error, memo_compiled

WIDTH = 32


class Words(nn.Module):
    """A table whose gradient is sparse, below layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + functional.gelu(layer(x))
        return x.square().mean()


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    state.reset()
    torch.manual_seed(0)


@pytest.mark.usefixtures("aside_op_by_op")
@pytest.mark.parametrize("lowering", ["aten", "inductor"])
def test_a_sparse_gradient_is_that_of_eager(lowering):
    """Its values would lie in the arena, which the next step writes over."""
    model = Words()
    eager = copy.deepcopy(model)
    runner = memo_compiled(model, lowering=lowering, strict=False)
    for ids in torch.randint(50, (3, 4, 16)):  # accumulated
        runner(ids).backward()
        eager(ids).backward()
    kept = model.table.weight.grad.to_dense()
    assert (kept - eager.table.weight.grad.to_dense()).abs().max() <= FLOOR
    report = memo_compile.report()
    assert not report.active
    assert "sparse" in str(report)


def test_a_sparse_gradient_under_a_budget_is_refused():
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        memo_compiled(Words(), memory_budget="1GiB")(torch.randint(50, (4, 16)))
    assert isinstance(raised.value.inner_exception, UnsupportedGraph)


def test_nested_tensors_are_left_to_inductor():
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    eager = copy.deepcopy(model)
    x = torch.nested.nested_tensor(
        [torch.randn(3, WIDTH), torch.randn(5, WIDTH)], layout=torch.jagged
    )
    memo_compiled(model, strict=False)(x).values().square().mean().backward()
    eager(x).values().square().mean().backward()
    assert gradient_error(model, eager) <= FLOOR
    assert "nested" in str(memo_compile.report())


def test_a_step_may_be_dropped_while_torch_traces_something_else():
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    box = [memo_compiled(model, debug="poison")(torch.randn(4, WIDTH)).sum()]
    gc.collect()
    before = [slab.leased for slab in arena_of(CPU)._slabs]

    def traced(x: torch.Tensor) -> torch.Tensor:
        box.clear()
        return x.sin()

    make_fx(traced, tracing_mode="fake")(torch.ones(3))
    after = [slab.leased for slab in arena_of(CPU)._slabs]
    assert sum(after) == sum(before) - 1
