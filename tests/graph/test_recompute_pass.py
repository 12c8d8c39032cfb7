"""Layers of real models: their operators, and regions that make their saved tensors again."""

import functools
import re
from dataclasses import replace

import pytest
import torch

from memo_compile.analysis.regions import RegionGraph
from memo_compile.analysis.row_rules import RowDim
from memo_compile.analysis.rows import attention_rows
from memo_compile.analysis.structure import op_name
from memo_compile.analysis.views import storage_of
from memo_compile.driver import recompute_regions
from memo_compile.errors import UnsupportedGraph
from memo_compile.lowering import aten
from memo_compile.lowering.aten import estimate
from memo_compile.passes.own_outputs import OwnOutputs
from memo_compile.passes.recompute import ClassGraph, layer_ops, recompute_graph
from memo_compile.passes.runner import graph_text
from memo_compile.step.movable import RecomputeKey, RegionInput
from memo_compile.step.problem import ALIGNMENT_BYTES, Storage
from memo_compile.torch_private import fx_graphs
from tests import models
from tests.numerics.training import in_ci
from tests.steps.layer_regions import (
    layer_region,
    outputs_of,
    real_inputs,
    region_of,
    run_region,
)


def slots(region: RegionGraph) -> dict[int, int]:
    """Every output is a slot: slot 0 is the input, output i is slot i + 1. Slot -> output."""
    return {index + 1: index for index in range(len(outputs_of(region)))}


def layer(region: RegionGraph, rows, num_rows: int) -> ClassGraph:
    return ClassGraph(
        region=region,
        slot_of_output={output: slot for slot, output in slots(region).items()},
        slot_of_input={0: 0},
        num_rows=num_rows,
        row_seeds=rows or {},
    )


def key(*made: int, rows: int | None = None) -> RecomputeKey:
    return RecomputeKey(class_key="layer0_fwd", slots=made, rows=rows)


def recomputed(region: RegionGraph, wanted: RecomputeKey, rows=None, num_rows: int = 1):
    return recompute_graph(layer(region, rows, num_rows), wanted)


def ops_of(region: RegionGraph, rows=None, num_rows: int = 1):
    return layer_ops(layer(region, rows, num_rows), lambda node: 1.0)


def slot_named(region: RegionGraph, name: str) -> int:
    return next(s for s, at in slots(region).items() if outputs_of(region)[at].name == name)


def attention_slots(region: RegionGraph) -> list[int]:
    outputs = outputs_of(region)
    found = []
    for slot, at in slots(region).items():
        root = storage_of(outputs[at])
        if any("attention" in op_name(node) for node in root.all_input_nodes):
            found.append(slot)
    return found


def check_same_numbers(region: RegionGraph, wanted: RecomputeKey, seeds=None, num_rows=1, **close):
    """Running the recompute region on what the forward had and made gives what it made."""
    graph, sources = recomputed(region, wanted, seeds, num_rows)
    inputs = real_inputs(region)
    made = run_region(aten.lower(region), inputs)
    by_slot = {0: inputs[0], **{slot: made[at] for slot, at in slots(region).items()}}
    given = [
        inputs[source.forward_input] if source.slot is None else by_slot[source.slot]
        for source in sources
    ]
    read = [
        value.as_strided(fake.shape, fake.stride(), value.storage_offset())
        for value, fake in zip(given, graph.example_inputs(), strict=True)
    ]
    results = run_region(aten.lower(graph), read)
    assert len(results) == len(wanted.slots)
    for slot, result in zip(wanted.slots, results, strict=True):
        expected = by_slot[slot]
        if wanted.rows is not None:
            assert result.numel() * num_rows == expected.numel() * wanted.rows
            expected = expected.flatten()[: result.numel()].view(result.shape)
        else:
            assert result.stride() == expected.stride()
        if close:
            torch.testing.assert_close(result, expected, **close)
        else:
            assert torch.equal(result, expected)


REGIONS = {
    "llama": lambda: layer_region(models.llama),
    "gpt2": lambda: layer_region(models.gpt2, dropout=0.1),
    "bert": lambda: layer_region(models.bert),
}


