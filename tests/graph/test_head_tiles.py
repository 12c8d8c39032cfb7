"""Attention of a few heads at a time computes what attention computes, with less memory."""

import pytest
import torch

from memo_compile.analysis.row_rules import is_attention
from memo_compile.analysis.tile_chains import transient_bytes
from memo_compile.passes.attention_cut import beside_attention
from memo_compile.passes.tiles import tilings
from memo_compile.step.problem import Phase
from tests.graph.test_tiles import interpret, region, run_tiled

aten = torch.ops.aten
TOKENS, HEADS, GROUPS, HEAD, WIDTH = 512, 8, 4, 16, 128


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def heads_of(flat, batch):
    return flat.view(batch, TOKENS, -1, HEAD).transpose(1, 2)


def flat(heads):
    return heads.transpose(1, 2).reshape(-1, heads.shape[1] * HEAD)


def mixed(x, wq, wk, wv, cos, sin):
    """Normalised input, queries, keys, values, and attention with keys that two heads share."""
    batch = x.shape[0]
    y = (x * x.square().mean(-1, keepdim=True).rsqrt()).view(-1, WIDTH)
    q, k, v = (heads_of(y @ weight.t(), batch) for weight in (wq, wk, wv))
    k, v = (
        each[:, :, None]
        .expand(batch, GROUPS, HEADS // GROUPS, TOKENS, HEAD)
        .clone(memory_format=torch.contiguous_format)
        .view(batch, HEADS, TOKENS, HEAD)
        for each in (rotated(k, cos, sin), v)
    )
    q = rotated(q, cos, sin)
    return y, q, k, v, *aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)


def forward(x, wo, *weights):
    *_, out, _ = mixed(x, *weights)
    return (x + (flat(out) @ wo.t()).view(x.shape),)


def backward(tangent, x, wo, *weights):
    batch, (wq, wk, wv, cos, sin) = x.shape[0], weights
    y, q, k, v, out, lse = mixed(x, *weights)
    grad = tangent.view(-1, WIDTH)
    of_heads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        heads_of(grad @ wo, batch), q, k, v, out, lse, 0.0, True
    )
    shared = batch, GROUPS, HEADS // GROUPS, TOKENS, HEAD
    of_q, of_k, of_v = of_heads[0], *(each.view(shared).sum(2) for each in of_heads[1:])
    parts = flat(rotated(of_q, cos, -sin)), flat(rotated(of_k, cos, -sin)), flat(of_v)
    of_y = [(part @ w).view(x.shape) for part, w in zip(parts, (wq, wk, wv), strict=True)]
    of_weights = [part.t() @ y for part in parts]
    return (tangent + (of_y[0] + of_y[1] + of_y[2]) * 2, grad.t() @ flat(out), *of_weights)


def inputs(batch):
    generator = torch.Generator().manual_seed(0)
    widths = [(WIDTH, HEADS * HEAD), *[(n * HEAD, WIDTH) for n in (HEADS, GROUPS, GROUPS)]]
    shapes = [(batch, TOKENS, WIDTH), *widths, (TOKENS, HEAD), (TOKENS, HEAD)]
    return [torch.randn(shape, generator=generator) / 8 for shape in shapes]


def has_attention(part):
    return any(map(is_attention, part.gm.graph.nodes))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("function", "share"), [(forward, 0.75), (backward, 0.6)])
def test_attention_of_a_group_of_heads_at_a_time(function, share, batch):
    """All but the first result are weights' gradients, which the user gets."""
    given = inputs(batch)
    given = given if function is forward else [torch.randn_like(given[0]), *given]
    whole = region(function, *given, external=(1, 2, 3, 4) if function is backward else ())
    (tiled,) = tilings(whole, GROUPS, by_heads=True)
    assert (tiled.num_rows, tiled.tiling.num_tiles) == (GROUPS, GROUPS)
    assert [name for name, part in tiled.parts.items() if has_attention(part)] == ["part.tile"]
    assert tiled.transient_bytes < share * transient_bytes(whole.gm)
    expected = interpret(whole.gm)(list(given))
    for got, wanted in zip(run_tiled(tiled, given), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    totals = {added.total for added in tiled.tiling.runs[0].sums}
    assert len(totals) == 1, "the three products of the input's gradient are one sum"


def test_sums_of_heads_for_every_pair_of_tokens_are_two_totals():
    def pairs(x, starts, ends, *weights):
        *_, out, _ = mixed(x, *weights)
        start, end = (flat(out) @ weight.t() for weight in (starts, ends))
        return (start[:, None] + end[None],)

    given = inputs(1)
    given[1:2] = torch.randn(2, 4, HEADS * HEAD)
    whole = region(pairs, *given)
    (tiled,) = tilings(whole, GROUPS, by_heads=True)
    expected = interpret(whole.gm)(list(given))
    torch.testing.assert_close(run_tiled(tiled, given), expected, rtol=1e-4, atol=1e-4)
    assert len({added.total for added in tiled.tiling.runs[0].sums}) == 2


def test_heads_that_are_mixed_run_whole():
    def mixes(x, wo, mixer, *weights):
        *_, out, _ = mixed(x, *weights)
        out = torch.einsum("bhtd,hg->bgtd", out, mixer)
        q, k, v = (torch.einsum("bhtd,hg->bgtd", out, mixer) for _ in range(3))
        out = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
        return (x + (flat(out) @ wo.t()).view(x.shape),)

    given = inputs(1)
    given.insert(2, torch.randn(HEADS, HEADS))
    whole = region(mixes, *given)
    (tiled,) = tilings(whole, GROUPS, by_heads=True)
    expected = interpret(whole.gm)(list(given))
    for got, wanted in zip(run_tiled(tiled, given), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert [name for name, part in tiled.parts.items() if has_attention(part)] == [
        "part.tile",
        "part.after",
    ], "the second attention is not in the first one's tiles"


def test_a_layer_is_cut_where_the_fewest_bytes_cross():
    def layer(x, up, down, wo, *weights):
        (h,) = forward(x, wo, *weights)
        return h, h + (h.view(-1, WIDTH) @ up).relu() @ down

    x, *weights = inputs(1)
    nodes = region(layer, x, torch.randn(WIDTH, 512), torch.randn(512, WIDTH), *weights).gm.graph
    calls = [node for node in nodes.nodes if node.op == "call_function"]
    static = {node.name for node in nodes.find_nodes(op="placeholder")[1:]}
    first, second = beside_attention(calls, Phase.FORWARD, static)
    assert str(first[-1].target) == "aten.add.Tensor"
    assert [str(node.target) for node in second if "mm" in str(node.target)] == [
        "aten.mm.default"
    ] * 2
    assert beside_attention(second, Phase.FORWARD, static) == [second]
