"""Views, equal computations, out= overloads and the cut, on graphs of a few nodes."""

import operator
from types import SimpleNamespace

import pytest
import torch
from memo_runtime.current import current
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from memo_compile.analysis.joint_units import UNIT
from memo_compile.analysis.regions import RegionGraph
from memo_compile.analysis.views import is_movable_view, is_view, storage_of
from memo_compile.backends.capture import _require_known
from memo_compile.errors import UnsupportedGraph
from memo_compile.lowering import aten
from memo_compile.passes.accumulate import AccumulateInPlace
from memo_compile.passes.cse import MergeCommonSubexpressions
from memo_compile.passes.cut import CutRequest, cut
from memo_compile.passes.runner import graph_text
from memo_compile.passes.separate import SeparateResults
from memo_compile.step.problem import Phase, Storage

CPU = torch.device("cpu")
OF_RESULT = {"dtype", "layout", "device", "pin_memory", "memory_format"}


def traced(function, *shapes) -> fx.GraphModule:
    """``function`` as a graph of aten operators on float32 fakes, returning a tuple."""
    with FakeTensorMode():
        return make_fx(function)(*(torch.empty(shape) for shape in shapes))


def node_of(gm: fx.GraphModule, part: str) -> fx.Node:
    (found,) = [n for n in gm.graph.nodes if n.op == "call_function" and part in str(n.target)]
    return found


def region_of(gm: fx.GraphModule, external=(), **settings) -> RegionGraph:
    return RegionGraph(
        name="r",
        gm=gm,
        external_outputs=frozenset(external),
        static_inputs=(),
        is_backward=False,
        device=CPU,
        **settings,
    )


@pytest.mark.parametrize(
    ("make", "part", "view", "movable"),
    [
        (lambda x: (x.cos().t(),), "aten.t", True, True),
        (lambda x: (x.cos().view(8),), "aten.view", True, True),
        (lambda x: (x.cos()[1:],), "aten.slice", True, False),
        (lambda x: (x.cos()[:, None].expand(4, 3, 2),), "aten.expand", True, True),
        (lambda x: (x.cos() + 1,), "aten.add", False, False),
        (lambda x: (torch.ops.aten._unsafe_view(x.cos(), [8]),), "_unsafe_view", True, True),
        (lambda x: (x.cos().clone(),), "aten.clone", False, False),
    ],
)
def test_views(make, part, view, movable):
    node = node_of(traced(make, (4, 2)), part)
    assert is_view(node) == view
    assert is_movable_view(node) == movable
    owner = storage_of(node)
    assert ("cos" in str(owner.target)) == view


def test_a_number_that_is_looked_at_makes_a_tensor_of_its_own():
    """As the gradient of ``view_as_complex(x) * (1 + 2j)`` has it."""
    graph = fx.Graph()
    number = graph.call_function(torch.ops.aten._conj.default, (1 + 2j,))
    assert not is_view(number)
    assert storage_of(number) is number


def test_parts_of_a_split_are_views():
    gm = traced(lambda x: tuple(x.cos().split(2)), (4, 2))
    items = [node for node in gm.graph.nodes if node.target is operator.getitem]
    assert all("cos" in str(storage_of(node).target) for node in items)


def merged(function, *shapes) -> list[str]:
    gm = traced(function, *shapes)
    MergeCommonSubexpressions()(gm)
    gm.graph.lint()
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def test_equal_computations_become_one():
    assert merged(lambda x: (x.sin() + 1, x.sin() + 2), (4,)).count("aten.sin.default") == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (torch.rand_like(x), torch.rand_like(x)),
        lambda x: tuple(torch.ops.aten.native_dropout(x, 0.5, True)[0] for _ in range(2)),
        lambda x: (x * 1, x * 1.0, x * True),
        lambda x: (x.sum(0), x.sum(0, keepdim=True)),
        lambda x: (torch.zeros(4) + x, torch.ones(4) + x),
        lambda x: (x.sin(), x.sin()),
        lambda x: (x.sin(), x.sin() + 1),
        lambda x: (x.sin().view(2, 2), x.sin()[:2]),
        lambda x: (torch.var_mean(x, 0)[0], torch.var_mean(x, 0)[0]),
    ],
    ids=[
        *("random", "dropout", "int-float-bool", "keyword", "constants"),
        *("results", "a-result", "views-of-results", "parts-of-a-result"),
    ],
)
def test_different_computations_stay_apart(function):
    gm = traced(function, (4,))
    before = graph_text(gm)
    assert not MergeCommonSubexpressions()(gm).modified
    assert graph_text(gm) == before


