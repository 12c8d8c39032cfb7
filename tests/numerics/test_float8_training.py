"""Training with products of float8 numbers: the float8 copy of what they multiply is saved."""

import copy

import pytest
import torch
from torch import nn

import memo_compile
from tests.numerics.small import rows
from tests.numerics.test_frozen_weights import assert_equals_eager
from tests.numerics.training import ATEN, INDUCTOR, in_ci

WIDTH, TOKENS, PRODUCTS = 64, 128, 3
LIMIT = torch.finfo(torch.float8_e4m3fn).max


def as_float8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale for all numbers, as torchao's tensorwise recipe has."""
    scale = LIMIT / x.abs().amax().clamp(min=1e-12)
    return (x * scale).clamp(-LIMIT, LIMIT).to(torch.float8_e4m3fn), scale


def rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x.float() / scale


class Product(torch.autograd.Function):
    """``x @ weight.t()`` of float8 copies. Saves the copy, or ``x`` to round it again in rows."""

    @staticmethod
    def forward(ctx, x, weight, rounds_again):
        x8, weight8 = as_float8(x), as_float8(weight)
        ctx.save_for_backward(weight, *((x,) if rounds_again else x8))
        return rounded(*x8) @ rounded(*weight8).t()

    @staticmethod
    def backward(ctx, gradient):
        weight, x, *scale = ctx.saved_tensors
        x = x.reshape(-1, WIDTH)
        x8 = (x, *scale) if scale else as_float8(x)
        gradient = rounded(*as_float8(gradient))
        of_weight = gradient.reshape(-1, WIDTH).t() @ rounded(*x8)
        return gradient @ rounded(*as_float8(weight)), of_weight, None


class Linear(nn.Linear):
    rounds_again = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.weight, self.rounds_again)


class Block(nn.Module):
    """Products of products: each must be there in the backward, and none is cheap to make again."""

    def __init__(self) -> None:
        super().__init__()
        self.products = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(PRODUCTS))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.products(x)


def by_hand(model: nn.Module, *, rounds_again: bool) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.__class__, module.rounds_again = Linear, rounds_again


def by_torchao(model: nn.Module) -> None:
    float8 = pytest.importorskip("torchao.float8")
    float8.convert_to_float8_training(model, config=float8.Float8LinearConfig(emulate=True))


KINDS = {
    "float32": lambda model: None,
    "saved by hand": lambda model: by_hand(model, rounds_again=False),
    "rounded again by hand": lambda model: by_hand(model, rounds_again=True),
    "torchao": by_torchao,
}


@pytest.mark.parametrize("options", in_ci([ATEN, INDUCTOR], ATEN))
@pytest.mark.parametrize("kind", in_ci(KINDS, "rounded again by hand", "torchao"))
def test_a_layer_saves_one_byte_for_a_number_and_a_scale(kind, options):
    """By hand: of each product's input four bytes for a number, or one and four for the scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), *(Block() for _ in range(3)))
    KINDS[kind](model)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="memo", options={**options, "policy": "save"})
    for step in range(2):
        for run in (compiled, twin):
            run.zero_grad()
            run(rows(step, TOKENS, WIDTH).view(2, -1, WIDTH)).square().mean().backward()
        assert_equals_eager(model, twin)
    (plan,) = memo_compile.report().plans
    numbers = TOKENS * WIDTH
    expected = 4 * numbers if kind == "float32" else numbers + 4
    assert sum(decision.bytes for decision in plan.decisions) == PRODUCTS * expected
