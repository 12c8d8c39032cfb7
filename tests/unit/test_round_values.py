"""Which values of a region are rounded where the graph says, and that each is so once."""

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from memo_compile.config import MemoConfig
from memo_compile.passes.round_values import RoundValues
from memo_compile.torch_private import inductor_api

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default


def rounded(function, *inputs: torch.Tensor) -> fx.GraphModule:
    gm = make_fx(function)(*inputs)
    result = RoundValues()(gm)
    assert result.modified == any(node.meta.get(inductor_api.ROUNDED) for node in gm.graph.nodes)
    gm.graph.lint()
    gm.recompile()
    for made, eager in zip(gm(*inputs), function(*inputs), strict=True):
        assert torch.equal(made, eager)
    return gm


def targets(gm: fx.GraphModule) -> list[object]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def marked(gm: fx.GraphModule) -> list[object]:
    return [node.target for node in gm.graph.nodes if inductor_api.ROUNDED in node.meta]


def low(*size: int) -> torch.Tensor:
    return torch.randn(size or (4, 4)).bfloat16()


def test_all_readers_of_a_conversion_read_it_rounded():
    def function(x, y):
        low = convert(x, torch.bfloat16)
        return low, low * y, low + 1, convert(low, torch.float32)

    gm = rounded(function, torch.randn(4, 4), low())
    first, once = list(gm.graph.nodes)[2:4]
    assert (first.target, once.target, once.args) == (convert, aten.mul.Tensor, (first, 1.0))
    assert list(first.users) == [once]
    assert len(once.users) == 4
    assert marked(gm) == [aten.mul.Tensor]


def test_in_a_chain_every_second_operator_rounds_what_it_reads_and_makes():
    gm = rounded(lambda x: (x.neg().tanh().sin().cos(),), low())
    assert marked(gm) == [aten.tanh.default, aten.cos.default]


def test_what_has_two_readers_is_rounded_where_it_is_made():
    gm = rounded(lambda x, y: ((x + y).tanh(), (x + y) * (x - y)), low(), low())
    assert aten.add.Tensor not in marked(gm)  # two sums, each with one reader
    gm = rounded(lambda x, y: (lambda both: (both.tanh(), both * y))(x + y), low(), low())
    assert marked(gm) == [aten.add.Tensor]


def test_a_view_between_two_operators_hides_nothing():
    gm = rounded(lambda x: (x.neg().view(2, 8).t().tanh(),), low())
    assert marked(gm) == [aten.tanh.default]


@pytest.mark.parametrize(
    "reader", [lambda x: x.sum(0), lambda x: torch.cat([x, x]), lambda x: convert(x, torch.float32)]
)
def test_before_a_reader_that_rounds_nothing(reader):
    gm = rounded(lambda x: (reader(x.neg()),), low())
    assert marked(gm) == [aten.neg.default]


def test_powers_are_rounded_around():
    """Inductor makes a power of a number by its own, and rounds nothing for it."""
    gm = rounded(lambda x: (convert(x.neg().pow(2), torch.float32), x.cos().pow(2).tanh()), low())
    assert marked(gm) == [aten.neg.default, aten.mul.Tensor, aten.cos.default, aten.tanh.default]


def test_what_is_read_from_memory_is_rounded_there():
    gm = rounded(
        lambda x, y: (torch.mm(x.neg(), y), convert(x.float(), torch.float16)), low(), low()
    )
    assert not marked(gm)


def test_sums_are_rounded_before_they_are_read():
    gm = rounded(lambda x: (lambda total: (total + 2, total.tanh()))(x.sum(0)), low())
    assert marked(gm) == [aten.mul.Tensor]
    assert targets(gm).count(aten.mul.Tensor) == 1


def test_gradients_are_left_alone():
    gm = make_fx(lambda x: (x.neg().sum(0),))(low())
    for node in gm.graph.nodes:
        node.meta["partitioner_tag"] = "is_backward"
    assert not RoundValues()(gm).modified


def test_nothing_changes_in_a_region_of_float32():
    gm = rounded(lambda x: (x.sum(0) + 2, x.long().float()), torch.randn(4, 4))
    assert not marked(gm)


@pytest.mark.parametrize(
    ("options", "recomputes"),
    [
        ({}, False),
        ({"policy": "save"}, False),
        ({"policy": "memo"}, True),
        ({"memory_budget": 1}, True),
        ({"token_tiles": 4}, True),
    ],
)
def test_where_nothing_is_computed_again_nothing_is_rounded(options, recomputes):
    assert MemoConfig(**options).recomputes == recomputes
