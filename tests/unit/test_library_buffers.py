"""The library's buffers: which products bring them, in which order, how often."""

import threading

import pytest
import torch
from torch import fx

from memo_compile.driver import library_buffers
from memo_compile.driver.library_buffers import (
    LibraryBuffers,
    Product,
    keeps_kernels,
    products_of,
)

FLOAT = torch.float32


def product(rows: int, inner: int, columns: int, batch: int = 1) -> Product:
    return Product(rows=rows, inner=inner, columns=columns, batch=batch, dtype=FLOAT)


def graph_of(
    target, *shapes: tuple[int, ...], device: str = "cpu", dtype: torch.dtype = FLOAT
) -> fx.GraphModule:
    graph = fx.Graph()
    inputs = [graph.placeholder(f"in{at}") for at in range(len(shapes))]
    with torch.device("meta"):
        for node, shape in zip(inputs, shapes, strict=True):
            node.meta["val"] = torch.empty(shape, dtype=dtype)
    if device == "cpu":
        for node in inputs:
            node.meta["val"] = torch.empty_like(node.meta["val"], device="cpu")
    graph.output((graph.call_function(target, tuple(inputs)),))
    return fx.GraphModule({}, graph)


@pytest.fixture
def ran(monkeypatch):
    """Products in the order in which they ran."""
    found: list[Product] = []
    monkeypatch.setattr(library_buffers.Product, "run", lambda product: found.append(product))
    return found


def test_products_are_read_from_graphs():
    aten = torch.ops.aten
    graphs = [
        graph_of(aten.mm.default, (4, 5), (5, 6)),
        graph_of(aten.addmm.default, (6,), (4, 5), (5, 6)),
        graph_of(aten.bmm.default, (3, 4, 5), (3, 5, 7)),
        graph_of(aten.mm.default, (0, 5), (5, 6)),
        graph_of(aten.mm.default, (9, 9), (9, 9), device="meta"),
        graph_of(aten.add.Tensor, (4, 5), (4, 5)),
    ]
    assert products_of(graphs) == {product(4, 5, 6), product(4, 5, 7, batch=3)}


@pytest.mark.parametrize(
    ("name", "dtype", "keeps"),
    [
        ("mm", torch.bfloat16, True),
        ("mm", torch.float16, True),
        ("mm", torch.float32, False),
        ("mm", torch.float64, False),
        ("mv", torch.bfloat16, True),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", torch.bfloat16, True),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", torch.float32, False),
        ("convolution_backward", torch.float32, True),
        ("add", torch.bfloat16, False),
        ("cummax", torch.bfloat16, False),
    ],
)
def test_which_operators_keep_kernels_for_a_shape(name, dtype, keeps):
    overloads = getattr(torch.ops.aten, name)
    graph = graph_of(getattr(overloads, overloads.overloads()[0]), (4, 5), (5, 6), dtype=dtype)
    assert keeps_kernels(graph) == keeps


def test_float32_keeps_kernels_where_it_may_be_rounded():
    graph = graph_of(torch.ops.aten.mm.default, (4, 5), (5, 6))
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        assert keeps_kernels(graph)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert not keeps_kernels(graph)


def test_the_largest_runs_first_and_each_once(ran):
    buffers = LibraryBuffers()
    small, large = product(4, 5, 6), product(40, 50, 60)
    buffers.require(frozenset((small, large)))
    assert ran == [large, small]
    buffers.require(frozenset((small,)))
    assert ran == [large, small]


def test_products_above_a_block_are_one(ran):
    LibraryBuffers().require(
        frozenset((product(10**6, 10**5, 10**6), product(10**6, 10**6, 10**5)))
    )
    assert ran == [product(512, 512, 8192)]


def test_each_thread_has_its_own(ran):
    buffers = LibraryBuffers()
    products = frozenset((product(4, 5, 6),))
    buffers.require(products)
    thread = threading.Thread(target=buffers.require, args=(products,))
    thread.start()
    thread.join()
    assert ran == [product(4, 5, 6)] * 2


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", sorted(library_buffers._TYPES, key=str))
def test_products_of_all_types_run(batch, dtype):
    Product(rows=2, inner=3, columns=4, batch=batch, dtype=dtype).run()