@pytest.mark.parametrize("name", in_ci(REGIONS, "gpt2"))
def test_every_single_slot_comes_out_the_same(name):
    region = REGIONS[name]()
    for slot in slots(region):
        check_same_numbers(region, key(slot))


@pytest.mark.parametrize("name", in_ci(REGIONS, "llama", "gpt2"))
@pytest.mark.parametrize("picked", [slice(None), slice(None, None, 2), slice(1, None, 3)])
def test_sets_of_slots_come_out_the_same(name, picked):
    region = REGIONS[name]()
    check_same_numbers(region, key(*list(slots(region))[picked]))


def test_slots_on_the_way_are_made_and_not_kept():
    region = REGIONS["llama"]()
    *others, last = slots(region)
    wanted = replace(key(last), passing=tuple(others))
    _, sources = recomputed(region, wanted)
    assert not {source.slot for source in sources} & {*others}
    assert {source.slot for source in recomputed(region, key(last))[1]} & {*others}
    check_same_numbers(region, wanted)


def first_input_rows(region: RegionGraph, dim: int):
    return {region.gm.graph.find_nodes(op="placeholder")[0]: RowDim(dim=dim, factor=1)}


CLOSE = {"rtol": 1e-5, "atol": 1e-5}
"""Matrix products of fewer rows may add in another order."""


@pytest.mark.parametrize("builder", [models.llama, functools.partial(models.gpt2, dropout=0.0)])
def test_one_of_two_sequences_comes_out_the_same(builder):
    """Sequences are the rows; attention keeps them apart."""
    region = layer_region(builder)
    seeds = first_input_rows(region, 0)
    check_same_numbers(region, key(*slots(region), rows=1), seeds, 2, **CLOSE)


@pytest.mark.full
def test_half_of_the_tokens_come_out_the_same():
    """One sequence: its tokens are the rows, up to attention."""
    region = layer_region(models.llama, batch=1)
    seeds = first_input_rows(region, 1)
    names = [outputs_of(region)[at].name for at in slots(region).values()]
    early = [slot_named(region, name) for name in names[:2]]
    check_same_numbers(region, key(*early, rows=16), seeds, 32, **CLOSE)


def test_tokens_after_attention_start_from_its_kept_result():
    """The result of attention is a slot that carries rows of its own."""
    region = layer_region(models.llama, batch=1)
    seeds = {
        **first_input_rows(region, 1),
        **attention_rows(region.gm, first_input_rows(region, 1), 32),
    }
    late = [slot for slot in slots(region) if slot > max(attention_slots(region))]
    check_same_numbers(region, key(*late, rows=16), seeds, 32, **CLOSE)
    with pytest.raises(UnsupportedGraph, match=r"attention.* mixes rows"):
        recomputed(region, key(*attention_slots(region), rows=16), seeds, 32)
    ops = {op.name: op for op in ops_of(region, seeds, 32)}
    assert ops["mm_5"].row_wise
    assert not any(op.row_wise for name, op in ops.items() if "attention" in name)


def test_tokens_that_attention_mixes_are_refused():
    region = layer_region(models.llama, batch=1)
    seeds = {region.gm.graph.find_nodes(op="placeholder")[0]: RowDim(dim=1, factor=1)}
    with pytest.raises(UnsupportedGraph, match="mixes rows or has none: recompute all of it"):
        recomputed(region, key(attention_slots(region)[0], rows=16), seeds, 32)


def small_layer(x, w, v):
    """As in the docstring of ``recompute_graph``: slots 1 and 2 are ``a`` and ``c``."""
    a = x @ w
    c = a.relu() @ w
    return a, c, c @ v + x


def small_norm(x, scale, w):
    mean = x.mean(-1, keepdim=True)
    normed = (x - mean) * scale
    return mean, normed.view(2, 4, 8), (normed @ w).relu()


