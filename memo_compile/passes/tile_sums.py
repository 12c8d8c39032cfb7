"""Adds up sums over the rows of a chain that runs in tiles: every tile adds to a running total.

The total of 16-bit numbers is float32, and is rounded once, behind the last tile. Rounded at each
of 64 tiles, a weight's gradient would be four times as far from the exact one as eager's.

The addition is taken out of the tile: it is a region of one operator that writes its result over
the total that it reads. A lowering that makes several kernels of ``acc + sum(x)`` may write the
second term before it has read the first. So nothing else is in the region, and its operators run
one by one (``RegionGraph.op_by_op``).

Rewrite, tile(x, acc):                  ->    tile(x):            sum0(acc, picked):
    picked = gather(x)                            picked = ...        return add(acc, picked)
    return (picked, add(acc, picked))             return (picked,)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from memo_compile.analysis.regions import RegionGraph, layout_of
from memo_compile.analysis.structure import op_name
from memo_compile.analysis.views import is_tensor, is_view, results_of
from memo_compile.passes.extract import call_like, placeholder_like
from memo_compile.step.tilings import Operand, Ref, RunningSum, Source
from memo_compile.torch_private import fx_graphs

_aten = torch.ops.aten
_to_dtype = torch.ops.prims.convert_element_type.default

_ACCUMULATING = {
    _aten.mm.default: (_aten.addmm.default, _aten.addmm.dtype),
    _aten.bmm.default: (_aten.baddbmm.default, _aten.baddbmm.dtype),
}
"""Product that contracts the rows -> the operator that adds it to a total of the operands' dtype,
and the one that adds it, of 16-bit operands on CUDA, to a float32 total."""

_SHORT = (torch.bfloat16, torch.float16)


def is_short_product(node: fx.Node) -> bool:
    """True for a product of 16-bit numbers."""
    return node.target in _ACCUMULATING and is_tensor(node) and node.meta["val"].dtype in _SHORT


@dataclass(slots=True, kw_only=True)
class Totals:
    """Makes the nodes that add up the sums of a chain on ``device``."""

    device: torch.device
    rounds_products: bool
    """True: totals of 16-bit products have 16 bits, so that they can lie where their results do."""
    _widened: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Operand -> its copy in float32."""

    def is_wide(self, node: fx.Node) -> bool:
        """True for a sum whose total is float32, to be rounded behind the last tile."""
        if self.rounds_products and node.target in _ACCUMULATING:
            return False
        return node.meta["val"].dtype in _SHORT

    def like(self, node: fx.Node) -> torch.Tensor:
        """Returns a fake of the total of the sum ``node``."""
        value: torch.Tensor = node.meta["val"]
        return value.new_empty(value.shape, dtype=torch.float32) if self.is_wide(node) else value

    def rounded(self, graph: fx.Graph, node: fx.Node, total: fx.Node) -> fx.Node:
        """Returns the value of ``node``, one sum or several added up, from all tiles' ``total``."""
        value, seen = node.meta["val"], total.meta["val"]
        if seen.dtype is not value.dtype:
            like = seen.new_empty(seen.shape, dtype=value.dtype)
            total = call_like(graph, _to_dtype, (total, value.dtype), like=like)
        if seen.shape == value.shape:
            return total
        return call_like(graph, _aten.view.default, (total, list(value.shape)), like=value)

    def added(
        self,
        graph: fx.Graph,
        node: fx.Node,
        acc: fx.Node,
        tile_value: Mapping[fx.Node, fx.Node],
        share: float,
    ) -> fx.Node:
        """Returns the total behind a tile: ``acc`` plus the sum ``node`` over the tile's rows.

        ``tile_value`` has the tile's node for each node of the chain; ``share`` is the tile's share
        of all rows.
        """
        operands = [tile_value[source] for source in node.all_input_nodes]
        like = self.like(node)
        if node.target in _ACCUMULATING:
            add, add_wide = _ACCUMULATING[node.target]
            if not self.is_wide(node):
                return call_like(graph, add, (acc, *operands), like=like)
            if self.device.type == "cuda":
                return call_like(graph, add_wide, (acc, *operands, torch.float32), like=like)
            return call_like(graph, add, (acc, *map(self._in_float32, operands)), like=like)
        partial = graph.node_copy(node, lambda source: tile_value[source])
        if self.is_wide(node):
            partial.update_kwarg("dtype", torch.float32)
            partial.meta["val"] = like
        alpha = {"alpha": share} if op_name(node) == "mean" else {}
        return call_like(graph, _aten.add.Tensor, (acc, partial), alpha, like=like)

    def _in_float32(self, operand: fx.Node) -> fx.Node:
        """Returns ``operand`` in float32, converted once for all sums of the tile."""
        if operand not in self._widened:
            next_node = operand.next
            while next_node.op == "placeholder":
                next_node = next_node.next
            like = _to_dtype(operand.meta["val"], torch.float32)
            with operand.graph.inserting_before(next_node):
                wide = call_like(operand.graph, _to_dtype, (operand, torch.float32), like=like)
            self._widened[operand] = wide
        return self._widened[operand]


