"""What is never recomputed by other kernels than those that ran: results that jump near a tie."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from memo_compile.driver.movable_step import _indices, _is_choice


def experts(x):
    return torch.topk(x, 2)[1]


def mask(x):
    return x > 0


def products(x):
    return functional.softmax(x @ x.t(), -1)


def attention(x):
    x = x.view(1, 2, 4, 4)
    return functional.scaled_dot_product_attention(x, x, x)


def positions(x):
    return torch.arange(8) // 2 + torch.zeros(8, dtype=torch.long)


@pytest.mark.parametrize(
    ("function", "chooses"),
    [(experts, True), (mask, True), (products, False), (attention, False), (positions, False)],
)
def test_what_chooses(function, chooses):
    graph = make_fx(function, tracing_mode="fake")(torch.randn(8, 4)).graph
    assert any(map(_is_choice, graph.nodes)) == chooses


def routed(x):
    chosen = x.topk(2)[1]
    return x.gather(1, chosen) * 2


def best(x):
    return x.argmax(-1)


def largest(x):
    return functional.max_pool2d(x.view(1, 1, 8, 4), 2)


def counted(x):
    return x.index_select(0, (x > 0).any(-1).long().cumsum(0) // 8)


def masked(x):
    return torch.where(x > 0, x, 0) * torch.arange(4)


@pytest.mark.parametrize(
    ("function", "goes_on"),
    [
        *[(routed, True), (counted, True)],
        *[(function, False) for function in (experts, best, largest, mask, masked)],
    ],
)
def test_what_the_forward_goes_on_with(function, goes_on):
    graph = make_fx(function, tracing_mode="fake")(torch.randn(8, 4)).graph
    assert any(_indices(graph)) == goes_on
