"""Numbers as functions of a length, and what torch assumes of a length that is a symbol."""

import dataclasses

import pytest
import torch
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from memo_compile.analysis.regions import LoweredRegion, RegionGraph
from memo_compile.errors import UnsupportedGraph
from memo_compile.lowering import inductor
from memo_compile.lowering.varying_sizes import (
    Formula,
    VaryingCounts,
    VaryingRegions,
    _changed_size,
    formula,
    varying,
    written,
)
from memo_compile.step.problem import Storage, align
from memo_compile.torch_private import fx_graphs, kernels
from memo_compile.torch_private.symbols import SizeSymbols


@pytest.mark.parametrize(
    "of",
    [
        Formula(constant=7),
        Formula(scale=1),
        Formula(scale=48),
        Formula(scale=2, constant=-2),
        Formula(square=1),
        Formula(square=8),
    ],
)
def test_two_lengths_tell_a_number_s_formula(of):
    found = formula(of.at(37), of.at(41), (37, 41))
    assert found == of
    assert [found.at(n) for n in (2, 64)] == [of.at(n) for n in (2, 64)]


def test_a_number_that_is_no_whole_multiple_has_no_formula():
    assert formula(10, 13, (20, 27)) is None


@pytest.mark.parametrize(
    ("before", "now", "position"),
    [
        ((6, 2), (9, 2), 0),
        ((6, 2, 6), (9, 2, 9), 0),
        ((2, 6), (2, 9), 1),
        ((6, 6, 12), (9, 9, 18), 0),  # the last is where a view begins
        ((6, 2), (9, 3), None),
        ((6, 0.5), (6, 0.25), None),
        ((6,), (6,), None),
        ((1,), (6,), None),
    ],
)
def test_one_number_may_change(before, now, position):
    assert _changed_size(before, now) == position


def test_what_torch_assumes_of_a_length_is_asked_of_another():
    symbol = SizeSymbols([24])
    assert all(symbol.admits(n) for n in (2, 3, 37, 4096))
    assert not symbol.admits(1)  # which broadcasts
    with symbol.mode:
        value = torch.empty(2, symbol.values[0], 16)
    assert symbol.at((5,))(value.stride(0)) == 80
    if value.shape[1] % 8 == 0:  # a guard
        pass
    assert [symbol.admits(n) for n in (32, 37)] == [True, False] or not symbol.is_free()
    if value.shape[1] > 16:
        pass
    assert not symbol.admits(8)


def test_a_length_that_torch_takes_for_a_constant_is_admitted_nowhere():
    symbol = SizeSymbols([24])
    with symbol.mode:
        value = torch.empty(symbol.values[0]) + torch.empty(24)
    assert value.shape == (24,)
    assert not symbol.admits(24)
    assert not symbol.admits(32)


def graph_of(size, *, offset=0):
    graph = fx.Graph()
    given = graph.placeholder("x")
    given.meta["val"] = torch.empty(size * 4 + offset)[offset:]
    shown = graph.call_function(torch.ops.aten.view.default, (given, [size, 4]))
    shown.meta["val"] = torch.empty(size, 4)
    graph.output((shown,))
    return fx.GraphModule({}, graph)


def test_a_graph_is_a_text_and_its_numbers():
    first, second = written(graph_of(3)), written(graph_of(5))
    assert first.text == second.text
    assert (first.arguments, second.arguments) == ((3, 4), (5, 4))
    assert second.layouts == (20, 1, 5, 4, 4, 1)
    assert written(graph_of(3, offset=1)).text != first.text  # not aligned
    assert written(graph_of(3, offset=4)).text == first.text


def test_what_counts_from_the_start_of_memory_has_no_symbolic_code():
    gm = graph_of(3)
    (shown,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default)
    shown.target, shown.args = torch.ops.aten.as_strided.default, (*shown.args, [4, 1])
    with pytest.raises(UnsupportedGraph, match="start of its input's memory"):
        written(gm)


