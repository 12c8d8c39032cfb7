"""Adds up the sums of a chain in tiles: in which numbers, by which operators, in which regions.

Sums of 16-bit numbers are added up in float32 and rounded once, behind the last tile. Rounded at
each of 64 tiles, a weight's gradient would be four times as far from the exact one as eager's.

Each sum is taken out of the tile and becomes a region of one operator, run in place. Its result
lies in the bytes of what came before. A lowering that makes several kernels of ``acc + sum(x)`` may
put the second term there before it has read the first, so that nothing else may stand in the
region, and operators run one by one (``RegionGraph.op_by_op``).

Rewrite, tile(x, acc):                  ->    tile(x):            sum0(acc, picked):
    picked = gather(x)                            picked = ...        return add(acc, picked)
    return (picked, add(acc, picked))             return (picked,)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from memo_compile.analysis.regions import RegionGraph, layout_of
from memo_compile.analysis.structure import op_name
from memo_compile.analysis.views import is_tensor, is_view, results_of
from memo_compile.passes.extract import placeholder_like
from memo_compile.step.tilings import Operand, Ref, RunningSum, Source
from memo_compile.torch_private import fx_graphs

_aten = torch.ops.aten
_to_dtype = torch.ops.prims.convert_element_type.default

_ACCUMULATING = {
    _aten.mm.default: (_aten.addmm.default, _aten.addmm.dtype),
    _aten.bmm.default: (_aten.baddbmm.default, _aten.baddbmm.dtype),
}
"""Products that contract the rows, and those that add to what the tiles before made: to numbers of
the operands' type; on CUDA also to float32 numbers, where the operands have 16 bits."""

_SHORT = (torch.bfloat16, torch.float16)


def is_short_product(node: fx.Node) -> bool:
    """True for a product of 16-bit numbers."""
    return node.target in _ACCUMULATING and is_tensor(node) and node.meta["val"].dtype in _SHORT


@dataclass(slots=True, kw_only=True)
class Totals:
    """How the sums of a chain are added up over its tiles on ``device``."""

    device: torch.device
    rounds_products: bool
    """Products of 16-bit numbers are added up in 16 bits, where they take no memory beside."""
    _widened: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Operand -> the same in float32."""

    def is_wide(self, node: fx.Node) -> bool:
        """True for a sum that is added up in float32 and then rounded."""
        if self.rounds_products and node.target in _ACCUMULATING:
            return False
        return node.meta["val"].dtype in _SHORT

    def like(self, node: fx.Node) -> torch.Tensor:
        """A fake of what the sum ``node`` is added up in."""
        value: torch.Tensor = node.meta["val"]
        return value.new_empty(value.shape, dtype=torch.float32) if self.is_wide(node) else value

    def rounded(self, graph: fx.Graph, node: fx.Node, total: fx.Node) -> fx.Node:
        """The sum ``node``, of all tiles' ``total``."""
        if not self.is_wide(node):
            return total
        value = node.meta["val"]
        return _call(graph, _to_dtype, (total, value.dtype), like=value)

    def added(
        self,
        graph: fx.Graph,
        node: fx.Node,
        acc: fx.Node,
        made: Mapping[fx.Node, fx.Node],
        share: float,
    ) -> fx.Node:
        """``acc`` and the sum ``node`` over a tile, a ``share`` of all rows, from what it made."""
        operands = [made[source] for source in node.all_input_nodes]
        like = self.like(node)
        if node.target in _ACCUMULATING:
            add, add_wide = _ACCUMULATING[node.target]
            if not self.is_wide(node):
                return _call(graph, add, (acc, *operands), like=like)
            if self.device.type == "cuda":
                return _call(graph, add_wide, (acc, *operands, torch.float32), like=like)
            return _call(graph, add, (acc, *map(self._in_float32, operands)), like=like)
        partial = graph.node_copy(node, lambda source: made[source])
        if self.is_wide(node):
            partial.update_kwarg("dtype", torch.float32)
            partial.meta["val"] = like
        alpha = {"alpha": share} if op_name(node) == "mean" else {}
        return _call(graph, _aten.add.Tensor, (acc, partial), alpha, like=like)

    def _in_float32(self, operand: fx.Node) -> fx.Node:
        """``operand`` in float32, made once for all sums of the tile."""
        if operand not in self._widened:
            behind = operand.next
            while behind.op == "placeholder":
                behind = behind.next
            with operand.graph.inserting_before(behind):
                wide = operand.graph.call_function(_to_dtype, (operand, torch.float32))
            wide.meta["val"] = _to_dtype(operand.meta["val"], torch.float32)
            self._widened[operand] = wide
        return self._widened[operand]


