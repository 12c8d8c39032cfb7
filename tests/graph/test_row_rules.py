"""Whenever a rule says that rows are apart, the operator run on some rows gives the whole's rows.

Every operator with a rule is drawn with small sizes that collide: all of them equal, or 1, 2 and 3
in any order. Every dimension of every input is tried as the rows'.
"""

import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from memo_compile.analysis import row_rules
from memo_compile.analysis.row_rules import RowDim
from memo_compile.analysis.rows import row_dims
from memo_compile.errors import UnsupportedGraph
from memo_compile.lowering.aten import interpret
from memo_compile.passes.slice_rows import slice_rows
from tests.numerics.training import in_ci

aten, prims = torch.ops.aten, torch.ops.prims
DRAWS = 10
IN_CI = [0, 1, 5, 6, 7, 8]
"""The equal sizes once each, and four mixed ones."""
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


class Draw:
    """Small sizes, the first draws all equal; tensors of random numbers; random choices."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.equal = (2, 3)[seed % 2] if seed < DRAWS // 2 else None

    def size(self) -> int:
        return self.equal or self.random.choice((1, 2, 3, 4))

    def sizes(self, ndim: int) -> list[int]:
        return [self.size() for _ in range(ndim)]

    def maybe_one(self, size: int) -> int:
        return 1 if self.random.random() < 0.3 else size

    def tensor(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=self.generator)

    def below(self, bound: int, *sizes: int) -> torch.Tensor:
        return torch.randint(0, bound, sizes, generator=self.generator)

    def dim(self, ndim: int) -> int:
        return self.random.randrange(-ndim, ndim)

    def any(self) -> torch.Tensor:
        return self.tensor(*self.sizes(self.random.choice((2, 3))))

    def spread(self, shape: torch.Size | list[int]) -> list[int]:
        """A shape that is broadcast to ``shape``."""
        return [self.maybe_one(size) for size in shape[self.random.randrange(len(shape) + 1) :]]


def call(target: Any, *args: Any, **kwargs: Any) -> Call:
    return target, args, kwargs


def unary(target: Any, *more: Any, **options: Any) -> Callable[[Draw], Call]:
    return lambda draw: call(target, draw.any(), *more, **options)


def along(target: Any, *more: Any, **options: Any) -> Callable[[Draw], Call]:
    """``target(x, dim)``."""

    def made(draw: Draw) -> Call:
        x = draw.any()
        return call(target, x, draw.dim(x.dim()), *more, **options)

    return made


def reduction(target: Any) -> Callable[[Draw], Call]:
    """``target(x, [dims], keepdim=...)``."""

    def made(draw: Draw) -> Call:
        x = draw.any()
        dims = draw.random.sample(range(x.dim()), draw.random.randrange(1, x.dim()))
        return call(target, x, dims, keepdim=draw.random.random() < 0.5)

    return made


def one_reduction(target: Any) -> Callable[[Draw], Call]:
    """``target(x, dim, keepdim)``."""

    def made(draw: Draw) -> Call:
        x = draw.any()
        return call(target, x, draw.dim(x.dim()), draw.random.random() < 0.5)

    return made


def two(target: Any) -> Callable[[Draw], Call]:
    """A pointwise operator, its second operand broadcast."""

    def made(draw: Draw) -> Call:
        x = draw.any()
        return call(target, x, draw.tensor(*draw.spread(x.shape)))

    return made


def where(draw: Draw) -> Call:
    x = draw.any()
    mask = draw.tensor(*draw.spread(x.shape)) > 0
    return call(aten.where.self, mask, x, draw.tensor(*draw.spread(x.shape)))


def view(target: Any) -> Callable[[Draw], Call]:
    def made(draw: Draw) -> Call:
        x = draw.any()
        whole, sizes = x.numel(), []
        while whole > 1 and len(sizes) < 3:
            sizes.append(draw.random.choice([n for n in range(1, whole + 1) if whole % n == 0]))
            whole //= sizes[-1]
        return call(target, x, [*sizes, whole])

    return made


def squeeze(draw: Draw) -> Call:
    x = draw.tensor(*(draw.maybe_one(size) for size in draw.sizes(3)))
    dims = draw.random.sample(range(3), draw.random.randrange(3))
    return draw.random.choice([call(aten.squeeze.default, x), call(aten.squeeze.dims, x, dims)])


def slice_(draw: Draw) -> Call:
    x = draw.any()
    return call(aten.slice.Tensor, x, draw.dim(x.dim()), 0, draw.random.choice((1, 2, 2**63 - 1)))


def cat(draw: Draw) -> Call:
    x = draw.any()
    dim = draw.dim(x.dim())
    shape = list(x.shape)
    shape[dim] = draw.size()
    return call(aten.cat.default, [x, draw.tensor(*shape)], dim)


def split_sizes(target: Any) -> Callable[[Draw], Call]:
    def made(draw: Draw) -> Call:
        x = draw.any()
        dim = draw.dim(x.dim())
        return call(target, x, [1, x.shape[dim] - 1], dim)

    return made


def index_like(draw: Draw, x: torch.Tensor, dim: int) -> torch.Tensor:
    """An index for gather and scatter, in the other dimensions as large as ``x`` or smaller."""
    shape = [draw.maybe_one(size) for size in x.shape]
    return draw.below(x.shape[dim], *shape)


def gather(draw: Draw) -> Call:
    x = draw.any()
    dim = draw.dim(x.dim())
    return call(aten.gather.default, x, dim, index_like(draw, x, dim))


def scatter(target: Any, *more: Any) -> Callable[[Draw], Call]:
    def made(draw: Draw) -> Call:
        x = draw.any()
        dim = draw.dim(x.dim())
        index = index_like(draw, x, dim)
        source = draw.tensor(*(draw.random.choice((a, max(a, b))) for a, b in _pairs(index, x)))
        return call(target, x, dim, index, source, *more)

    return made


def _pairs(index: torch.Tensor, x: torch.Tensor) -> Iterator[tuple[int, int]]:
    return zip(index.shape, x.shape, strict=True)


def slice_scatter(draw: Draw) -> Call:
    x = draw.any()
    dim = draw.dim(x.dim())
    shape = list(x.shape)
    shape[dim] = draw.random.randrange(1, shape[dim] + 1)
    return call(aten.slice_scatter.default, x, draw.tensor(*shape), dim, 0, shape[dim])


def select_scatter(draw: Draw) -> Call:
    x = draw.any()
    dim = draw.dim(x.dim())
    shape = list(x.shape)
    del shape[dim]
    return call(aten.select_scatter.default, x, draw.tensor(*shape), dim, 0)


def softmax_backward(target: Any) -> Callable[[Draw], Call]:
    def made(draw: Draw) -> Call:
        x = draw.any()
        dim = draw.dim(x.dim())
        return call(target, draw.tensor(*x.shape), x.softmax(dim), dim, torch.float32)

    return made


def product(target: Any, *, batched: bool, addend: bool) -> Callable[[Draw], Call]:
    def made(draw: Draw) -> Call:
        batch = [draw.size()] if batched else []
        m, k, n = draw.sizes(3)
        operands = [draw.tensor(*batch, m, k), draw.tensor(*batch, k, n)]
        if addend:
            operands.insert(0, draw.tensor(*draw.spread([*batch, m, n])))
        return call(target, *operands)

    return made


def embedding(draw: Draw) -> Call:
    table, width = draw.sizes(2)
    ids = draw.below(table, *draw.sizes(2))
    return call(aten.embedding.default, draw.tensor(table, width), ids)


def index(target: Any) -> Callable[[Draw], Call]:
    def made(draw: Draw) -> Call:
        x = draw.tensor(*draw.sizes(3))
        at = draw.random.choice([(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)])
        shape = draw.sizes(2)
        given: list[Any] = [None] * (at[-1] + 1)
        for position in at:
            given[position] = draw.below(x.shape[position], *draw.spread(shape))
        return call(target, x, given)

    return made


def index_select(draw: Draw) -> Call:
    x = draw.any()
    dim = draw.dim(x.dim())
    return call(aten.index_select.default, x, dim, draw.below(x.shape[dim], draw.size()))


def layer_norm(draw: Draw) -> Call:
    x = draw.any()
    shape = list(x.shape[draw.random.randrange(1, x.dim()) :])
    weights = draw.tensor(*shape), draw.tensor(*shape)
    return call(aten.native_layer_norm.default, x, shape, *weights, 1e-5)


def rms_norm(draw: Draw) -> Call:
    x = draw.any()
    width = [x.shape[-1]]
    return call(aten._fused_rms_norm.default, x, width, draw.tensor(*width), 1e-5)


def convolution(draw: Draw) -> Call:
    batch, length, groups = draw.sizes(3)
    inner, outer = groups * draw.size(), groups * draw.size()
    x, weight = draw.tensor(batch, inner, length), draw.tensor(outer, inner // groups, 1)
    sides: tuple[Any, ...] = ([1], [0], [1], False, [0])
    return call(aten.convolution.default, x, weight, None, *sides, groups)


def pool(target: Any) -> Callable[[Draw], Call]:
    return lambda draw: call(target, draw.tensor(*draw.sizes(4)), [1, 1])


def padded(draw: Draw) -> Call:
    x = draw.any()
    sides = [draw.random.choice((0, 0, 1)) for _ in range(2 * draw.random.randrange(1, 3))]
    return call(aten.constant_pad_nd.default, x, sides, 0.5)


def repeat(draw: Draw) -> Call:
    x = draw.any()
    more = draw.random.randrange(2)
    return call(aten.repeat.default, x, [draw.random.choice((1, 2)) for _ in range(x.dim() + more)])


def expand(draw: Draw) -> Call:
    shape = draw.sizes(3)
    return call(aten.expand.default, draw.tensor(*draw.spread(shape)), shape)


def permute(draw: Draw) -> Call:
    x = draw.any()
    return call(aten.permute.default, x, draw.random.sample(range(x.dim()), x.dim()))


def transpose(draw: Draw) -> Call:
    x = draw.any()
    return call(aten.transpose.int, x, draw.dim(x.dim()), draw.dim(x.dim()))


def attention_inputs(draw: Draw) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    batch, heads, queries, keys, width = draw.sizes(5)
    if draw.equal:
        batch = heads = queries = keys = draw.equal
    values = [
        draw.tensor(batch, heads, queries, width),
        draw.tensor(batch, heads, keys, width),
        draw.tensor(batch, heads, keys, width),
    ]
    mask = draw.random.choice(
        [
            None,
            [queries, keys],
            [draw.maybe_one(batch), draw.maybe_one(heads), queries, keys],
        ]
    )
    return values, None if mask is None else draw.tensor(*mask)


_cpu = aten._scaled_dot_product_flash_attention_for_cpu.default
_cpu_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attention(draw: Draw) -> Call:
    values, mask = attention_inputs(draw)
    return call(_cpu, *values, attn_mask=mask)


def attention_backward(draw: Draw) -> Call:
    values, mask = attention_inputs(draw)
    out, lse = _cpu(*values, attn_mask=mask)
    grad = torch.randn(out.shape, generator=draw.generator)
    return call(_cpu_backward, grad, *values, out, lse, 0.0, False, attn_mask=mask)


def masked_fill(draw: Draw) -> Call:
    x = draw.any()
    return call(aten.masked_fill.Scalar, x, draw.tensor(*draw.spread(x.shape)) > 0, -1.0)


def copied(draw: Draw) -> Call:
    x = draw.any()
    return call(aten.copy.default, x, draw.tensor(*draw.spread(x.shape)))


def topk(draw: Draw) -> Call:
    x = draw.any()
    return call(aten.topk.default, x, 1, draw.dim(x.dim()))


def norm(draw: Draw) -> Call:
    x = draw.any()
    return call(aten.linalg_vector_norm.default, x, 2, [draw.dim(x.dim())])


CASES: dict[str, tuple[Callable[[Draw], Call], ...]] = {
    "add": (two(aten.add.Tensor),),
    "where": (where,),
    "clone": (unary(aten.clone.default),),
    "_to_copy": (unary(aten._to_copy.default, dtype=torch.float64),),
    "alias": (unary(aten.alias.default),),
    "detach": (unary(aten.detach.default),),
    "lift_fresh_copy": (unary(aten.lift_fresh_copy.default),),
    "convert_element_type": (unary(prims.convert_element_type.default, torch.float64),),
    "copy": (copied,),
    "expand": (expand,),
    "full_like": (unary(aten.full_like.default, 2.0),),
    "zeros_like": (unary(aten.zeros_like.default),),
    "ones_like": (unary(aten.ones_like.default),),
    "masked_fill": (masked_fill,),
    "view": (view(aten.view.default),),
    "reshape": (view(aten.reshape.default),),
    "_unsafe_view": (view(aten._unsafe_view.default),),
    "permute": (permute,),
    "transpose": (transpose,),
    "t": (lambda draw: call(aten.t.default, draw.tensor(*draw.sizes(2))),),
    "unsqueeze": (along(aten.unsqueeze.default),),
    "squeeze": (squeeze,),
    "slice": (slice_,),
    "select": (along(aten.select.int, 0),),
    "unbind": (along(aten.unbind.int),),
    "cat": (cat,),
    "split": (lambda draw: call(aten.split.Tensor, draw.any(), 1, draw.dim(2)),),
    "split_with_sizes": (split_sizes(aten.split_with_sizes.default),),
    "unsafe_split": (lambda draw: call(aten.unsafe_split.Tensor, draw.any(), 1, draw.dim(2)),),
    "unsafe_split_with_sizes": (split_sizes(aten.unsafe_split_with_sizes.default),),
    "flip": (lambda draw: call(aten.flip.default, draw.any(), [draw.dim(2)]),),
    "sort": (along(aten.sort.default),),
    "topk": (topk,),
    "_softmax": (along(aten._softmax.default, False),),
    "_log_softmax": (along(aten._log_softmax.default, False),),
    "_safe_softmax": (along(aten._safe_softmax.default),),
    "_softmax_backward_data": (softmax_backward(aten._softmax_backward_data.default),),
    "_log_softmax_backward_data": (softmax_backward(aten._log_softmax_backward_data.default),),
    "cumsum": (along(aten.cumsum.default),),
    "cumprod": (along(aten.cumprod.default),),
    "logcumsumexp": (along(aten.logcumsumexp.default),),
    "gather": (gather,),
    "scatter": (scatter(aten.scatter.src),),
    "scatter_add": (scatter(aten.scatter_add.default),),
    "scatter_reduce": (scatter(aten.scatter_reduce.two, "sum"),),
    "slice_scatter": (slice_scatter,),
    "select_scatter": (select_scatter,),
    "sum": (reduction(aten.sum.dim_IntList),),
    "mean": (reduction(aten.mean.dim),),
    "prod": (one_reduction(aten.prod.dim_int),),
    "amax": (reduction(aten.amax.default),),
    "amin": (reduction(aten.amin.default),),
    "argmax": (one_reduction(aten.argmax.default),),
    "argmin": (one_reduction(aten.argmin.default),),
    "var": (reduction(aten.var.correction),),
    "std": (reduction(aten.std.correction),),
    "var_mean": (reduction(aten.var_mean.correction),),
    "std_mean": (reduction(aten.std_mean.correction),),
    "logsumexp": (reduction(aten.logsumexp.default),),
    "any": (one_reduction(aten.any.dim), unary(aten.any.default)),
    "all": (one_reduction(aten.all.dim), unary(aten.all.default)),
    "max": (one_reduction(aten.max.dim), two(aten.max.other), unary(aten.max.default)),
    "min": (one_reduction(aten.min.dim), two(aten.min.other), unary(aten.min.default)),
    "median": (one_reduction(aten.median.dim), unary(aten.median.default)),
    "linalg_vector_norm": (norm,),
    "prepare_softmax_online": (along(prims.prepare_softmax_online.default),),
    "mm": (product(aten.mm.default, batched=False, addend=False),),
    "addmm": (product(aten.addmm.default, batched=False, addend=True),),
    "bmm": (product(aten.bmm.default, batched=True, addend=False),),
    "baddbmm": (product(aten.baddbmm.default, batched=True, addend=True),),
    "embedding": (embedding,),
    "index": (index(aten.index.Tensor),),
    "_unsafe_index": (index(aten._unsafe_index.Tensor),),
    "index_select": (index_select,),
    "native_layer_norm": (layer_norm,),
    "_fused_rms_norm": (rms_norm,),
    "convolution": (convolution,),
    "max_pool2d_with_indices": (pool(aten.max_pool2d_with_indices.default),),
    "avg_pool2d": (pool(aten.avg_pool2d.default),),
    "_adaptive_avg_pool2d": (pool(aten._adaptive_avg_pool2d.default),),
    "constant_pad_nd": (padded,),
    "repeat": (repeat,),
    "_scaled_dot_product_flash_attention_for_cpu": (attention,),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (attention_backward,),
}

UNINITIALISED = {"empty_like"}
"""Nothing to compare."""


def graph_of(made: Call, mode: FakeTensorMode) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """A graph of one operator, all results of which are outputs, and its real inputs."""
    target, args, kwargs = made
    graph, inputs = fx.Graph(), []

    def given(value: Any) -> Any:
        if isinstance(value, list):
            return [given(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"in{len(inputs)}")
        node.meta["val"] = mode.from_tensor(value)
        inputs.append(value)
        return node

    node = graph.call_function(
        target, tuple(map(given, args)), {key: given(value) for key, value in kwargs.items()}
    )
    fakes = fx.node.map_arg((node.args, node.kwargs), lambda node: node.meta["val"])
    with mode:
        node.meta["val"] = value = target(*fakes[0], **fakes[1])
    outputs = [node]
    if isinstance(value, tuple | list):
        outputs = []
        for position, item in enumerate(value):
            element = graph.call_function(operator.getitem, (node, position))
            element.meta["val"] = item
            outputs.append(element)
    graph.output(tuple(outputs))
    return fx.GraphModule({}, graph), inputs


def seeds_of(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, RowDim, int]]:
    """Every way to see rows in an input: all of a dimension, or groups of it."""
    for node in gm.graph.find_nodes(op="placeholder"):
        for dim, size in enumerate(node.meta["val"].shape):
            for num_rows in range(2, size + 1):
                if size % num_rows == 0:
                    yield node, RowDim(dim=dim, factor=size // num_rows), num_rows


def part_of(value: torch.Tensor, row: RowDim | None, start: int, count: int) -> torch.Tensor:
    if row is None:
        return value
    return value.narrow(row.dim, start * row.factor, count * row.factor)


def check_all_rows(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> int:
    """Compare every part of every separable way; how many ways there are."""
    whole = interpret(gm)(list(inputs))
    ends = gm.graph.output_node().args[0]
    assert isinstance(ends, tuple)
    separable = 0
    for seed, row, num_rows in seeds_of(gm):
        dims = row_dims(gm, {seed: row}, num_rows)
        if any(dims.get(node) is None for node in ends):
            continue
        separable += 1
        placeholders = gm.graph.find_nodes(op="placeholder")
        for start, count in ((0, 1), (num_rows - 1, 1), (0, num_rows - 1)):
            try:
                sliced = slice_rows(gm, dims, count, num_rows)
            except UnsupportedGraph:
                assert count == 1, "a part of one row may be refused, no other"
                continue
            given = [
                part_of(value, dims[node], start, count)
                for node, value in zip(placeholders, inputs, strict=True)
            ]
            got = interpret(sliced)(given)
            for node, all_rows, found in zip(ends, whole, got, strict=True):
                expected = part_of(all_rows, dims[node], start, count)
                message = f"{gm.code} {seed} {row} {start} {count} {list(dims.values())}"
                assert found.shape == expected.shape, message
                torch.testing.assert_close(found, expected, equal_nan=True, msg=message)
    return separable


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")  # of one number, torch 2.15
@pytest.mark.parametrize("seeds", in_ci([IN_CI, range(DRAWS)], IN_CI), ids=["few", "all"])
@pytest.mark.parametrize("name", CASES)
def test_rows_of_the_whole(name, seeds):
    separable = 0
    mode = FakeTensorMode()
    for make in CASES[name]:
        for seed in seeds:
            made = make(Draw(seed))
            separable += check_all_rows(*graph_of(made, mode))
    assert separable, "nothing was compared"


def test_every_rule_is_compared():
    assert set(CASES) | UNINITIALISED >= set(row_rules._BY_NAME)