@pytest.mark.parametrize(
    ("name", "function", "wanted"),
    [
        ("recompute_product", small_layer, key(2)),
        ("recompute_norm", small_norm, key(2)),
        ("recompute_all", small_norm, key(1, 2, 3)),
    ],
)
def test_text_of_the_region(golden, name, function, wanted):
    graph, sources = recomputed(region_of(function, (8, 8), (8, 8), (8, 8)), wanted)
    lines = [f"{graph.name}"]
    for index, origin in enumerate(sources):
        source = (
            f"forward input {origin.forward_input}"
            if origin.slot is None
            else f"slot {origin.slot}"
        )
        lines.append(f"in_{index}: {source}")
    golden(name, "\n".join([*lines, graph_text(graph.gm)]))


def test_the_region_is_ready_to_be_lowered():
    region = REGIONS["llama"]()
    graph, sources = recomputed(region, replace(key(2), class_key="layer0_fwd#2"))
    assert re.fullmatch(r"\w+", graph.name)
    assert graph.name == "layer0_fwd_2_recompute_2"
    assert graph.is_backward
    assert not graph.external_outputs
    assert RegionInput(slot=0) in sources
    assert [sources[at].forward_input for at in graph.static_inputs] == [1]


def test_an_input_slot_cannot_be_made():
    with pytest.raises(UnsupportedGraph, match="slot 0 is no output of layer0_fwd"):
        recomputed(REGIONS["llama"](), key(0, 1))


def dropout(x):
    a = torch.ops.aten.native_dropout.default(x, 0.5, True)[0]
    return a, a.sin()


def collective(x):
    a = torch.ops._c10d_functional.all_reduce.default(x, "sum", "0")
    return a, torch.ops._c10d_functional.wait_tensor.default(a).sin()


def write(x):
    a = x.sin()
    b = a.cos()
    x.add_(1.0)
    return b, b.exp()


def write_by_keyword(x):
    a = x.sin()
    torch.add(x, 1.0, out=a)
    return a, a.exp()