def _call(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    like: torch.Tensor,
) -> fx.Node:
    node = graph.call_function(target, args, kwargs or {})
    node.meta["val"] = like
    return node


def take_sums_out(
    tile: RegionGraph,
    tile_inputs: Sequence[Operand],
    num_rows: int,
    totals: Sequence[int],
) -> list[tuple[RegionGraph, RunningSum]]:
    """Take the sums out of ``tile``, as regions; its last outputs become what they read.

    ``tile`` returns ``num_rows`` rows and then its sums. It reads ``tile_inputs`` and then the sums
    so far, which are ``totals`` of the part before the tiles. What a sum reads of the rows that the
    tile returns is returned a second time, as a copy: the whole that the rows lie in is not
    complete before the last tile.
    """
    graph = tile.gm.graph
    end, results = graph.output_node(), results_of(graph)
    inputs = graph.find_nodes(op="placeholder")
    so_far = inputs[len(inputs) - len(totals) :]
    rows, read = results[:num_rows], dict[fx.Node, int]()
    sums: list[tuple[RegionGraph, RunningSum]] = []
    for total, node in zip(totals, results[num_rows:], strict=True):
        alone, sources = _sum_graph(node)
        terms = []
        for source in sources:
            if source.op == "placeholder":
                terms.append(tile_inputs[inputs.index(source)])
                continue
            made = Ref(source=Source.TILE, index=read.setdefault(source, num_rows + len(read)))
            terms.append(Operand(value=made, whole=layout_of(source.meta["val"])))
        region = replace(
            tile,
            name=f"{tile.name}.sum{len(sums)}",
            gm=fx_graphs.graph_module(tile.gm, alone),
            static_inputs=(),
            op_by_op=True,
        )
        sums.append((region, RunningSum(region=region.name, total=total, terms=tuple(terms))))
    end.args = ((*rows, *(_copied(end, node) if node in rows else node for node in read)),)
    for node in reversed(graph.nodes):
        if not node.users and (node.op == "call_function" or node in so_far):
            graph.erase_node(node)
    tile.gm.recompile()
    return sums


def _sum_graph(total: fx.Node) -> tuple[fx.Graph, list[fx.Node]]:
    """``total`` by itself, with the views that it reads through, and what those look at."""
    acc, *others = total.all_input_nodes
    graph = fx.Graph()
    made = {acc: placeholder_like(graph, acc.name, acc)}
    sources: list[fx.Node] = []
    views: list[fx.Node] = []
    for node in others:
        while is_view(node):
            views.append(node)
            (node,) = node.all_input_nodes
        if node not in made:
            made[node] = placeholder_like(graph, node.name, node)
            sources.append(node)
    for node in [*dict.fromkeys(reversed(views)), total]:
        made[node] = graph.node_copy(node, lambda source: made[source])
    graph.output((made[total],))
    return graph, sources


def _copied(end: fx.Node, node: fx.Node) -> fx.Node:
    with end.graph.inserting_before(end):
        made = end.graph.call_function(torch.ops.aten.clone.default, (node,))
    made.meta["val"] = node.meta["val"]
    return made