def region_of(n: int, *, width: int = 8, rows: int = 2, mixes: bool = False) -> RegionGraph:
    """Products, a softmax over scores of ``n x n``, a sum, and one token less."""

    def run(x, weight):
        flat = torch.relu(x.view(rows * n, width) @ weight)
        y = flat.view(rows, n, width)
        scores = (y @ x.transpose(1, 2)).softmax(-1)
        last = y[:, : n - 1] * (2 if mixes else 3)
        return flat, scores @ y, last.reshape(rows * (n - 1), width), y.sum(1)

    x, weight = torch.empty(rows, n, width), torch.empty(width, width)
    traced = make_fx(run, tracing_mode="fake", decomposition_table=select_decomp_table())
    gm = traced(x, weight)
    (output,) = gm.graph.find_nodes(op="output")
    output.args = (tuple(output.args[0]),)
    return RegionGraph(
        name=f"region{n}",
        gm=gm,
        external_outputs=frozenset({1}),
        static_inputs=(1,),
        is_backward=False,
        device=torch.device("cpu"),
    )


def lowered_by(regions: VaryingRegions, region: RegionGraph, *numbers: int) -> LoweredRegion:
    copied = dataclasses.replace(region, gm=fx_graphs.copied(region.gm))
    with varying(regions, numbers), inductor.session({}), kernels.without_kernels():
        return regions.lower(
            region,
            poison=True,
            alone=lambda: inductor.lower(copied),
            at_others=lambda sizes: sizes.graph(region.gm),
        )


def test_code_with_a_symbol_has_the_buffers_of_each_length():
    regions = VaryingRegions()
    lowered_by(regions, region_of(6), 6)
    lowered_by(regions, region_of(9), 9)
    assert regions.counts == VaryingCounts(alone=1, symbolic=1)
    for n in (3, 7, 8, 16, 37):
        region = region_of(n)
        made = region.output_layouts()
        found = lowered_by(regions, region, n)
        assert regions.counts.alone + regions.counts.symbolic == 2
        profile = found.profile
        assert len(profile.input_ends) == 2
        for output, layout in zip(profile.outputs, made, strict=True):
            num_bytes = layout.end * layout.item_bytes
            if output.storage is Storage.ARENA:
                assert profile.buffers[output.index].size_bytes == align(num_bytes)
            else:
                assert output.size_bytes == align(num_bytes)
        for view, buffer in zip(found.views, profile.buffers, strict=True):
            last = sum((size - 1) * step for size, step in zip(view.size, view.stride, strict=True))
            assert align((last + 1) * view.dtype.itemsize) == buffer.size_bytes


def test_code_is_used_for_nothing_but_its_own_graph():
    regions = VaryingRegions()
    lowered_by(regions, region_of(6), 6)
    lowered_by(regions, region_of(9), 9)
    for other in (
        region_of(12, width=16),
        region_of(12, rows=3),
        region_of(12, mixes=True),
        dataclasses.replace(region_of(12), external_outputs=frozenset()),
        dataclasses.replace(region_of(12), is_backward=True),
        region_of(14),  # the graph says 12
        region_of(1),
    ):
        before = regions.counts.reused
        lowered_by(regions, other, 12)
        assert regions.counts.reused == before
    lowered_by(regions, region_of(12), 12)
    assert regions.counts.reused == 1


def test_code_is_not_used_where_what_torch_assumed_does_not_hold(monkeypatch):
    regions = VaryingRegions()
    lowered_by(regions, region_of(6), 6)
    lowered_by(regions, region_of(8), 8)
    (code,) = next(iter(regions._codes.values()))
    assert bool(code.symbol.values[0] % 8 == 0)  # as a kernel for aligned rows would ask
    lowered_by(regions, region_of(9), 9)
    assert regions.counts == VaryingCounts(alone=1, symbolic=2)
    lowered_by(regions, region_of(11), 11)
    assert regions.counts.reused == 1
