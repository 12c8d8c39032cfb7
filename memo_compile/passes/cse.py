"""Merges equal computations and moves what all layers share before the first of them."""

import operator
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from memo_compile.analysis.joint_units import forward_part
from memo_compile.analysis.purity import is_constant, is_pure
from memo_compile.analysis.views import storage_of
from memo_compile.passes.at_numbers import SIZES
from memo_compile.passes.hoist import apply_order


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

    Constants (full, iota) are never merged: every region can make its own for free. Neither is what
    the graph returns, nor what shares memory with that: two equal results are two tensors, and the
    user may write into one of them.

    Nor does a value of the forward stand for one that the program's own backward computes anew: an
    autograd.Function that dequantises a weight in both halves does so to keep nothing in between.
    Cost: linear in the size of the graph.
    """

    name: ClassVar[str] = "merge-common-subexpressions"
    is_required: ClassVar[bool] = False

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Merge in place."""
        merged = _merge(gm.graph)
        if merged:
            hoist_behind_inputs(gm.graph, merged)
        return PassResult(gm, bool(merged))


def _merge(graph: fx.Graph) -> set[fx.Node]:
    """Replace later duplicates by the first; returns the survivors."""
    seen: dict[Hashable, fx.Node] = {}
    survivors: set[fx.Node] = set()
    returned = set(_returned(graph))
    forward = forward_part(graph)
    for node in list(graph.nodes):
        if not is_pure(node) or is_constant(node) or storage_of(node) in returned:
            continue
        signature = _signature(node)
        key = None if signature is None else (node in forward, signature)
        first = node if key is None else seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            survivors.add(first)
    return survivors


def _returned(graph: fx.Graph) -> Iterator[fx.Node]:
    """What makes the memory of the results: nodes, and for parts of a tuple its operator too."""
    for node in graph.output_node().all_input_nodes:
        root = storage_of(node)
        yield root
        if root.target is operator.getitem:
            yield root.all_input_nodes[0]


def _signature(node: fx.Node) -> Hashable | None:
    """What decides the value of ``node``; None where it cannot be told."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        result: Any = (value.dtype, tuple(value.shape), value.device)
    else:
        result = type(value).__name__
    said = node.meta.get(SIZES)
    if said is not None:  # equal at these sizes is not equal at all
        result = (result, said.text)
    try:
        key = (node.target, _frozen(node.args), _frozen(node.kwargs), result)
        hash(key)
    except TypeError:
        return None
    return key


def _frozen(value: Any) -> Hashable:
    """``value`` as a hashable tree in which 1, 1.0 and True stay apart."""
    if isinstance(value, fx.Node):
        return _signature(value) if is_constant(value) else value
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in value.items())
    if isinstance(value, slice):
        return ("slice", _frozen(value.start), _frozen(value.stop), _frozen(value.step))
    hash(value)
    return (type(value), value, repr(value))  # 0.0 and -0.0 are equal


def hoist_behind_inputs(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Move each of ``nodes`` that is the forward's to right behind the last of its inputs.

    Constants among its inputs are made anew beside it, so that they do not hold it back. A node's
    rank is its index, a moved node's the rank of its last input; sorting by (rank, index) keeps
    inputs before their readers.
    """
    moved = {n for n in nodes if n.meta.get("partitioner_tag") == "is_forward"}
    private = {}
    for node in graph.nodes:
        if node in moved:
            private.update(_with_own_constants(graph, node))
    first = len(graph.find_nodes(op="placeholder")) - 1
    rank: dict[fx.Node, int] = {}
    index = {node: number for number, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node in moved:
            sources = (rank[source] for source in node.all_input_nodes if source not in private)
            rank[node] = max([first, *sources])
        else:
            rank[node] = index[node]
    for constant, reader in private.items():
        rank[constant] = rank[reader]
    order = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    apply_order(graph, sorted(order, key=lambda node: (rank[node], index[node])))


def _with_own_constants(graph: fx.Graph, node: fx.Node) -> dict[fx.Node, fx.Node]:
    """Give ``node`` constants that nobody else reads; returns constant -> ``node``."""
    made = {}
    for source in node.all_input_nodes:
        if is_constant(source):
            with graph.inserting_before(node):
                copied = graph.node_copy(source)
            node.replace_input_with(source, copied)
            made[copied] = node
    return made
