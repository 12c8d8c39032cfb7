"""Kernels that allocate their own results, numbers among them, as CUDA's attention does."""

import operator

import torch
from memo_runtime.current import current
from torch import fx
from torch._subclasses import FakeTensorMode

from memo_compile.analysis.regions import RegionGraph
from memo_compile.config import MemoConfig
from memo_compile.lowering.lower import lower_regions
from memo_compile.passes.runner import PassRunner
from memo_compile.passes.spread_seeds import SpreadSeeds
from memo_compile.step.problem import Storage

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
