"""Which values of a region are rounded where the graph says, and that nothing reads them before."""

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from memo_compile import shim
from memo_compile.passes.round_values import RoundValues

aten = torch.ops.aten


def rounded(function, *inputs: torch.Tensor) -> fx.GraphModule:
    gm = make_fx(function)(*inputs)
    result = RoundValues()(gm)
    assert result.modified == any(node.meta.get(shim.ROUNDED) for node in gm.graph.nodes)
    gm.graph.lint()
    gm.recompile()
    for made, eager in zip(gm(*inputs), function(*inputs), strict=True):
        assert torch.equal(made, eager)
    return gm


def targets(gm: fx.GraphModule) -> list[object]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def test_all_readers_of_a_conversion_read_it_rounded():
    convert = torch.ops.prims.convert_element_type.default

    def function(x, y):
        low = convert(x, torch.bfloat16)
        return low, low * y, low + 1, convert(low, torch.float32)

    gm = rounded(function, torch.randn(4, 4), torch.randn(4, 4).bfloat16())
    first, once = list(gm.graph.nodes)[2:4]
    assert (first.target, once.target, once.args) == (convert, aten.mul.Tensor, (first, 1.0))
    assert list(first.users) == [once]
    assert len(once.users) == 4
    assert all(node.meta[shim.ROUNDED] for node in gm.graph.nodes if node.op == "call_function")


def test_sums_are_rounded_before_they_are_read():
    gm = rounded(lambda x: (x.sum(0) + 2, x.mean(1) + 1), torch.randn(4, 4).half())
    assert targets(gm).count(aten.mul.Tensor) == 2


def test_what_nothing_reads_is_left_alone():
    convert = torch.ops.prims.convert_element_type.default
    gm = rounded(lambda x: (convert(x, torch.bfloat16),), torch.randn(4, 4))
    assert targets(gm) == [convert]


def test_nothing_changes_in_a_region_of_float32():
    gm = rounded(lambda x: (x.sum(0) + 2, x.long().float()), torch.randn(4, 4))
    assert aten.mul.Tensor not in targets(gm)
    assert not any(shim.ROUNDED in node.meta for node in gm.graph.nodes)
