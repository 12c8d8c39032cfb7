"""What reads a value for equality, order or an index, where a part of it is made again.

A product of 100 rows takes another kernel than that of 200, and sums 1024 terms in another order:
most entries differ in their last digits.
"""

import pytest
import torch
from torch.nn import functional

import memo_compile
from tests.numerics.training import in_ci

TOKENS, WIDTH, INNER, LAYERS = 200, 1024, 256, 5


def reductions(h):
    """Of the tokens: what the backward finds again by equality or by an index."""
    top = h.amax(1, keepdim=True)
    low, high = torch.aminmax(h, dim=1, keepdim=True)
    by_hand = (h - top).exp().sum(1, keepdim=True).log() + top
    found = by_hand + low * high + h.max() + h.norm(p=float("inf"), dim=1, keepdim=True)
    found = found + h.median(1, keepdim=True).values * h.kthvalue(3, 1, keepdim=True).values
    return found.tanh() + h.max(1, keepdim=True).values


def readers(h):
    """Of each token: masks, places and steps that the forward goes on with."""
    halves = (torch.arange(h.shape[1]) % 2).view(1, -1, 1).expand_as(h)
    largest = h.new_zeros(1, 2, h.shape[2]).scatter_reduce(1, halves, h, "amax")
    found = torch.where(h >= h.topk(4, 1).values[:, -1:], h, 0.1 * h)
    found = found + (h - h.amax(1, keepdim=True)).abs() * largest.sum(1, keepdim=True)
    found = found + h.sort(1).values.roll(1, 1) + h.cummax(1).values
    found = found + torch.maximum(h, h.roll(1, 1)) + functional.one_hot(h.argmax(-1), INNER) * h
    return found.tanh()


def steps(h):
    """Roundings: the forward goes on with one of two whole numbers, and so must the backward."""
    fine = 1024 * h
    coarse = fine.round() + fine.remainder(8.0) + torch.div(fine, 2, rounding_mode="floor")
    gates = (h > h.mean(-1, keepdim=True)).to(h.dtype)
    return coarse / 1024 * gates + h.sign() * h


READERS = {"reductions": reductions, "readers": readers, "steps": steps}


def model(reads):
    def step(x, weights):
        for into, out in weights:
            h = x @ into
            x = functional.layer_norm(x + (functional.gelu(h) + reads(h)) @ out, (WIDTH,))
        return x.square().mean() + x.tanh().sum()

    return step


def gradients(step, x, weights):
    own = [[weight.clone().requires_grad_() for weight in pair] for pair in weights]
    step(x, own).backward()
    return [weight.grad for pair in own for weight in pair]


OPTIONS = {
    "slices": {"policy": "memo", "alpha": 0.5, "token_granule": 1},
    "tiles": {"policy": "full-recompute", "token_tiles": 4},
    "again": {"policy": "full-recompute"},
}


@pytest.mark.parametrize("name", in_ci(READERS, "reductions", "readers"))
@pytest.mark.parametrize(
    ("lowering", "kind"),
    [
        ("aten", "slices"),
        pytest.param("aten", "tiles", marks=pytest.mark.full),
        pytest.param("inductor", "again", marks=pytest.mark.full),
        pytest.param("inductor", "slices", marks=pytest.mark.full),
    ],
)
def test_all_of_a_step_goes_by_one_jump(name, lowering, kind):
    """As eager; where the forward jumps itself, as the forward of these very kernels."""
    torch.manual_seed(0)
    shapes = (WIDTH, INNER), (INNER, WIDTH)
    weights = [[torch.randn(shape) / shape[0] ** 0.5 for shape in shapes] for _ in range(LAYERS)]
    x, step = torch.randn(1, TOKENS, WIDTH), model(READERS[name])
    options = {"lowering": lowering, **OPTIONS[kind]}
    kept = {"lowering": lowering, "policy": "save"}
    like = step if name == "reductions" else torch.compile(step, backend="memo", options=kept)
    expected = gradients(like, x, weights)
    torch._dynamo.reset()
    found = gradients(torch.compile(step, backend="memo", options=options), x, weights)
    plan = memo_compile.report().plans[-1]
    assert plan.recomputed_bytes, memo_compile.report().notes
    for ours, own in zip(found, expected, strict=True):
        error, largest = float((ours - own).abs().max()), float(own.abs().max())
        assert error <= 5e-6 * largest