def test_a_result_whose_type_torch_gets_wrong_is_refused():
    """As torch 2.11 does: a planned buffer of that type would hold half of every number."""

    def attention(x):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)

    with FakeTensorMode():
        gm = make_fx(attention)(torch.empty(1, 2, 8, 4, dtype=torch.float64))
    node = node_of(gm, "attention")
    out, lse = node.meta["val"]
    node.meta["val"] = (out, lse.double())
    _require_known(gm)
    node.meta["val"] = (out, lse.float())
    with pytest.raises(UnsupportedGraph, match=r"takes the log-sum-exp of torch.float64 for"):
        _require_known(gm)


@pytest.mark.parametrize(
    ("function", "own", "clones"),
    [
        (lambda x: (x.sin(), x.cos()), (0, 1), 0),
        (lambda x: _twice(x.sin()), (0, 1), 1),
        (lambda x: _twice(x.sin()), (1,), 1),
        (lambda x: _twice(x.sin()), (), 0),
        (lambda x: _viewed(x.sin()), (0, 1), 1),
        (lambda x: tuple(x.sin().split(2)), (0, 1), 0),
        (lambda x: tuple(x.sin().view(2, 2).unbind(1)), (0, 1), 1),
        (lambda x: (x.sin(), x.view(2, 2)), (0, 1), 1),
        (lambda x: (x.sin(), x), (0,), 0),
    ],
    ids=["new", "twice", "second", "neither", "view", "parts", "columns", "input", "given"],
)
def test_results_that_are_apart_share_no_memory(function, own, clones):
    gm = traced(function, (4,))
    result = SeparateResults(own_results=own)(gm)
    gm.recompile()
    targets = [node.target for node in gm.graph.nodes]
    assert targets.count(torch.ops.aten.clone.default) == clones
    assert result.modified == (clones > 0)
    x = torch.randn(4)
    for ours, theirs in zip(gm(x), function(x), strict=True):
        assert torch.equal(ours, theirs)


def test_a_separated_result_has_the_value_from_before_a_write():
    gm = traced(lambda x: (x.view(2, 2), x.mul_(2) + 1), (4,))
    SeparateResults(own_results=(0,))(gm)
    gm.recompile()
    x = torch.randn(4)
    before = x.clone()
    assert torch.equal(gm(x)[0].view(4), before)


def test_what_is_saved_for_the_backward_may_be_a_results_memory():
    gm = traced(lambda x: _viewed(x.exp()), (4,))
    assert not SeparateResults(own_results=(0,), num_results=1)(gm).modified
    assert SeparateResults(own_results=(0, 1))(gm).modified


def _twice(y):
    return y, y


def _viewed(y):
    return y, y.view(2, 2)


def accumulated(early, total) -> bool:
    """Whether ``total(x, part, late)`` is summed over ``part = early(x)`` of the layer before."""

    def both(x):
        part = early(x)
        return total(x, part, x.neg())  # the second layer begins with neg

    gm = traced(both, (4, 4))
    unit = 1
    for node in gm.graph.nodes:
        if node.op == "call_function":
            unit = 0 if "neg" in str(node.target) else unit
            node.meta |= {UNIT: unit, "partitioner_tag": "must_be_in_backward"}
    before = graph_text(gm)
    result = AccumulateInPlace(num_units=2)(gm)
    gm.graph.lint()
    assert result.modified == (graph_text(gm) != before)
    x = torch.randn(4, 4)
    assert all(map(torch.equal, gm(x), both(x)))
    return result.modified


@pytest.mark.parametrize(
    ("early", "total"),
    [
        (lambda x: x.exp(), lambda x, part, late: (part + late,)),
        (lambda x: x.exp(), lambda x, part, late: (late + part, late)),
        (lambda x: (x @ x).t(), lambda x, part, late: (part + late.t(),)),
    ],
    ids=["first", "second", "transposed"],
)
def test_a_sum_is_made_in_the_memory_of_its_early_part(early, total):
    assert accumulated(early, total)