@pytest.fixture
def custom():
    with torch.library._scoped_library("recompute_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        yield lambda x: (torch.ops.recompute_test.twice(x), x.sin())


REFUSALS = {
    dropout: r"native_dropout.* may not be recomputed: it draws random numbers",
    collective: r"all_reduce.* may not be recomputed: it communicates with other ranks",
    write_by_keyword: r"may not be recomputed: .* is overwritten before the backward",
    write: r"may not be recomputed: x_1 is overwritten before the backward",
}


@pytest.mark.parametrize("function", REFUSALS)
def test_what_must_not_run_twice_is_refused(function):
    region = region_of(function, (8, 8))
    with pytest.raises(UnsupportedGraph, match=REFUSALS[function]):
        recomputed(region, key(1))
    first = next(op for op in ops_of(region) if op.slot == 1)
    used = [first, *(ops_of(region)[index] for index in first.inputs)]
    assert not all(op.can_recompute for op in used)


def test_a_custom_operator_is_refused(custom):
    region = region_of(custom, (8, 8))
    with pytest.raises(
        UnsupportedGraph, match=r"twice.* may not be recomputed: its effects are unkn"
    ):
        recomputed(region, key(1))
    recomputed(region, key(2))
    assert [op.can_recompute for op in ops_of(region)] == [False, False, True]


def test_what_is_kept_cuts_off_what_may_not_run_again():
    region = region_of(dropout, (8, 8))
    graph, sources = recomputed(region, key(2))
    assert sources == (RegionInput(slot=1),)
    assert [node.op for node in graph.gm.graph.nodes] == ["placeholder", "call_function", "output"]


def test_a_buffer_that_a_kernel_fills_is_no_constant():
    """After ``OwnOutputs`` attention writes into empty buffers; they must not be made again."""
    region = copied(REGIONS["llama"]())
    OwnOutputs(external_outputs=region.external_outputs)(region.gm)
    slot = attention_slots(REGIONS["llama"]())[0]
    with pytest.raises(UnsupportedGraph, match="is overwritten before the backward"):
        recomputed(region, key(slot))
    assert not next(op for op in ops_of(region) if op.slot == slot).can_recompute


def copied(region: RegionGraph) -> RegionGraph:
    return replace(region, gm=fx_graphs.copied(region.gm))


@pytest.mark.parametrize("name", in_ci(REGIONS, "llama", "gpt2"))
def test_operators_are_in_an_order_that_can_run(name):
    region = REGIONS[name]()
    ops = ops_of(region)
    assert (ops[0].slot, ops[0].seconds, ops[0].can_recompute) == (0, 0.0, False)
    for index, op in enumerate(ops):
        assert all(source < index for source in op.inputs)
    assert sorted(op.slot for op in ops if op.slot is not None) == [0, *slots(region)]
    assert not any(op.row_wise for op in ops)


def test_views_are_no_operators_and_results_of_one_kernel_cost_it_once():
    region = REGIONS["llama"]()
    ops = {op.name: op for op in ops_of(region)}
    assert not any(name.startswith(("view", "permute", "slice", "expand")) for name in ops)
    kernel = next(index for index, name in enumerate(ops) if "attention" in name)
    results = [op for op in ops.values() if op.inputs == (kernel,)]
    assert {op.slot for op in results} >= set(attention_slots(region))
    assert [op.seconds for op in results] == [0.0] * len(results)
    assert sum("attention" in name for name in ops) == 1
    assert ops["mm_1"].inputs == (list(ops).index("mul_4"),)


def test_a_view_that_is_a_slot_is_an_operator():
    region = region_of(lambda x: (x.sin()[:4], x.cos()), (8, 8))
    ops = ops_of(region)
    assert [(op.slot, op.seconds) for op in ops] == [
        (0, 0.0),
        (None, 1.0),
        (1, 0.0),
        (2, 1.0),
    ]
    assert ops[2].inputs == (1,)


def test_row_wise_operators_of_tokens_and_of_sequences():
    tokens = layer_region(models.llama, batch=1)
    seeds = {tokens.gm.graph.find_nodes(op="placeholder")[0]: RowDim(dim=1, factor=1)}
    ops = {op.name: op for op in ops_of(tokens, seeds, 32)}
    assert ops["mm_1"].row_wise
    assert not any(op.row_wise for name, op in ops.items() if "attention" in name)
    assert not ops["mm_5"].row_wise
    sequences = REGIONS["llama"]()
    seeds = {sequences.gm.graph.find_nodes(op="placeholder")[0]: RowDim(dim=0, factor=1)}
    assert all(op.row_wise for op in ops_of(sequences, seeds, 2))


@pytest.mark.parametrize("name", in_ci(REGIONS, "llama", "gpt2"))
def test_estimates_hold_all_that_is_computed(name):
    region = REGIONS[name]()
    graph, sources = recomputed(region, key(*slots(region)))
    profile = estimate(graph)
    assert len(profile.input_ends) == len(sources)
    assert [output.storage for output in profile.outputs] == [Storage.ARENA] * len(slots(region))
    assert len({output.index for output in profile.outputs}) == len(slots(region))
    for output in profile.outputs:
        assert profile.buffers[output.index].end == profile.num_lines
    outputs = [outputs_of(region)[at].meta["val"] for at in slots(region).values()]
    for value, output in zip(outputs, profile.outputs, strict=True):
        size = profile.buffers[output.index].size_bytes
        assert 0 <= size - value.numel() * value.element_size() < ALIGNMENT_BYTES
    assert len(profile.buffers) > len(slots(region))


def test_what_stays_in_registers_takes_no_memory():
    def gated(x, weight):
        wide = x @ weight
        return (wide * torch.sigmoid(wide).exp(),)

    region = region_of(gated, (64, 32), (32, 128))
    wide, *_, product = estimate(region).buffers
    alone = estimate(region, recompute_regions.in_registers)
    assert [buffer.name for buffer in alone.buffers] == [wide.name, product.name]
    # The product's kernel makes the sigmoid anew from the wide value, which lives until then.
    assert alone.buffers[0].end == product.start + 1 > wide.start + 1
    assert alone.outputs[0].index == 1
