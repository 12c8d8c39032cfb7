"""Kernels that allocate their own results, numbers among them, as CUDA's attention does."""

import operator

import pytest
import torch
from memo_runtime.current import current
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from memo_compile.analysis.regions import RegionGraph
from memo_compile.config import MemoConfig
from memo_compile.errors import UnsupportedGraph
from memo_compile.lowering.lower import lower_regions
from memo_compile.passes.runner import PassRunner
from memo_compile.passes.spread_seeds import SpreadSeeds
from memo_compile.step.problem import Storage
from memo_compile.torch_private import inductor_api

_library = torch.library.Library("memo_test_mixed", "DEF")
_library.define("product(Tensor x, Tensor w) -> (Tensor, int, Tensor)")
_library.impl("product", lambda x, w: (torch.mm(x, w), 3, x.sum(1)), "CompositeExplicitAutograd")
torch.library.register_fake(
    "memo_test_mixed::product",
    lambda x, w: (x.new_empty(x.shape[0], w.shape[1]), 3, x.new_empty(x.shape[0])),
    lib=_library,
)


def region_of_mixed_results() -> RegionGraph:
    """``t = product(x, w); return t[0], relu(t[0])``."""
    graph, mode = fx.Graph(), FakeTensorMode()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    with mode:
        x.meta["val"], w.meta["val"] = torch.empty(8, 16), torch.empty(16, 4)
        product = torch.ops.memo_test_mixed.product
        results = product(x.meta["val"], w.meta["val"])
        relu_value = torch.relu(results[0])
    both = graph.call_function(product.default, (x, w))
    both.meta["val"] = results
    first = graph.call_function(operator.getitem, (both, 0))
    first.meta["val"] = results[0]
    relu = graph.call_function(torch.ops.aten.relu.default, (first,))
    relu.meta["val"] = relu_value
    graph.output((first, relu))
    return RegionGraph(
        name="mixed",
        gm=fx.GraphModule({}, graph),
        external_outputs=frozenset(),
        static_inputs=(),
        is_backward=False,
        device=torch.device("cpu"),
    )


def test_a_tensor_among_numbers_gets_a_planned_buffer():
    lowered = lower_regions([region_of_mixed_results()], MemoConfig(), PassRunner())["mixed"]
    assert [output.storage for output in lowered.profile.outputs] == [Storage.ARENA, Storage.ARENA]
    (own,) = lowered.profile.outside  # the kernel's own result
    assert own.size_bytes == 512
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(8, 16, generator=generator), torch.randn(16, 4, generator=generator)
    current.views = [torch.empty_strided(v.size, v.stride, dtype=v.dtype) for v in lowered.views]
    try:
        first, relu = lowered.run([x, w])
    finally:
        current.views = ()
    assert torch.equal(first, x @ w)
    assert torch.equal(relu, torch.relu(x @ w))
    assert first.data_ptr() != relu.data_ptr()


def region_of_seeds(num_seeds: int) -> RegionGraph:
    """The seeds of so many dropouts, of which the user keeps the last."""
    graph, mode, prims = fx.Graph(), FakeTensorMode(), torch.ops.prims
    seeds = graph.placeholder("seeds")
    with mode:
        seeds.meta["val"] = torch.empty(num_seeds, dtype=torch.int64)
        value = torch.empty((), dtype=torch.int64)
    lookups = []
    for number in range(num_seeds):
        lookups.append(graph.call_function(prims.inductor_lookup_seed.default, (seeds, number)))
        lookups[-1].meta["val"] = value
    graph.output(tuple(reversed(lookups)))
    return RegionGraph(
        name="seeds",
        gm=fx.GraphModule({}, graph),
        external_outputs=frozenset((0,)),
        static_inputs=(),
        is_backward=False,
        device=torch.device("cpu"),
    )


def region_of(function, *values) -> RegionGraph:
    """The graph of ``function`` as the region of a forward."""
    gm = make_fx(function, select_decomp_table(), tracing_mode="fake")(*values)
    return RegionGraph(
        name="traced",
        gm=gm,
        external_outputs=frozenset(),
        static_inputs=(),
        is_backward=False,
        device=torch.device("cpu"),
    )