@pytest.mark.parametrize(
    ("early", "total"),
    [
        (lambda x: x.exp(), lambda x, part, late: (part + late, part * 2)),
        (lambda x: x.exp(), lambda x, part, late: (part + late, part)),
        (lambda x: x.exp(), lambda x, part, late: (part + part,)),
        (lambda x: x.exp().expand(2, 4, 4), lambda x, part, late: (part + late,)),
        (lambda x: x.exp()[:1], lambda x, part, late: (part + late,)),
        (lambda x: x.exp().t(), lambda x, part, late: (late + part,)),
        (lambda x: x.exp().bfloat16(), lambda x, part, late: (part + late,)),
        (lambda x: x.t(), lambda x, part, late: (part + late,)),
        (lambda x: x.exp(), lambda x, part, late: (torch.add(part, late, alpha=2),)),
        (lambda x: x.exp(), lambda x, part, late: (late.cos() + late,)),
    ],
    ids=[
        *("read-twice", "returned", "doubled", "expanded", "smaller", "other-layout", "other-type"),
        *("input", "scaled", "same-layer"),
    ],
)
def test_other_sums_are_new_tensors(early, total):
    assert not accumulated(early, total)


def run_once(lowered, x: torch.Tensor):
    """The memory of its buffers, and its results."""
    views = [
        torch.empty(4096, dtype=view.dtype).as_strided(view.size, view.stride)
        for view in lowered.views
    ]
    current.views = views
    try:
        return views, lowered.run([x])
    finally:
        current.views = ()


@pytest.mark.parametrize(
    ("function", "direct"),
    [
        (lambda x: (x.cos() + 1,), True),
        (lambda x: (x @ x,), True),
        (lambda x: (torch.cat([x, x]),), True),
        (lambda x: (x.sum(0),), True),
        (lambda x: (torch.nn.functional.gelu(x),), True),
        (lambda x: (torch.div(x, 0.3, rounding_mode="floor"),), True),
        (lambda x: (torch.div(x, x.t(), rounding_mode="trunc"),), True),
        (lambda x: (torch.add(x, x, alpha=3),), True),
        (lambda x: (torch.var(x, 0, correction=2),), True),
        (lambda x: (torch.ops.aten.native_layer_norm(x, [4], None, None, 1e-5)[0],), False),
    ],
    ids=[
        *("add", "mm", "cat", "sum", "gelu", "div-floor", "div-trunc", "alpha", "correction"),
        "layer-norm",
    ],
)
def test_what_has_an_out_overload_writes_into_its_buffer(function, direct):
    """Otherwise the copy is counted as memory outside; either way the numbers are right."""
    region = region_of(traced(function, (4, 4)))
    lowered = aten.lower(region)
    assert (lowered.profile.outside == ()) == direct
    x = torch.randn(4, 4)
    views, results = run_once(lowered, x)
    for output, result, expected in zip(lowered.profile.outputs, results, function(x), strict=True):
        torch.testing.assert_close(result, expected)
        assert output.storage is Storage.ARENA
        assert result.data_ptr() == views[output.index].data_ptr()


def flipped(x: torch.Tensor) -> torch.Tensor:
    """Of an operator without an ``out=`` overload of its own."""
    return torch.flip(x, [0])


@pytest.mark.parametrize(
    ("function", "num_buffers"),
    [
        (lambda x: (flipped(flipped(x) @ x) @ x,), 2),
        (lambda x: (flipped(x) @ flipped(x.cos()),), 3),
        (lambda x: (flipped(x),), 1),
    ],
    ids=["one-by-one", "together", "result"],
)
def test_what_has_none_stays_outside_while_that_takes_no_more_than_copies(function, num_buffers):
    lowered = aten.lower(region_of(traced(function, (4, 4))))
    assert len(lowered.profile.buffers) == num_buffers
    outside = [0] * lowered.profile.num_lines
    for taken in lowered.profile.outside:
        for line in range(taken.start, taken.end):
            outside[line] += taken.size_bytes
    assert max(outside) == 512
    x = torch.randn(4, 4)
    torch.testing.assert_close(run_once(lowered, x)[1], list(function(x)))


