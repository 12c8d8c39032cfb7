"""Numbers as functions of a length, and what torch assumes of a length that is a symbol."""

import pytest
import torch
from torch import fx

from memo_compile.errors import UnsupportedGraph
from memo_compile.lowering.varying_sizes import Formula, _changed, formula, written
from memo_compile.shim_symbols import SizeSymbol


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
    assert _changed(before, now) == position


def test_what_torch_assumes_of_a_length_is_asked_of_another():
    symbol = SizeSymbol(24)
    assert all(symbol.admits(n) for n in (2, 3, 37, 4096))
    assert not symbol.admits(1)  # which broadcasts
    with symbol.mode:
        value = torch.empty(2, symbol.value, 16)
    assert symbol.number(value.stride(0), 5) == 80
    if value.shape[1] % 8 == 0:  # a guard
        pass
    assert [symbol.admits(n) for n in (32, 37)] == [True, False] or not symbol.is_free()
    if value.shape[1] > 16:
        pass
    assert not symbol.admits(8)


def test_a_length_that_torch_takes_for_a_constant_is_admitted_nowhere():
    symbol = SizeSymbol(24)
    with symbol.mode:
        value = torch.empty(symbol.value) + torch.empty(24)
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