def assert_runs_in_its_buffers(function, *values):
    """Lowered by Inductor, all results lie in planned buffers, and as they were traced."""
    region = region_of(function, *values)
    lowered = lower_regions([region], MemoConfig(), PassRunner())["traced"]
    storages = {output.storage for output in lowered.profile.outputs}
    assert storages == {Storage.ARENA}
    current.views = [
        torch.full((1 + sum((n - 1) * step for n, step in zip(v.size, v.stride, strict=True)),), 0)
        .to(v.dtype)
        .as_strided(v.size, v.stride)
        for v in lowered.views
    ]
    buffers = {view.untyped_storage().data_ptr() for view in current.views}
    for made, expected in zip(lowered.run(list(values)), function(*values), strict=True):
        assert made.untyped_storage().data_ptr() in buffers
        torch.testing.assert_close(made, expected, check_stride=True)
    return lowered


def test_what_takes_the_place_of_a_kernels_own_result_lies_in_a_planned_buffer():
    """``sin`` runs in place of what torch's ``cummax`` has allocated."""

    def function(x):
        return (torch.sin(torch.ops.aten.cummax(x * 2, 1)[0]),)

    lowered = assert_runs_in_its_buffers(function, torch.randn(8, 16))
    assert [buffer.size_bytes for buffer in lowered.profile.buffers] == [512, 512]
    (values,) = lowered.profile.outside
    assert values.size_bytes == 512
    assert lowered.profile.buffers[-1].start < values.end < lowered.profile.num_lines


def views(x):
    """Partial views of values that Inductor would lay out in rows; each of a value of its own."""
    yield torch.select(x.t() * 2, 1, 1)
    yield (x.t() * 3)[:, 1:3]
    yield x.view(2, 2, 8).permute(2, 0, 1).exp()[:, 1, 0]
    yield torch.diagonal(x.t() * 4)
    yield (x.t() * 5)[:, 1:2].expand(8, 3)
    yield (x.t() * 6).unfold(0, 3, 2)[:, 1]
    yield torch.as_strided(x.t() * 7, (5,), (3,), 2)
    yield (x.t() * 8).view(torch.int32)[:, 0]


def test_a_view_that_leaves_a_region_lies_as_it_was_traced():
    """Of a view Inductor keeps the order of strides, which every view of one dimension has."""
    assert_runs_in_its_buffers(lambda x: tuple(views(x)), torch.randn(4, 8))


def test_a_result_that_lies_otherwise_is_refused(monkeypatch):
    monkeypatch.setattr(inductor_api, "keep_strides", lambda node: None)
    region = region_of(lambda x: (torch.select(x.t() * 2, 1, 1),), torch.randn(4, 8))
    with pytest.raises(UnsupportedGraph, match=r"result 0 the strides \(4,\) where \(1,\)"):
        lower_regions([region], MemoConfig(), PassRunner())


def test_seeds_are_spread_by_one_operator():
    """There may be more than there are letters; what the user keeps is made as it was."""
    num_seeds = 30
    region = region_of_seeds(num_seeds)
    result = SpreadSeeds(external_outputs=region.external_outputs)(region.gm)
    assert result.modified
    region.gm.graph.lint()
    names = [str(node.target) for node in region.gm.graph.nodes]
    assert names.count("prims.inductor_lookup_seed.default") == 1
    assert names.count(f"memo.spread_{num_seeds - 1}.default") == 1
    lowered = lower_regions([region], MemoConfig(), PassRunner())["seeds"]
    assert lowered.profile.outside == ()
    current.views = [torch.empty_strided(v.size, v.stride, dtype=v.dtype) for v in lowered.views]
    seeds = torch.randint(-(2**62), 2**62, (num_seeds,))
    try:
        results = lowered.run([seeds])
    finally:
        current.views = ()
    assert [int(each) for each in results] == seeds.flip(0).tolist()


def test_a_single_seed_is_left_alone():
    region = region_of_seeds(2)
    assert not SpreadSeeds(external_outputs=region.external_outputs)(region.gm).modified
