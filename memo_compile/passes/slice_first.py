"""Slices the input of a wide product instead of its result, as a pass over a Dynamo graph.

A shifted loss reads ``logits[:, :-1]``. Computed as written, the logits of all tokens exist, and so
do their gradients; and they cannot run in tiles of tokens, since row r of the slice is not row r of
the logits. If the hidden states are sliced first, only the logits that the loss reads exist, and
they run in tiles.
"""

import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult
from torch.nn import functional

from memo_compile.analysis.purity import is_write

_aten = torch.ops.aten
_ALL = slice(None)

_PRODUCTS = (
    *(functional.linear, torch.matmul, torch.mm, operator.matmul, "matmul", "mm"),
    *(_aten.linear.default, _aten.matmul.default, _aten.mm.default),
)
"""Products with a matrix as second argument: each row of the result depends on the same row of the
first argument."""

_ELEMENTWISE = frozenset(
    "add bfloat16 clamp contiguous div double float half mul neg sub tanh to truediv type".split()
)
"""Names of functions of ``torch`` and ``operator``, and of methods, that compute each number of the
result from the numbers at its place in the operands. None of them writes into an operand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceFirst:
    """Computes only the slice of a wide product that the program reads.

    Rewrite, of 4096 tokens in ``x``:
        y = linear(x, w)                          s = x[:, :-1]
        z = y.float()                      ->     y = linear(s, w)    # of 4095
        l = z[:, :-1]                             l = y.float()

    Each step moves the slice in front of one operator: first of ``float``, then of ``linear``.
    """

    name: ClassVar[str] = "slice-first"
    is_required: ClassVar[bool] = False

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        rewritten = [_slice_operands(node) for node in reversed(list(gm.graph.nodes))]
        return PassResult(gm, any(rewritten))


class _Slice(NamedTuple):
    """The range of each dimension of a tensor that a slice or an index reads."""

    ranges: tuple[slice, ...]
    second_index: tuple[Any, ...]
    """Index of the ranges that drops or adds dimensions, as the original index does; else ()."""


def _slice_operands(node: fx.Node) -> bool:
    """Moves the slice that all readers take of ``node`` in front of it, if a product is behind it.

    Returns False if it changes nothing. Else the readers of ``node``, all equal slices, are erased,
    and their readers read ``node`` of sliced operands.
    """
    slices = {reader: _slice_of(reader, node) for reader in node.users}
    distinct = {None if part is None else str(part.ranges) for part in slices.values()}
    first = next(iter(slices.values()), None)
    if first is None or len(distinct) != 1 or not _leads_to_product(node):
        return False
    ranges = first.ranges
    if ranges[-1] != _ALL or all(part == _ALL for part in ranges):
        return False
    if not all(_may_move(reader, node) for reader in slices):
        return False
    graph = node.graph
    operands: Sequence[Any] = [node.args[0]] if node.target in _PRODUCTS else node.all_input_nodes
    with graph.inserting_before(node):
        sliced = {operand: _sliced(operand, node, ranges) for operand in operands}
        copy = graph.node_copy(node, lambda source: sliced.get(source, source))
    copy.meta.pop("example_value", None)
    for reader, part in slices.items():
        result = copy
        if part is not None and part.second_index:
            with graph.inserting_before(reader):
                result = graph.call_function(operator.getitem, (copy, part.second_index))
        if "example_value" in reader.meta:
            result.meta["example_value"] = reader.meta["example_value"]
        reader.replace_all_uses_with(result)
        graph.erase_node(reader)
    graph.erase_node(node)
    return True


def _sliced(operand: Any, node: fx.Node, ranges: tuple[slice, ...]) -> Any:
    """Returns the part of ``operand`` that ``node`` needs to make the ``ranges`` of its result.

    Dimensions are counted from the last, and one of size 1 stays as it is, as in broadcasting.
    """
    shape, whole = _shape(operand), _shape(node)
    aligned = ranges[len(ranges) - len(shape) :] if shape else ()
    sizes = zip(aligned, shape, whole[len(whole) - len(shape) :], strict=True)
    index = tuple(
        _ALL if isinstance(size, int) and size == 1 and result_size != 1 else part
        for part, size, result_size in sizes
    )
    if all(part == _ALL for part in index):
        return operand
    return node.graph.call_function(operator.getitem, (operand, index))


def _slice_of(reader: fx.Node, node: fx.Node) -> _Slice | None:
    """Returns what ``reader`` reads of ``node``; None: it is no slice, or not by numbers."""
    rank = len(_shape(node))
    reads_once = reader.all_input_nodes.count(node) == 1
    if not reader.args or reader.args[0] is not node or not reads_once or not rank:
        return None
    if reader.target is operator.getitem:
        index = reader.args[1] if isinstance(reader.args[1], tuple) else (reader.args[1],)
        return _indexed(index, rank)
    if reader.target in ("narrow", torch.narrow):
        arguments = _arguments(reader, "dim", "start", "length")
        start, length = arguments["start"], arguments["length"]
        if not (isinstance(start, int) and isinstance(length, int)):
            return None
        end = start + length if start + length or start >= 0 else None  # x[-3:0] would be empty
        part = slice(start, end)
    elif reader.target is _aten.slice.Tensor:
        arguments = _arguments(reader, "dim", "start", "end", "step")
        end = arguments.get("end")
        part = slice(
            arguments.get("start"), None if end == sys.maxsize else end, arguments.get("step")
        )
    else:
        return None
    dim = arguments.get("dim", 0) % rank
    return _Slice(tuple(part if at == dim else _ALL for at in range(rank)), ())


def _arguments(reader: fx.Node, *names: str) -> dict[str, Any]:
    """Returns the arguments of ``reader`` behind the first; positional ones get these ``names``."""
    return {**dict(zip(names, reader.args[1:], strict=False)), **reader.kwargs}


def _indexed(index: tuple[Any, ...], rank: int) -> _Slice | None:
    """Returns what ``index`` reads of a tensor of ``rank`` dimensions; None: it holds a tensor."""
    is_basic = all(
        item is None or item is Ellipsis or isinstance(item, slice) or type(item) is int
        for item in index
    )
    if not is_basic:
        return None
    num_indexed = sum(isinstance(item, slice | int) for item in index)
    ranges: list[slice] = []
    second_index: list[Any] = []
    for item in index:
        if item is Ellipsis:
            ranges += [_ALL] * (rank - num_indexed)
        elif isinstance(item, int):
            ranges.append(slice(item, item + 1 or None))
        elif item is not None:
            ranges.append(item)
        second_index.append(
            _ALL if isinstance(item, slice) else 0 if isinstance(item, int) else item
        )
    ranges += [_ALL] * (rank - len(ranges))
    is_plain = all(item is Ellipsis or isinstance(item, slice) for item in index)
    return _Slice(tuple(ranges), () if is_plain else tuple(second_index))


def _leads_to_product(node: fx.Node) -> bool:
    """True for a product wider than its input, or an elementwise operator behind one.

    Nothing else may read the product or a node in between, because it would then exist as a whole.
    """
    if node.target in _PRODUCTS:
        first, second = node.args[:2]
        shape, result_shape = _shape(first), _shape(node)
        if len(shape) != len(result_shape) or len(_shape(second)) != 2:
            return False
        width, result_width = shape[-1], result_shape[-1]
        return isinstance(width, int) and isinstance(result_width, int) and width < result_width
    return _is_elementwise(node) and any(
        len(source.users) == 1 and _leads_to_product(source) for source in node.all_input_nodes
    )


def _is_elementwise(node: fx.Node) -> bool:
    """True if each number of the result depends on the numbers at its place in the operands."""
    target = node.target
    if "out" in node.kwargs or not _shape(node):
        return False
    if node.op == "call_method":
        return target in _ELEMENTWISE
    if isinstance(target, torch._ops.OpOverload):
        is_random = torch.Tag.nondeterministic_seeded in target.tags
        return torch.Tag.pointwise in target.tags and not (is_write(node) or is_random)
    name = getattr(target, "__name__", "")
    functions = (getattr(module, name, None) for module in (torch, operator))
    return node.op == "call_function" and name in _ELEMENTWISE and target in functions


def _may_move(reader: fx.Node, node: fx.Node) -> bool:
    """True if the slice ``reader`` of ``node`` can be taken in front of ``node``.

    Its bounds must be known there, and gradients must be switched on or off alike at both places.
    """
    bounds = [source for source in reader.all_input_nodes if source is not node]
    if not all(bound < node for bound in bounds):
        return False
    between = node
    while between is not reader:
        if getattr(between.target, "__name__", "") == "_set_grad_enabled":
            return False
        between = between.next
    return True


def _shape(node: Any) -> tuple[Any, ...]:
    """Returns the shape of a tensor; empty for anything else."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()
