"""Layers marked with ``nested_compile_region``, checkpointed layers that read Python's numbers."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memo_compile
from tests.numerics.small import Block, Pair, Stack, rows
from tests.numerics.training import INDUCTOR, in_ci

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"  # Dynamo looks at any input's
)


class Marked(Block):
    """A layer that torch is told to compile once."""

    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class MarkedStack(Stack):
    def __init__(self) -> None:
        super().__init__(num_layers=3)
        self.layers = nn.ModuleList(Marked(32) for _ in range(3))


@pytest.mark.parametrize(
    "options",
    in_ci(
        [
            {},
            {"policy": "full-recompute"},
            {"memory_budget": "1GiB"},
            {"token_tiles": 2},
            INDUCTOR,
        ],
        {"policy": "full-recompute"},
        {"memory_budget": "1GiB"},
    ),
    ids=str,
)
def test_marked_layers_are_layers(options):
    pair = Pair(MarkedStack(), **options)
    for seed in (1, 2):
        pair.assert_step(rows(seed))
    (plan,) = memo_compile.report().plans
    assert [found.num_layers for found in plan.layer_classes] == [3]


def test_a_marked_region_with_a_gate_beside_it():
    """Where Inductor's own gradients are wrong (torch 2.13.0)."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ParameterList(torch.randn(32, 32) / 6 for _ in range(3))
            self.gates = nn.ParameterList(torch.randn(()) for _ in range(3))

        @torch.compiler.nested_compile_region
        def wave(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight, gate in zip(self.inner, self.gates, strict=True):
                hidden = torch.tanh(x @ weight)
                x = x + hidden + self.wave(x * gate * torch.sigmoid(hidden.mean()))
            return x.square().mean()

    Pair(Gated()).assert_step(rows(1))


class Scaled(nn.Module):
    """A layer with numbers of Python's: what a norm adds, what an adapter is scaled with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.small, self.scale = 1e-6, 0.5

    def body(self, x: torch.Tensor) -> torch.Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.small)
        return x + Doubled.apply(self.linear(normed), self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x.sin() * scale

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * x.cos() * ctx.scale, None


class ScaledStack(Stack):
    def __init__(self) -> None:
        super().__init__(num_layers=3)
        self.layers = nn.ModuleList(Scaled() for _ in range(3))


@pytest.mark.parametrize("policy", in_ci(["auto", "full-recompute"], "full-recompute"))
def test_numbers_in_checkpointed_layers_of_changing_lengths(policy):
    pair = Pair(ScaledStack(), policy=policy)
    pair.compiled = torch.compile(
        pair.ours, backend="memo", dynamic=True, options={"lowering": "aten", "strict": True}
    )
    for num_rows in (8, 12, 10):
        pair.assert_step(rows(1, num_rows))
    report = memo_compile.report()
    assert not [note for note in report.notes if "anew" in note]
    assert report.unplanned_steps == 0


def test_a_number_that_changes_is_read_each_time():
    pair = Pair(ScaledStack())
    pair.compiled = torch.compile(
        pair.ours, backend="memo", dynamic=True, options={"lowering": "aten", "max_plans": 1}
    )
    for scale in (0.5, 0.25, -1.5):
        for model in (pair.ours, pair.eager):
            model.layers[1].scale = scale
        pair.assert_step(rows(1))


def test_blocks_of_changing_lengths_under_a_budget_are_traced_once():
    pair = Pair(nn.Sequential(*(Block(32) for _ in range(3))))
    for layer in pair.ours:
        layer.compile(backend="memo", options={"lowering": "aten", "memory_budget": "1GiB"})
    pair.compiled = pair.ours
    for num_rows in (8, 12, 10):
        pair.zero_grad()
        pair.each(lambda model: model(rows(1, num_rows)).square().mean().backward())  # noqa: B023
        pair.assert_equal()
    assert not [note for note in memo_compile.report().notes if "anew" in note]
