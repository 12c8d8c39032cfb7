"""FLOPs, bytes and seconds of operators on fake shapes."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.nn import functional

from memo_compile.analysis.structure import op_name
from memo_compile.costs.hardware import HARDWARE
from memo_compile.costs.roofline import graph_cost, graph_seconds, node_cost, node_seconds
from memo_compile.costs.work import (
    MATMUL_EFFICIENCY,
    MEMORY_EFFICIENCY,
    NOTHING,
    NodeCost,
    roofline_s,
)
from tests import models
from tests.steps.layer_regions import layer_region, region_of

H100 = HARDWARE["h100"]
FLOAT_BYTES = 4


def graph_of(function: Callable[..., object], *shapes: tuple[int, ...]) -> fx.GraphModule:
    return region_of(function, *shapes).gm


def cost_of(gm: fx.GraphModule, name: str) -> NodeCost:
    return next(node_cost(node) for node in gm.graph.nodes if op_name(node) == name)


def test_a_product_counts_its_flops_and_every_operand_once():
    gm = graph_of(lambda a, b: (a @ b,), (8, 16), (16, 32))
    words = 8 * 16 + 16 * 32 + 8 * 32
    assert cost_of(gm, "mm") == NodeCost(flops=2 * 8 * 16 * 32, bytes=FLOAT_BYTES * words)


def test_the_products_of_experts_count_as_one_product_of_all_rows():
    """What each expert's rows cost, forward and backward: 2, then 4 per row and weight."""
    experts, rows, width, wide = 4, 64, 32, 128

    def step(x, weight):
        with torch.enable_grad():
            leaves = [tensor.detach().bfloat16().requires_grad_() for tensor in (x, weight)]
            ends = torch.arange(1, experts + 1, dtype=torch.int32) * (rows // experts)
            out = torch._grouped_mm(*leaves, offs=ends)
            return out, *torch.autograd.grad(out.square().sum(), leaves)

    gm = graph_of(step, (rows, width), (experts, width, wide))
    products = [node_cost(n).flops for n in gm.graph.nodes if op_name(n) == "_grouped_mm"]
    assert products == [2 * rows * width * wide] * 3


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_gpt_layer_needs_24_b_s_h_squared_and_its_attention(dropout):
    """With dropout attention is written out; without it is one causal kernel, half of that."""
    batch, seq, hidden = 2, 32, models.HIDDEN
    region = layer_region(models.gpt2, dropout=dropout)
    attention = (2 if dropout == 0 else 4) * batch * seq * seq * hidden
    assert graph_cost(region.gm).flops == 24 * batch * seq * hidden**2 + attention
    assert any("attention" in op_name(node) for node in region.gm.graph.nodes) == (dropout == 0)


@pytest.mark.parametrize(("causal", "expected"), [(False, 4), (True, 2)])
def test_causal_attention_is_half_of_it(causal, expected):
    attention = functools.partial(functional.scaled_dot_product_attention, is_causal=causal)
    shape = (2, 4, 128, 16)
    gm = graph_of(lambda q, k, v: (attention(q, k, v),), shape, shape, shape)
    assert graph_cost(gm).flops == expected * 2 * 4 * 128 * 128 * 16


def test_the_backward_of_attention_counts_too():
    shape = (1, 2, 64, 16)

    def both(q, k, v):
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
            out = functional.scaled_dot_product_attention(*leaves)
            return torch.autograd.grad(out.sum(), leaves)

    forward = graph_of(
        lambda q, k, v: (functional.scaled_dot_product_attention(q, k, v),), shape, shape, shape
    )
    flops = graph_cost(forward).flops
    assert graph_cost(graph_of(both, shape, shape, shape)).flops == flops + 5 * flops // 2


def test_heads_that_share_keys_cost_as_much_as_heads_of_their_own():
    """torch 2.11's own formula takes as many keys as queries, and else raises."""
    queries, keys, own = (2, 4, 64, 16), (2, 2, 64, 16), (2, 4, 64, 16)

    def flops(shape, **more):
        def both(q, k, v):
            with torch.enable_grad():
                leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
                out = functional.scaled_dot_product_attention(*leaves, **more)
                return torch.autograd.grad(out.sum(), leaves)

        gm = graph_of(both, queries, shape, shape)
        assert any("attention" in op_name(node) for node in gm.graph.nodes)
        return graph_cost(gm).flops

    assert flops(keys, enable_gqa=True) == flops(own) > 0


def test_a_convolution_counts():
    gm = graph_of(lambda x, w: (functional.conv2d(x, w, padding=1),), (2, 3, 8, 8), (5, 3, 3, 3))
    assert graph_cost(gm).flops == 2 * 2 * 5 * 8 * 8 * 3 * 9


def test_views_cost_nothing():
    gm = graph_of(lambda x: (x.view(4, 16).t().unsqueeze(0)[:, :2],), (8, 8))
    assert graph_cost(gm) == NOTHING


def test_a_chain_of_pointwise_operators_reads_once_and_writes_once():
    gm = graph_of(lambda x: (x.sin().cos().exp() * 2,), (64, 64))
    assert graph_cost(gm) == NodeCost(flops=0, bytes=2 * 64 * 64 * FLOAT_BYTES)


def test_what_a_product_reads_goes_through_memory():
    gm = graph_of(lambda x, w: (x.sin() @ w,), (64, 64), (64, 64))
    assert cost_of(gm, "sin").bytes == 2 * 64 * 64 * FLOAT_BYTES
    assert cost_of(gm, "mm").bytes == 3 * 64 * 64 * FLOAT_BYTES
    seen = graph_of(lambda x, w: (x.sin().view(64, 64) @ w,), (8, 8, 64), (64, 64))
    assert cost_of(seen, "sin").bytes == 2 * 64 * 64 * FLOAT_BYTES


def test_a_reduction_joins_the_chain():
    gm = graph_of(lambda x: (x - x.mean(-1, keepdim=True),), (64, 64))
    assert cost_of(gm, "mean").bytes == 64 * 64 * FLOAT_BYTES
    assert graph_cost(gm).bytes == 3 * 64 * 64 * FLOAT_BYTES


def test_results_of_a_tuple_that_are_kept_are_written():
    def norm(x):
        variance, mean = torch.ops.aten.var_mean.correction(x, [1], correction=0, keepdim=True)
        return variance, (x - mean) * 2

    gm = graph_of(norm, (64, 64))
    assert cost_of(gm, "var_mean").bytes == (64 * 64 + 64) * FLOAT_BYTES


def test_an_embedding_reads_as_much_of_the_table_as_it_returns():
    gm = graph_of(
        lambda table, x: (functional.embedding(x.long().abs() % 4, table),), (50000, 8), (16,)
    )
    assert cost_of(gm, "embedding").bytes < 3 * 16 * 8 * FLOAT_BYTES


def test_an_expanded_input_is_read_once():
    gm = graph_of(lambda x, w: (torch.bmm(x.expand(16, 8, 8), w),), (1, 8, 8), (16, 8, 8))
    assert cost_of(gm, "bmm").bytes == (8 * 8 + 2 * 16 * 8 * 8) * FLOAT_BYTES


def test_an_unknown_operator_counts_its_bytes():
    with torch.library._scoped_library("costs_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        gm = graph_of(lambda x: (torch.ops.costs_test.twice(x),), (64, 64))
        assert graph_cost(gm) == NodeCost(flops=0, bytes=2 * 64 * 64 * FLOAT_BYTES)


def test_roofline_takes_the_slower_of_arithmetic_and_memory():
    flops, num_bytes = 10**12, 10**9
    compute_s = flops / (H100.peak_flops_per_s * MATMUL_EFFICIENCY)
    memory_s = num_bytes / (H100.hbm_bytes_per_s * MEMORY_EFFICIENCY)
    assert roofline_s(NodeCost(flops=flops, bytes=num_bytes), H100) == compute_s
    assert roofline_s(NodeCost(flops=1, bytes=num_bytes), H100) == memory_s
    assert compute_s > memory_s
    assert roofline_s(NOTHING, H100) == 0.0


def test_the_seconds_of_a_graph_are_those_of_its_nodes():
    region = layer_region(models.llama)
    total = sum(node_seconds(node, H100) for node in region.gm.graph.nodes)
    assert graph_seconds(region.gm, H100) == pytest.approx(total)
    slower = graph_seconds(region.gm, HARDWARE["cpu"])
    assert slower > 10 * total > 0
