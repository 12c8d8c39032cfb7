"""Kernels that allocate their own results, numbers among them, as CUDA's attention does."""

import operator

import pytest
import torch
from memo_runtime.current import current
from memo_runtime.ops import into, num_parts_of
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from memo_compile.backends.lowering import lower_regions
from memo_compile.config import MemoConfig
from memo_compile.passes.own_outputs import own_outputs
from memo_compile.problem import Storage
from memo_compile.regions import RegionGraph

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
    lowered = lower_regions([region_of_mixed_results()], MemoConfig())["mixed"]
    assert [slot.storage for slot in lowered.profile.outputs] == [Storage.ARENA, Storage.ARENA]
    assert [one.size_bytes for one in lowered.profile.outside] == [512]  # the kernel's own result
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


def attention(tokens: int = 40, heads: int = 6, mask: tuple[int, ...] | None = None):
    """Query, key, value, gradient and options of an attention with its backward."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, heads, tokens, 16)
    q, k, v, g = (torch.randn(shape, generator=generator) for _ in range(4))
    more = {} if mask is None else {"attn_mask": torch.randn(mask, generator=generator)}
    return (q, k, v), g, more


@pytest.mark.parametrize("mask", [None, (40, 40), (2, 1, 40, 40), (2, 6, 40, 40)])
@pytest.mark.parametrize("num_parts", [2, 3, 6])
def test_attention_by_parts_of_its_heads_has_the_same_bits(mask, num_parts):
    inputs, gradient, more = attention(mask=mask)
    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    out, lse = forward(*inputs, 0.0, False, **more)
    whole = backward(gradient, *inputs, out, lse, 0.0, False, **more)
    keywords = (more.get("attn_mask"), None)
    own, own_lse = torch.empty_like(out), torch.empty_like(lse)
    into(forward, num_parts)(own, own_lse, *inputs, 0.0, False, *keywords)
    assert torch.equal(own, out)
    assert torch.equal(own_lse, lse)
    parts = [torch.empty_like(one) for one in whole]
    into(backward, num_parts)(*parts, gradient, *inputs, out, lse, 0.0, False, *keywords)
    assert all(map(torch.equal, parts, whole))


def test_large_attention_has_little_memory_of_its_own():
    """Two threads, eight heads: four parts of two heads each, whose results are copied at once."""

    def step(q, k, v):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return (out.sum(),)

    shape = (1, 8, 1024, 64)
    gm = make_fx(step, tracing_mode="fake")(*(torch.empty(shape) for _ in range(3)))
    region = RegionGraph(
        name="attends",
        gm=gm,
        external_outputs=frozenset(),
        static_inputs=(),
        is_backward=False,
        device=torch.device("cpu"),
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        region = own_outputs(region)
    finally:
        torch.set_num_threads(threads)
    (call,) = (n for n in region.gm.graph.nodes if str(n.target).startswith("memo."))
    assert num_parts_of(call.target) == 4