def take_sums_out(
    tile: RegionGraph, tile_inputs: Sequence[Operand], num_rows: int, totals: Sequence[int]
) -> list[tuple[RegionGraph, RunningSum]]:
    """Takes the additions to totals out of ``tile``; returns a region for each.

    ``tile`` reads ``tile_inputs`` and then the totals so far, which are the outputs ``totals`` of
    the part before the tiles. It returns ``num_rows`` values that have rows, and then the new
    totals; afterwards, in place of these, the values that the additions read. If an addition reads
    a value that has rows, ``tile`` returns a copy of it: the value itself is a slice of a whole,
    which is complete only behind the last tile.
    """
    graph = tile.gm.graph
    end, results = graph.output_node(), results_of(graph)
    inputs = graph.find_nodes(op="placeholder")
    old_totals = inputs[len(inputs) - len(totals) :]
    rows, result_of = results[:num_rows], dict[fx.Node, int]()
    sums: list[tuple[RegionGraph, RunningSum]] = []
    for total, node in zip(totals, results[num_rows:], strict=True):
        sum_graph, sources = _sum_graph(node)
        terms = []
        for source in sources:
            if source.op == "placeholder":
                terms.append(tile_inputs[inputs.index(source)])
                continue
            index = result_of.setdefault(source, num_rows + len(result_of))
            term = Ref(source=Source.TILE, index=index)
            terms.append(Operand(value=term, whole=layout_of(source.meta["val"])))
        name, gm = f"{tile.name}.sum{len(sums)}", fx_graphs.graph_module(tile.gm, sum_graph)
        region = replace(tile, name=name, gm=gm, static_inputs=(), op_by_op=True)
        sums.append((region, RunningSum(region=region.name, total=total, terms=tuple(terms))))
    end.args = ((*rows, *(_copy(end, node) if node in rows else node for node in result_of)),)
    for node in reversed(graph.nodes):
        if not node.users and (node.op == "call_function" or node in old_totals):
            graph.erase_node(node)
    tile.gm.recompile()
    return sums


def _sum_graph(total: fx.Node) -> tuple[fx.Graph, list[fx.Node]]:
    """Returns a graph of ``total`` and the views that it reads, and its inputs behind ``acc``."""
    acc, *terms = total.all_input_nodes
    graph = fx.Graph()
    copies = {acc: placeholder_like(graph, acc.name, acc)}
    sources: list[fx.Node] = []
    views: list[fx.Node] = []
    for node in terms:
        while is_view(node):
            views.append(node)
            (node,) = node.all_input_nodes
        if node not in copies:
            copies[node] = placeholder_like(graph, node.name, node)
            sources.append(node)
    for node in [*dict.fromkeys(reversed(views)), total]:
        copies[node] = graph.node_copy(node, lambda source: copies[source])
    graph.output((copies[total],))
    return graph, sources


def _copy(end: fx.Node, node: fx.Node) -> fx.Node:
    """Adds a copy of ``node`` in front of ``end``."""
    with end.graph.inserting_before(end):
        return call_like(end.graph, _aten.clone.default, (node,), like=node.meta["val"])
