"""Frozen weights that a layer computes from packed ones: made again in the backward, never kept."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memo_compile
from memo_compile.errors import Infeasible
from tests.numerics.closeness import assert_equals_eager
from tests.numerics.training import ATEN, INDUCTOR, in_ci

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"  # Dynamo hides it by a filter
)

WIDTH, LAYERS, TOKENS, GROUP = 64, 4, 8, 16
WEIGHT_BYTES = 4 * WIDTH * WIDTH * 4


def dequantised(packed: torch.Tensor, scales: torch.Tensor, shape: list[int]) -> torch.Tensor:
    halves = torch.stack([(packed & 15).float() - 8, (packed >> 4).float() - 8], -1)
    return (halves.reshape(-1, GROUP) * scales).reshape(shape)


@torch.library.custom_op("memo_tests::dequantised", mutates_args=())
def dequantised_by_operator(
    packed: torch.Tensor, scales: torch.Tensor, shape: list[int]
) -> torch.Tensor:
    return dequantised(packed, scales, shape)


@dequantised_by_operator.register_fake
def _(packed, scales, shape):
    return scales.new_empty(shape)


class DequantisedTwice(torch.autograd.Function):
    """Keeps the packed weight, and makes the weight in both halves."""

    @staticmethod
    def forward(ctx, x, packed, scales, shape, make):
        ctx.save_for_backward(packed, scales)
        ctx.shape, ctx.make = shape, make
        return x @ make(packed, scales, shape).t()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.make(*ctx.saved_tensors, ctx.shape), None, None, None, None


PRODUCTS = {
    "function": lambda *given: DequantisedTwice.apply(*given, dequantised),
    "function of an operator": lambda *given: DequantisedTwice.apply(
        *given, dequantised_by_operator
    ),
    "product": lambda x, *packed: F.linear(x, dequantised(*packed)),
    "product of an operator": lambda x, *packed: F.linear(x, dequantised_by_operator(*packed)),
}


class Block(nn.Module):
    """A frozen MLP of packed weights with an adapter beside it."""

    def __init__(self, product: str) -> None:
        super().__init__()
        self.product = PRODUCTS[product]
        self.norm = nn.LayerNorm(WIDTH)
        self.into = nn.Parameter(torch.randn(4, WIDTH) / 8)
        self.out = nn.Parameter(torch.randn(WIDTH, 4) / 8)
        for name in ("up", "down"):
            packed = torch.randint(0, 256, (2 * WIDTH * WIDTH,), dtype=torch.uint8)
            self.register_buffer(f"{name}_packed", packed)
            scales = torch.rand(4 * WIDTH * WIDTH // GROUP, 1) / 40
            self.register_buffer(f"{name}_scales", scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        wide = self.product(normed, self.up_packed, self.up_scales, [4 * WIDTH, WIDTH])
        narrow = self.product(F.silu(wide), self.down_packed, self.down_scales, [WIDTH, 4 * WIDTH])
        return x + narrow + (normed @ self.into.t()) @ self.out.t()


def frozen_model(product: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(product) for _ in range(LAYERS)))


def train(model: nn.Module, by_block: bool = False, **options: object) -> None:
    """Two steps of a compiled copy of ``model`` equal eager's."""
    torch._dynamo.reset()
    twin = copy.deepcopy(model)
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    compiled = {"backend": "memo", "options": {**ATEN, **options}}
    planned = model if by_block else torch.compile(model, **compiled)
    for block in model if by_block else ():
        block.compile(**compiled)
    for _ in range(3 if by_block else 2):
        for trained, run in ((model, planned), (twin, twin)):
            trained.zero_grad()
            run(x).square().mean().backward()
        assert_equals_eager(model, twin)


@pytest.mark.parametrize("product", in_ci(PRODUCTS, "function of an operator", "product"))
def test_dequantised_weights_are_no_saved_tensors(product):
    train(frozen_model(product))
    (plan,) = memo_compile.report().plans
    assert [cls.num_layers for cls in plan.layer_classes] == [LAYERS]
    assert max(decision.bytes for decision in plan.decisions) < WEIGHT_BYTES
    assert plan.arena_bytes < LAYERS * WEIGHT_BYTES  # and not two for each layer


@pytest.mark.full
def test_they_are_none_through_inductor():
    train(frozen_model("function"), **INDUCTOR)
    (plan,) = memo_compile.report().plans
    assert plan.arena_bytes < LAYERS * WEIGHT_BYTES


@pytest.mark.parametrize(
    "product", in_ci(["function", "product of an operator"], "product of an operator")
)
def test_recomputation_makes_them_too(product):
    train(frozen_model(product), policy="full-recompute")
    (plan,) = memo_compile.report().plans
    assert plan.recomputed_bytes > 0
    assert plan.arena_bytes < LAYERS * WEIGHT_BYTES


@pytest.mark.full
def test_blocks_keep_none():
    model = frozen_model("function")
    train(model, by_block=True)
    assert memo_compile.report().groups[-1].peak_bytes < 2 * LAYERS * WEIGHT_BYTES


@pytest.mark.full
@pytest.mark.parametrize("product", PRODUCTS)
def test_a_floor_that_is_named_is_that_of_activations(product):
    model = frozen_model(product)
    torch._dynamo.reset()
    options = {**ATEN, "memory_budget": 1}
    with pytest.raises(Infeasible) as refused:
        torch.compile(copy.deepcopy(model), backend="memo", options=options)(
            torch.randn(TOKENS, WIDTH)
        )
    train(model, memory_budget=refused.value.floor_bytes)
    (plan,) = memo_compile.report().plans
    assert plan.peak_bytes <= refused.value.floor_bytes
    assert plan.arena_bytes < LAYERS * WEIGHT_BYTES


class FourBitBlock(nn.Module):
    """As Block, with layers of bitsandbytes."""

    def __init__(self, bitsandbytes) -> None:
        super().__init__()
        how = {"bias": False, "compute_dtype": torch.float32, "quant_type": "nf4"}
        self.norm = nn.LayerNorm(WIDTH)
        self.up = bitsandbytes.nn.Linear4bit(WIDTH, 4 * WIDTH, **how)
        self.down = bitsandbytes.nn.Linear4bit(4 * WIDTH, WIDTH, **how)
        self.adapter = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return x + self.down(F.silu(self.up(normed))) + self.adapter(normed)


@pytest.mark.parametrize("policy", in_ci(["auto", "full-recompute"], "full-recompute"))
def test_a_base_of_bitsandbytes_is_never_kept(policy):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    model = nn.Sequential(*(FourBitBlock(bitsandbytes) for _ in range(LAYERS))).to("cpu")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "adapter" in name)
    train(model, policy=policy)
    (plan,) = memo_compile.report().plans
    assert max(decision.bytes for decision in plan.decisions) < WEIGHT_BYTES
    assert plan.arena_bytes < LAYERS * WEIGHT_BYTES
    assert (plan.recomputed_bytes > 0) == (policy == "full-recompute")
