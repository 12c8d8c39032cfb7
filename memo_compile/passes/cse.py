"""Merges equal computations, and moves those that all layers share before the first layer."""

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from memo_compile.analysis.frozen import is_dear
from memo_compile.analysis.joint_units import forward_part
from memo_compile.analysis.purity import is_constant, is_pure
from memo_compile.analysis.structure import has_tag, op_name
from memo_compile.analysis.views import bytes_of, is_tensor, is_view, makers_of, storage_of
from memo_compile.passes.at_numbers import SIZES
from memo_compile.passes.hoist import apply_order

_Same = Mapping[fx.Node, fx.Node]
"""Nodes with the numbers of another node, in the same order."""

_aten = torch.ops.aten
_RESHAPES = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_CASTS = ("convert_element_type", "_to_copy")


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeCommonSubexpressions:
    """Equal pure computations become one, made as soon as its inputs are there.

    A model computes the same mask or the same rotary table in every layer. Merged where the first
    layer makes it, the first layer would differ from the others; made as early as possible, it
    belongs to the prologue and all layers stay alike.

    Rewrite:
        prologue: mask                      prologue: mask; bias = where(mask, 0, -inf)
        layer 0:  bias_0 = where(mask, ..)  layer 0:  attention(q0, k0, v0, bias)
                  attention(.., bias_0)  -> layer 1:  attention(q1, k1, v1, bias)
        layer 1:  bias_1 = where(mask, ..)
                  attention(.., bias_1)

    Constants (full, iota) are never merged: every region can make its own for free. Results of the
    graph, and values that share memory with them, are not merged either: two equal results are two
    tensors, and the user may write into one of them.

    A value of the forward is not merged with one that the program's own backward computes again: an
    autograd.Function that dequantises a weight in both halves does so to keep nothing in between.
    One that takes fewer bytes than an activation that it is computed from is: a float8 copy that
    both halves make is then saved in place of the activation. Cost: linear in the graph's size.
    """

    name: ClassVar[str] = "merge-common-subexpressions"
    is_required: ClassVar[bool] = False

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Merge in place."""
        merged = _merge(gm.graph)
        if merged:
            hoist_behind_inputs(gm.graph, merged)
        return PassResult(gm, _merge_narrow(gm.graph) or bool(merged))


def _merge(graph: fx.Graph) -> set[fx.Node]:
    """Replaces later duplicates by the first; returns the nodes that stand for several now."""
    first_with: dict[Hashable, fx.Node] = {}
    survivors: set[fx.Node] = set()
    returned = set(_returned(graph))
    forward = forward_part(graph)
    for node in list(graph.nodes):
        if not is_pure(node) or is_constant(node) or storage_of(node) in returned:
            continue
        signature = _signature(node)
        if signature is None:
            continue
        first = first_with.setdefault((node in forward, signature), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            survivors.add(first)
    return survivors


def _merge_narrow(graph: fx.Graph) -> bool:
    """Lets the backward read narrow values of the forward that it would compute again.

        h = mm(x, w); h8 = to_float8(h)           h = mm(x, w); h8 = to_float8(h)
        again = to_float8(h)       [backward]  ->
        dw = mm(gradient, again)   [backward]     dw = mm(gradient, h8)   [backward]

    torch's partitioner may then save ``h8``, which takes fewer bytes than ``h``. No result of a
    product is merged: the program may multiply again in order to keep nothing.
    """
    forward, returned = forward_part(graph), set(_returned(graph))
    first_with: dict[Hashable, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if not is_pure(node) or is_constant(node) or is_dear(node) or storage_of(node) in returned:
            continue
        if node.target in _RESHAPES:
            source = node.all_input_nodes[0]
            same[node] = same.get(source, source)
        elif (signature := _signature(node, same)) is None:
            continue
        elif node in forward:
            first_with.setdefault(signature, node)
        elif signature in first_with:
            same[node] = first_with[signature]
    narrow = [
        node
        for node, first in same.items()
        if not (node in forward or is_view(node))
        and bytes_of(node) < _bytes_behind(node, same)
        and (_shape(node) == _shape(first) or _are_contiguous(node, first))
    ]
    for node in narrow:
        node.replace_all_uses_with(_shaped(same[node], node))
    for node in reversed(same) if narrow else ():
        if node not in forward and not node.users:
            graph.erase_node(node)
    return bool(narrow)


def _bytes_behind(node: fx.Node, same: _Same) -> int:
    """Returns the bytes of the largest activation that the backward computes ``node`` from."""
    makers = makers_of([node], same.__contains__) - same.keys()
    sizes = (bytes_of(n) for n in makers if storage_of(n).op == "call_function")
    return max(sizes, default=0)


def _are_contiguous(*nodes: fx.Node) -> bool:
    return all(node.meta["val"].is_contiguous() for node in nodes)


def _shaped(first: fx.Node, node: fx.Node) -> fx.Node:
    """Returns ``first``, or its numbers in the shape of ``node``, in whose place they are read."""
    shape = _shape(node)
    if shape is None or shape == _shape(first):
        return first
    with node.graph.inserting_before(node):
        shaped = node.graph.call_function(_aten.view.default, (first, list(shape)))
    shaped.meta = node.meta.copy()
    return shaped


def _returned(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yields the makers of the results' memory, and the operator of a tuple whose item is one."""
    for node in graph.output_node().all_input_nodes:
        root = storage_of(node)
        yield root
        if root.target is operator.getitem:
            yield root.all_input_nodes[0]


