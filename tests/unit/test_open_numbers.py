"""Integers that stay open: operators read them from tensors, while the step runs."""

import pytest
import torch
from memo_runtime.open_numbers import as_number, as_tensor, reading
from memo_runtime.ops import into
from torch import fx
from torch._subclasses import FakeTensorMode

from memo_compile.errors import UnsupportedGraph
from memo_compile.passes.numbers import ReadOpenNumbers

_library = torch.library.Library("memo_tests_open", "DEF")


def _defined(name: str, arguments: str, run) -> torch._ops.OpOverload:
    _library.define(f"{name}({arguments}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"memo_tests_open::{name}", run, lib=_library)
    return getattr(torch.ops.memo_tests_open, name).default


def _scaled(x, first, second=3, *, third=5):
    assert {type(number) for number in (first, second, third)} == {int}
    return x * first * second * third


scaled = _defined("scaled", "Tensor x, SymInt first, SymInt second=3, *, SymInt third=5", _scaled)
listed = _defined("listed", "Tensor x, SymInt[] numbers", lambda x, numbers: x * sum(numbers))
plain = _defined("plain", "Tensor x, int number", torch.mul)
X = torch.arange(4.0)


@pytest.mark.parametrize("number", [0, 1, 7, -3, 2**40])
def test_a_number_comes_back(number):
    assert as_number(as_tensor(number)) == number
    assert as_number(number) == number


def test_zeros_stand_for_one():
    assert as_number(torch.zeros(1, dtype=torch.int64)) == 1


def test_an_operator_reads_some_of_its_numbers():
    reader = reading(scaled, ("second", "third"))
    assert reader is reading(scaled, ("second", "third"))
    assert torch.equal(reader(X, 2, as_tensor(11), third=as_tensor(13)), X * 2 * 11 * 13)
    assert torch.equal(torch.ops.memo_tests_open.scaled(X, 2), X * 2 * 3 * 5)
    assert (reader._schema.name, reader.namespace) == (scaled._schema.name, scaled.namespace)
    assert torch.Tag.pt2_compliant_tag in reader.tags
    assert str(reader._schema.arguments[1].type) in ("int", "SymInt")
    with FakeTensorMode() as mode:
        made = reader(mode.from_tensor(X), 2, mode.from_tensor(as_tensor(7)), third=as_tensor(1))
    assert made.shape == X.shape


def test_its_result_lies_where_it_is_to():
    out = torch.empty(4)
    into(reading(scaled, ("first",)))(out, X, as_tensor(4), 3, 5)
    assert torch.equal(out, X * 60)


@pytest.mark.parametrize(("operator", "name"), [(plain, "number"), (listed, "numbers")])
def test_other_arguments_are_refused(operator, name):
    with pytest.raises(ValueError, match=f"{name} of .* is no plain integer"):
        reading(operator, (name,))


def _graph(call) -> tuple[fx.GraphModule, fx.Node]:
    """A graph that reads a number, and the node that ``call`` makes of graph, x and number."""
    graph = fx.Graph()
    x, given = graph.placeholder("x"), graph.placeholder("n")
    item = graph.call_function(torch.ops.aten._local_scalar_dense.default, (given,))
    reader = call(graph, x, item)
    graph.output((reader,))
    return fx.GraphModule({}, graph), reader


def test_numbers_in_a_graph_are_read_by_operators():
    gm, reader = _graph(lambda graph, x, n: graph.call_function(scaled, (x, 2), {"third": n}))
    result = ReadOpenNumbers(positions=(1,))(gm)
    assert result.modified
    assert reader.target is reading(scaled, ("third",))
    gm.recompile()
    assert torch.equal(gm(X, as_tensor(7))[0], X * 2 * 3 * 7)


REFUSED = {
    "of torch": lambda graph, x, n: graph.call_function(torch.ops.aten.mul.Tensor, (x, n)),
    "in a list": lambda graph, x, n: graph.call_function(listed, (x, [n, 2])),
    "an int": lambda graph, x, n: graph.call_function(plain, (x, n)),
    "a result": lambda graph, x, n: n,
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_needs_the_number_is_refused(call):
    gm, _ = _graph(call)
    with pytest.raises((UnsupportedGraph, ValueError), match="integer"):
        ReadOpenNumbers(positions=(1,))(gm)