@torch.library.custom_op("memo_tests::otherwise_laid", mutates_args=())
def otherwise_laid(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x.t()).copy_(x.t()).t()


@otherwise_laid.register_fake
def _(x):
    return torch.empty_like(x)


def test_what_stays_outside_lies_as_it_was_traced():
    laid = torch.ops.memo_tests.otherwise_laid
    lowered = aten.lower(region_of(traced(lambda x: (laid(x).view(2, 8) @ x.view(8, 2),), (4, 4))))
    assert len(lowered.profile.buffers) == 1
    x = torch.randn(4, 4)
    torch.testing.assert_close(run_once(lowered, x)[1], [x.view(2, 8) @ x.view(8, 2)])


def test_no_out_overload_loses_a_keyword():
    """All of torch's operators: what is written into a buffer must be what was asked for."""
    lost = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if not isinstance(packet, torch._ops.OpOverloadPacket):
            continue
        for target in (getattr(packet, overload) for overload in packet.overloads()):
            keywords = {arg.name for arg in target._schema.arguments if arg.kwarg_only}
            node = SimpleNamespace(
                op="call_function", target=target, kwargs=dict.fromkeys(keywords, 1)
            )
            out = aten._out_overload(node)
            if out is not None:
                known = {arg.name for arg in out._schema.arguments}
                lost += [f"{target}: {key}" for key in keywords - known - OF_RESULT]
    assert not lost


def test_the_users_outputs_get_no_buffer():
    region = region_of(traced(lambda x: (x.cos(), x.sin()), (4, 4)), external=[0])
    profile = aten.lower(region).profile
    assert [output.storage for output in profile.outputs] == [Storage.EXTERNAL, Storage.ARENA]
    assert profile.outputs[0].size_bytes == 512
    assert len(profile.buffers) == 1


def cut_at(gm: fx.GraphModule, positions: dict[str, int]):
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    request = CutRequest(
        gm=gm,
        positions={node: positions[node.name] for node in nodes},
        phase=Phase.FORWARD,
        static_inputs=frozenset(),
        device=CPU,
        names={0: "a", 1: "layer", 2: "layer", 3: "head"},
    )
    return cut(request)


def test_equal_parts_share_a_region():
    gm = traced(lambda x, v, w: (((x.sin() @ v) @ w).cos(),), (4, 4), (4, 4), (4, 4))
    found = cut_at(gm, {"sin": 0, "mm": 1, "mm_1": 2, "cos": 3})
    assert [call.region for call in found.calls] == ["a", "layer", "layer", "head"]
    assert sorted(found.regions) == ["a", "head", "layer"]
    assert found.calls[1].inputs == ("sin", "v_1")
    assert found.calls[2].inputs == ("mm", "w_1")


def test_different_strides_are_different_regions():
    gm = traced(lambda x, w: ((x.sin() @ w) @ w.t(),), (4, 4), (4, 4))
    found = cut_at(gm, {"sin": 0, "mm": 1, "t": 2, "mm_1": 2})
    assert len(found.regions) == 3


def test_a_view_crosses_as_its_reader_sees_it_and_a_constant_is_made_again():
    def function(x):
        y = x.sin()
        return (y.t().cos() + torch.ones(4),)

    gm = traced(function, (4, 4))
    names = {node.name: 0 for node in gm.graph.nodes if node.op == "call_function"}
    found = cut_at(gm, {**names, "cos": 1, "add": 1})
    assert found.calls[0].outputs == ("sin",)
    assert found.calls[1].inputs == ("sin",)
    text = graph_text(found.regions["layer"].gm)
    (read,) = found.calls[1].reads
    assert (read.size, read.stride, read.offset) == ((4, 4), (1, 4), 0)
    assert "aten.t.default" not in text
    assert "aten.ones" in text


def test_zeros_of_two_signs_are_two_constants():
    def both(x):
        return torch.div(x, 0.0).sum() + torch.div(x, -0.0).sum()

    gm = traced(both, (3,))
    MergeCommonSubexpressions()(gm)
    divisions = [node.args[1] for node in gm.graph.nodes if "div" in str(node.target)]
    assert [str(divisor) for divisor in divisions] == ["0.0", "-0.0"]