def _signature(node: fx.Node, same: _Same | None = None) -> Hashable | None:
    """Returns a key that is equal for nodes with equal values; None: an argument has no hash.

    Arguments in ``same`` count as the nodes that it names. Those have the same numbers, but may be
    of another shape, which then the result is, too.
    """
    is_flat = same is not None and _ignores_shape(node)
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        result: Any = (value.dtype, value.numel() if is_flat else value.shape, value.device)
    else:
        result = type(value).__name__
    note = node.meta.get(SIZES)
    if note is not None:  # nodes that are equal at these sizes may differ at others
        result = (result, note.text)

    def named(argument: fx.Node) -> fx.Node:
        first = (same or {}).get(argument, argument)
        return first if is_flat or _shape(first) == _shape(argument) else argument

    try:
        key = (node.target, _frozen(node.args, named), _frozen(node.kwargs, named), result)
        hash(key)
    except TypeError:
        return None
    return key


def _ignores_shape(node: fx.Node) -> bool:
    """True for operators of number by number, without broadcasting, and of all numbers at once."""
    if op_name(node) in ("amax", "amin", "max", "min"):
        return len(node.args) == 1 or node.args[1:] == ([],)
    sizes = {n.meta["val"].numel() for n in node.all_input_nodes if is_tensor(n)} - {1}
    is_pointwise = has_tag(node, torch.Tag.pointwise) or op_name(node) in _CASTS
    return is_pointwise and is_tensor(node) and sizes <= {node.meta["val"].numel()}


def _shape(node: fx.Node) -> torch.Size | None:
    return node.meta["val"].shape if is_tensor(node) else None


def _frozen(value: Any, named: Callable[[fx.Node], fx.Node]) -> Hashable:
    """Returns ``value`` as a hashable tree in which 1, 1.0 and True stay apart."""
    if isinstance(value, fx.Node):
        return _signature(value) if is_constant(value) else named(value)
    if isinstance(value, list | tuple):
        return tuple(_frozen(item, named) for item in value)
    if isinstance(value, dict):
        return tuple((key, _frozen(item, named)) for key, item in value.items())
    if isinstance(value, slice):
        ends = (value.start, value.stop, value.step)
        return ("slice", *(_frozen(end, named) for end in ends))
    hash(value)  # raises TypeError, as _signature expects
    return (type(value), value, repr(value))  # 0.0 and -0.0 are equal


def hoist_behind_inputs(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Moves each of ``nodes`` that is the forward's directly behind the last of its inputs.

    Constants among its inputs are copied beside it, so that they do not hold it back. A node's
    rank is its index; a moved node has the rank of its last input. Sorting by (rank, index) keeps
    inputs before their readers.
    """
    moved = {n for n in nodes if n.meta.get("partitioner_tag") == "is_forward"}
    reader_of: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node in moved:
            reader_of.update(_with_own_constants(graph, node))
    last_input = len(graph.find_nodes(op="placeholder")) - 1
    rank: dict[fx.Node, int] = {}
    index = {node: number for number, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node in moved:
            sources = (rank[source] for source in node.all_input_nodes if source not in reader_of)
            rank[node] = max([last_input, *sources])
        else:
            rank[node] = index[node]
    for constant, reader in reader_of.items():
        rank[constant] = rank[reader]
    order = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    apply_order(graph, sorted(order, key=lambda node: (rank[node], index[node])))


def _with_own_constants(graph: fx.Graph, node: fx.Node) -> dict[fx.Node, fx.Node]:
    """Copies the constants that ``node`` reads, for it alone; returns copy -> ``node``."""
    copies = {}
    for source in node.all_input_nodes:
        if is_constant(source):
            with graph.inserting_before(node):
                copy = graph.node_copy(source)
            node.replace_input_with(source, copy)
            copies[copy] = node
    return copies
