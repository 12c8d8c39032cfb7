"""The rows of a graph run by themselves give the rows of the whole graph's results."""

import functools
from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from memo_compile.analysis.regions import RegionGraph
from memo_compile.analysis.row_rules import RowDim
from memo_compile.analysis.rows import attention_rows, row_dims, row_layout
from memo_compile.analysis.views import is_tensor
from memo_compile.errors import UnsupportedGraph
from memo_compile.lowering.aten import interpret
from memo_compile.passes.slice_rows import slice_rows
from tests import models
from tests.numerics.training import in_ci
from tests.steps.layer_regions import layer_region

TOKENS, WIDTH = 12, 8
ROWS = RowDim(dim=1, factor=1)
Dims = Mapping[fx.Node, RowDim | None]


def traced(function: Callable[..., object], *args: torch.Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


def analysed(gm: fx.GraphModule, *seeds: RowDim) -> dict[fx.Node, RowDim | None]:
    inputs = gm.graph.find_nodes(op="placeholder")
    return row_dims(gm, dict(zip(inputs, seeds, strict=False)), TOKENS)


def outputs(gm: fx.GraphModule) -> list[fx.Node]:
    found = gm.graph.output_node().args[0]
    return list(found) if isinstance(found, list | tuple) else [found]


def real(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random numbers in the layout of the fake ``value``."""
    if value.dtype is torch.bool:
        filled = torch.rand(value.shape, generator=generator) > 0.5
    elif value.is_floating_point():
        filled = torch.randn(value.shape, generator=generator, dtype=value.dtype)
    else:
        filled = torch.randint(0, 8, value.shape, generator=generator, dtype=value.dtype)
    result = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return result.copy_(filled)


def rows_of(value: torch.Tensor, row: RowDim | None, start: int, count: int) -> torch.Tensor:
    if row is None:
        return value
    return value.narrow(row.dim, start * row.factor, count * row.factor)


def strides(value: torch.Tensor) -> list[int]:
    """Of the dimensions where a stride means something."""
    return [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1]


def check_rows(
    gm: fx.GraphModule, dims: Dims, num_rows: int, start: int, count: int, *, bitwise: bool = False
) -> int:
    """Compare every output of the sliced graph; the number of outputs that carry rows."""
    sliced = slice_rows(gm, dims, count, num_rows)
    sliced.graph.lint()
    generator = torch.Generator().manual_seed(0)
    inputs = gm.graph.find_nodes(op="placeholder")
    values = [real(node.meta["val"], generator) for node in inputs]
    whole = interpret(gm)(list(values))
    parts = [
        rows_of(value, dims[node], start, count) for node, value in zip(inputs, values, strict=True)
    ]
    for node, part in zip(sliced.graph.find_nodes(op="placeholder"), parts, strict=True):
        assert (part.shape, part.stride()) == (node.meta["val"].shape, node.meta["val"].stride())
    got = interpret(sliced)(list(parts))
    carrying = 0
    for node, now, made, result in zip(outputs(gm), outputs(sliced), whole, got, strict=True):
        expected = rows_of(made, dims[node], start, count)
        carrying += dims[node] is not None
        fake = now.meta["val"]
        assert result.shape == fake.shape == expected.shape, node
        assert strides(result) == strides(fake), node
        if bitwise:
            assert torch.equal(result, expected), node
        else:
            torch.testing.assert_close(result, expected, equal_nan=True)
    return carrying


x = functools.partial(torch.randn, 1, TOKENS, WIDTH)


def test_a_rotary_table_and_labels_carry_rows_without_being_named():
    def program(x, cos, labels, weight):
        heads = x.view(1, TOKENS, 2, 4).transpose(1, 2)
        turned = heads * cos.unsqueeze(1)
        logits = turned.transpose(1, 2).reshape(TOKENS, WIDTH) @ weight
        picked = logits.log_softmax(-1).gather(1, labels.view(-1, 1))
        kept = torch.where(labels.view(-1, 1) != 3, picked, torch.zeros(TOKENS, 1))
        return turned, kept.squeeze(1)

    labels = torch.randint(0, 8, (1, TOKENS))
    gm = traced(program, x(), torch.randn(1, TOKENS, 4), labels, torch.randn(WIDTH, 8))
    dims = analysed(gm, ROWS)
    _, cos, labels, weight = gm.graph.find_nodes(op="placeholder")
    assert dims[cos] == dims[labels] == ROWS
    assert dims[weight] is None
    assert [dims[node] for node in outputs(gm)] == [
        RowDim(dim=2, factor=1),
        RowDim(dim=0, factor=1),
    ]
    assert check_rows(gm, dims, TOKENS, 3, 6) == 2


MIXED = {
    "softmax over tokens": lambda x: x.softmax(1),
    "cumsum over tokens": lambda x: x.cumsum(1),
    "sum over tokens": lambda x: x.sum(1),
    "mean of all": lambda x: x.mean(),
    "dropout": lambda x: functional.dropout(x, 0.5),
    "uniform noise": lambda x: x + torch.rand_like(x),
    "positions": lambda x: x + torch.arange(TOKENS).view(1, TOKENS, 1),
    "triangle": lambda x: torch.where(
        torch.arange(WIDTH) > torch.arange(TOKENS).view(-1, 1), x, 0.0
    ),
    "gram": lambda x: x[0] @ x[0].t(),
    "contracted": lambda x: x[0].t() @ x[0],
    "a shift": lambda x: x[:, 1:],
    "one token": lambda x: x[:, 3],
    "flipped": lambda x: x.flip(1),
    "side by side": lambda x: torch.cat([x, x], dim=1),
    "pairs": lambda x: x.view(1, TOKENS // 2, 2 * WIDTH),
    "picked": lambda x: x[:, torch.tensor([0, 2])],
    "overlapping": lambda x: x.as_strided((1, TOKENS - 1, 2), (96, 8, 1)),
    "padded": lambda x: functional.pad(x, (0, 0, 1, 0)),
    "written": lambda x: x.clone().add_(1.0),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_rows_is_absent_and_so_is_what_follows(name):
    gm = traced(lambda x: MIXED[name](x).abs() + 1, x())
    dims = analysed(gm, ROWS)
    (last,) = outputs(gm)
    assert last not in dims
    assert all(source not in dims for source in last.all_input_nodes)
    with pytest.raises(UnsupportedGraph, match="mixes rows"):
        slice_rows(gm, dims, 4, TOKENS)


def test_attention_is_separable_over_the_batch_and_not_over_tokens():
    def program(q, k, v, bias):
        return (functional.scaled_dot_product_attention(q, k, v, bias).relu(),)

    shape = (TOKENS, 2, TOKENS, 16)
    bias = torch.randn(TOKENS, 1, TOKENS, TOKENS)
    gm = traced(program, *(torch.randn(shape) for _ in range(3)), bias)
    assert any("attention" in str(node.target) for node in gm.graph.nodes)
    over_batch = analysed(gm, RowDim(dim=0, factor=1))
    assert check_rows(gm, over_batch, TOKENS, 2, 3) == 1
    over_tokens = analysed(gm, RowDim(dim=2, factor=1))
    assert outputs(gm)[0] not in over_tokens


def test_behind_attention_rows_go_on_when_its_result_is_given():
    def program(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v).relu()

    gm = traced(program, *(torch.randn(1, 2, TOKENS, 16) for _ in range(3)))
    seeds = dict.fromkeys(gm.graph.find_nodes(op="placeholder"), RowDim(dim=2, factor=1))
    found = attention_rows(gm, seeds, TOKENS)
    assert [row.dim for row in found.values()] == [2]
    dims = row_dims(gm, {**seeds, **found}, TOKENS)
    assert dims[outputs(gm)[0]] == RowDim(dim=2, factor=1)
    with pytest.raises(UnsupportedGraph, match=r"attention.*mixes rows"):
        slice_rows(gm, dims, 4, TOKENS)


def test_attention_written_out_gives_its_two_products():
    def program(q, k, v):
        return ((q @ k.transpose(-1, -2)).softmax(-1) @ v).relu()

    gm = traced(program, *(torch.randn(2, TOKENS, 16) for _ in range(3)))
    seeds = dict.fromkeys(gm.graph.find_nodes(op="placeholder"), ROWS)
    found = attention_rows(gm, seeds, TOKENS)
    assert [node.target for node in found] == [torch.ops.aten.bmm.default] * 2
    assert outputs(gm)[0] in row_dims(gm, {**seeds, **found}, TOKENS)


def test_one_mask_read_in_two_ways_is_refused():
    def program(x, square):
        flat = x.view(TOKENS, WIDTH)
        return flat @ torch.ones(WIDTH, TOKENS) + square, flat @ torch.ones(
            WIDTH, TOKENS
        ) + square.t()

    gm = traced(program, x(), torch.randn(TOKENS, TOKENS))
    dims = analysed(gm, ROWS)
    first, second = outputs(gm)
    assert first in dims
    assert second not in dims


def test_seeds_must_fit():
    gm = traced(lambda x: x + 1, x())
    with pytest.raises(UnsupportedGraph, match=r"expected 12 rows x 2 in dimension 1, got shape"):
        analysed(gm, RowDim(dim=1, factor=2))
    with pytest.raises(UnsupportedGraph, match="at least 2 rows"):
        row_dims(gm, {}, 1)
    with pytest.raises(UnsupportedGraph, match="expected 1 to 12 rows, got 13"):
        slice_rows(gm, analysed(gm, ROWS), 13, TOKENS)


def test_row_layout_is_the_bytes_of_a_row_where_rows_are_ranges():
    dense = torch.empty(1, TOKENS, WIDTH)
    assert row_layout(dense, ROWS, TOKENS) == WIDTH * 4
    assert row_layout(torch.empty(2 * TOKENS, 3), RowDim(dim=0, factor=2), TOKENS) == 24
    heads = dense.view(1, TOKENS, 2, 4).transpose(1, 2)
    assert row_layout(heads, RowDim(dim=2, factor=1), TOKENS) == WIDTH * 4
    assert row_layout(heads.contiguous(), RowDim(dim=2, factor=1), TOKENS) is None
    assert row_layout(dense[:, :, :4], ROWS, TOKENS) is None
    assert row_layout(dense.expand(3, TOKENS, WIDTH), ROWS, TOKENS) is None
    assert row_layout(dense, RowDim(dim=2, factor=1), TOKENS) is None


@settings(max_examples=30, deadline=None)
@given(
    batch=st.sampled_from([1, 2, 3]),
    steps=st.lists(st.sampled_from(["split", "merge", "swap", "double", "norm", "mm"]), max_size=6),
    part=st.tuples(st.integers(0, 5), st.integers(1, 6)),
)
def test_random_chains_agree_row_by_row(batch, steps, part):
    """Chains of views and row-wise operators over (B, T, C), rows = B or T."""
    tokens = 6
    num_rows, seed = (tokens, ROWS) if batch == 1 else (batch, RowDim(dim=0, factor=1))

    def program(x, weight):
        for step in steps:
            if step == "split" and x.dim() == 3:
                x = x.reshape(*x.shape[:2], 2, -1)
            elif step == "merge":
                x = x.reshape(-1, x.shape[-1]) if x.dim() < 4 else x.flatten(2)
            elif step == "swap" and x.dim() == 4:
                x = x.transpose(1, 2)
            elif step == "double":
                x = torch.cat([x, x * 2], dim=-1)
            elif step == "norm":
                x = (x - x.mean(-1, keepdim=True)).softmax(-1)
            elif step == "mm" and x.dim() == 2 and x.shape[-1] == 8:
                x = x @ weight
        return (x.sin(),)

    gm = traced(program, torch.randn(batch, tokens, 8), torch.randn(8, 8))
    dims = row_dims(gm, {gm.graph.find_nodes(op="placeholder")[0]: seed}, num_rows)
    if outputs(gm)[0] not in dims:
        assert "swap" in steps  # heads before tokens: then a flat view mixes the tokens' order
        return
    start = part[0] % num_rows
    count = min(part[1], num_rows - start)
    assert check_rows(gm, dims, num_rows, start, count) == 1


def bert_without_dropout(**sizes: int) -> models.ModelCase:
    model, inputs, loss = models.bert(**sizes)
    return model.eval(), inputs, loss


BUILDERS = {
    "llama": models.llama,
    "gpt2": functools.partial(models.gpt2, dropout=0.0),
    "bert": bert_without_dropout,
}


def layer(name: str, batch: int) -> RegionGraph:
    return layer_region(BUILDERS[name], batch=batch)


def activations(region: RegionGraph, batch: int) -> dict[fx.Node, RowDim]:
    """The layer's input, (B, 32, 64), also where it is read as (B * 32, 64)."""
    found = {}
    for index, node in enumerate(region.gm.graph.find_nodes(op="placeholder")):
        shape = tuple(node.meta["val"].shape)
        if index not in region.static_inputs and shape == (batch, 32, 64):
            found[node] = RowDim(dim=int(batch == 1), factor=1)
        elif index not in region.static_inputs and shape == (batch * 32, 64):
            found[node] = RowDim(dim=0, factor=1 if batch == 1 else 32)
    return found


def separable_part(gm: fx.GraphModule, dims: Dims, given: Dims) -> tuple[fx.GraphModule, Dims]:
    """What ``dims`` holds, with the nodes of ``given`` as placeholders; returns every row value."""
    graph, made, found = fx.Graph(), {}, {}
    nodes = [node for node in gm.graph.nodes if node in dims]
    for node in nodes:
        if node.op == "placeholder" or node in given:
            made[node] = graph.placeholder(node.name)
            made[node].meta = dict(node.meta)
    for node in nodes:
        if node not in made:
            made[node] = graph.node_copy(node, lambda source: made[source])
    found = {made[node]: dims[node] for node in nodes}
    shown = [node for node in nodes if node.op == "call_function" and is_tensor(node)]
    graph.output(tuple(made[node] for node in shown if dims[node] is not None))
    return fx.GraphModule(gm, graph), found


@pytest.mark.parametrize("name", in_ci(["llama", "gpt2", "bert"], "llama"))
def test_a_real_layer_is_separable_but_for_attention_over_tokens(name):
    gm = layer(name, 1).gm
    seeds = activations(layer(name, 1), 1)
    attention = attention_rows(gm, seeds, 32)
    (kernel,) = attention
    dims = row_dims(gm, {**seeds, **attention}, 32)
    assert [node for node in gm.graph.nodes if node not in dims and node.op != "output"] == []
    given = {node: dims[node] for node in kernel.users}
    rest = {node: row for node, row in dims.items() if node is not kernel}
    part, part_dims = separable_part(gm, rest, given)
    assert check_rows(part, part_dims, 32, 0, 16) > 20
    assert check_rows(part, part_dims, 32, 24, 8) > 20
    alone = row_dims(gm, seeds, 32)
    assert kernel not in alone
    assert outputs(gm)[-1] not in alone


@pytest.mark.parametrize("name", in_ci(["llama", "gpt2", "bert"], "bert"))
def test_a_real_layer_is_separable_over_sequences(name):
    gm = layer(name, 2).gm
    last = list(activations(layer(name, 2), 2).items())[-1:]
    dims = row_dims(gm, dict(last), 2)  # BERT reads its input twice: the other is found from here
    assert [node for node in gm.graph.nodes if node not in dims and node.op != "output"] == []
    assert all(dims[node] is not None for node in activations(layer(name, 2), 2))
    assert check_rows(gm, dims, 2, 0, 1) == len(outputs(gm))
    assert check_rows(gm, dims, 2, 1, 1) == len(outputs(gm))


@pytest.mark.full
def test_dropout_of_a_real_layer_is_absent():
    region = layer_region(models.gpt2, batch=1, dropout=0.1)
    dims = row_dims(region.gm, activations(region, 1), 32)
    dropped = [node for node in region.gm.graph.nodes if "inductor_random" in str(node.target)]
    assert dropped
    compared = [user for node in dropped for user in node.users]
    assert all(reader not in dims for node in compared for reader in node.users)
