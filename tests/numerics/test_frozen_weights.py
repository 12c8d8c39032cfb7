"""Frozen weights that a layer computes from packed ones: made again in the backward, never kept."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memo_compile
from memo_compile.errors import Infeasible
from memo_compile.step.plans import ReportedPlan
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
    floor = floor_of(model)
    train(model, memory_budget=floor)
    (plan,) = memo_compile.report().plans
    assert plan.peak_bytes <= floor
    assert plan.arena_bytes < LAYERS * WEIGHT_BYTES


def floor_of(model: nn.Module, **options: object) -> int:
    """The smallest budget that memo names for a step of ``model``."""
    torch._dynamo.reset()
    wanted = {**ATEN, "memory_budget": 1, **options}
    with pytest.raises(Infeasible) as refused:
        torch.compile(copy.deepcopy(model), backend="memo", options=wanted)(
            torch.randn(TOKENS, WIDTH)
        )
    assert refused.value.floor_bytes is not None
    return refused.value.floor_bytes


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
    train(adapted_by_bitsandbytes(LAYERS), policy=policy)
    (plan,) = memo_compile.report().plans
    assert max(decision.bytes for decision in plan.decisions) < WEIGHT_BYTES
    assert plan.arena_bytes < LAYERS * WEIGHT_BYTES
    assert (plan.recomputed_bytes > 0) == (policy == "full-recompute")


def adapted_by_hand(num_layers: int, *, is_packed: bool) -> nn.Module:
    """Layers of packed weights that are frozen parameters, or of the same weights as they are."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block("product") for _ in range(num_layers)))
    for block in model:
        for name, shape in (("up", [4 * WIDTH, WIDTH]), ("down", [WIDTH, 4 * WIDTH])):
            base = [block._buffers.pop(f"{name}_{part}") for part in ("packed", "scales")]
            if not is_packed:
                base = [dequantised(*base, shape), None]
                block.product = lambda x, weight, *_: F.linear(x, weight)
            for part, value in zip(("packed", "scales"), base, strict=True):
                frozen = None if value is None else nn.Parameter(value, requires_grad=False)
                block.register_parameter(f"{name}_{part}", frozen)
    return model


def adapted_by_bitsandbytes(num_layers: int) -> nn.Module:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    model = nn.Sequential(*(FourBitBlock(bitsandbytes) for _ in range(num_layers))).to("cpu")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "adapter" in name)
    return model


BASES = {
    "packed by hand": functools.partial(adapted_by_hand, is_packed=True),
    "not packed": functools.partial(adapted_by_hand, is_packed=False),
    "packed by bitsandbytes": adapted_by_bitsandbytes,
}


def bytes_of_a_layer(block: nn.Module) -> tuple[int, int]:
    """What a layer's base takes, and what its adapter does."""
    base = adapter = 0
    for parameter in block.parameters():
        adapter += parameter.nbytes * parameter.requires_grad
        base += parameter.nbytes * (not parameter.requires_grad)
        state = getattr(parameter, "quant_state", None)
        if state is not None:  # of bitsandbytes, packed as well
            held = (state.absmax, state.offset, state.state2.absmax, state.state2.code)
            base += sum(tensor.nbytes for tensor in held)
    return base, adapter


def recomputing(model: nn.Module) -> ReportedPlan:
    """The plan of a step that keeps no more than it must; the step equals eager's."""
    train(model, policy="full-recompute", optimizer_state_bytes_per_parameter=8.0)
    return memo_compile.report().plans[-1]


@pytest.mark.parametrize("base", in_ci(list(BASES)[::2], "packed by hand"))
def test_four_more_layers_take_their_packed_base_and_their_adapters(base):
    """The arithmetic: a base counts once, an adapter with its gradient and two moments."""
    few, many = (BASES[base](num_layers) for num_layers in (4, 8))
    of_base, of_adapter = bytes_of_a_layer(many[0])
    before, after = recomputing(few).fixed, recomputing(many).fixed
    held = after.parameters + after.buffers - before.parameters - before.buffers
    assert held == 4 * (of_base + of_adapter)
    assert after.gradients - before.gradients == 4 * of_adapter
    assert after.optimizer_state - before.optimizer_state == 8 * of_adapter
    for name, parameter in many.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name


@pytest.mark.full
def test_a_floor_is_that_of_activations_and_the_packed_base():
    """Beside the same weights unpacked: the bases differ, and a product's weight is made."""
    options = {"host_budget": 0, "optimizer_state_bytes_per_parameter": 8.0}
    packed, plain = BASES["packed by hand"](8), BASES["not packed"](8)
    floor = floor_of(packed, **options)
    of_bases = 8 * (bytes_of_a_layer(plain[0])[0] - bytes_of_a_layer(packed[0])[0])
    weight_and_halves = floor - floor_of(plain, **options) + of_bases
    assert WEIGHT_BYTES < weight_and_halves < 2.5 * WEIGHT_BYTES
    train(packed, memory_budget=floor, **options)
    assert memo_compile.report().plans[-1].peak_bytes <= floor
