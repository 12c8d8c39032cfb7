"""Adds up sums over the rows of a chain that runs in tiles: each has a total, which tiles add to.

The total of 16-bit numbers is float32, and is rounded once, behind the last tile. Rounded at each
of 64 tiles, a weight's gradient would be four times as far from the exact one as eager's.

What adds to a total is taken out of the tile, and is a region of one operator that writes its
result over the total that it reads. A lowering that makes several kernels of ``acc + sum(x)`` may
write the second term before it has read the first. So nothing else stands in the region, and its
operators run one by one (``RegionGraph.op_by_op``).

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
"""A product that contracts the rows -> what adds it to a total of the operands' type, and what adds
it, of 16-bit operands on CUDA, to a float32 total."""

_SHORT = (torch.bfloat16, torch.float16)


def is_short_product(node: fx.Node) -> bool:
    """True for a product of 16-bit numbers."""
    return node.target in _ACCUMULATING and is_tensor(node) and node.meta["val"].dtype in _SHORT


@dataclass(slots=True, kw_only=True)
class Totals:
    """Makes the nodes that add up the sums of a chain on ``device``."""

    device: torch.device
    rounds_products: bool
    """True: the total of 16-bit products has 16 bits, so that it can lie where its result does."""
    _widened: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Operand -> the same in float32."""

    def is_wide(self, node: fx.Node) -> bool:
        """True for a sum whose total is float32, to be rounded behind the last tile."""
        if self.rounds_products and node.target in _ACCUMULATING:
            return False
        return node.meta["val"].dtype in _SHORT

    def like(self, node: fx.Node) -> torch.Tensor:
        """A fake of the total of the sum ``node``."""
        value: torch.Tensor = node.meta["val"]
        return value.new_empty(value.shape, dtype=torch.float32) if self.is_wide(node) else value

    def rounded(self, graph: fx.Graph, node: fx.Node, total: fx.Node) -> fx.Node:
        """The value of the sum ``node``, from the ``total`` of all tiles."""
        if not self.is_wide(node):
            return total
        value = node.meta["val"]
        return call_like(graph, _to_dtype, (total, value.dtype), like=value)

    def added(
        self,
        graph: fx.Graph,
        node: fx.Node,
        acc: fx.Node,
        made: Mapping[fx.Node, fx.Node],
        share: float,
    ) -> fx.Node:
        """The total behind a tile, which has a ``share`` of all rows: ``acc`` plus the sum over it.

        ``made`` gives the tile's value of each node of the chain.
        """
        operands = [made[source] for source in node.all_input_nodes]
        like = self.like(node)
        if node.target in _ACCUMULATING:
            add, add_wide = _ACCUMULATING[node.target]
            if not self.is_wide(node):
                return call_like(graph, add, (acc, *operands), like=like)
            if self.device.type == "cuda":
                return call_like(graph, add_wide, (acc, *operands, torch.float32), like=like)
            return call_like(graph, add, (acc, *map(self._in_float32, operands)), like=like)
        partial = graph.node_copy(node, lambda source: made[source])
        if self.is_wide(node):
            partial.update_kwarg("dtype", torch.float32)
            partial.meta["val"] = like
        alpha = {"alpha": share} if op_name(node) == "mean" else {}
        return call_like(graph, _aten.add.Tensor, (acc, partial), alpha, like=like)

    def _in_float32(self, operand: fx.Node) -> fx.Node:
        """``operand`` in float32, made once for all sums of the tile."""
        if operand not in self._widened:
            behind = operand.next
            while behind.op == "placeholder":
                behind = behind.next
            like = _to_dtype(operand.meta["val"], torch.float32)
            with operand.graph.inserting_before(behind):
                wide = call_like(operand.graph, _to_dtype, (operand, torch.float32), like=like)
            self._widened[operand] = wide
        return self._widened[operand]


def take_sums_out(
    tile: RegionGraph,
    tile_inputs: Sequence[Operand],
    num_rows: int,
    totals: Sequence[int],
) -> list[tuple[RegionGraph, RunningSum]]:
    """Take what adds to the totals out of ``tile``, and return a region of each.

    ``tile`` reads ``tile_inputs`` and then the totals so far, which are the outputs ``totals`` of
    the part before the tiles. It returns ``num_rows`` values that have rows, and then the new
    totals; in place of those it then returns what the regions read. If a region reads a value that
    has rows, ``tile`` returns a copy besides: what it writes is a slice of the whole value, which
    is complete behind the last tile only.
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
    end.args = ((*rows, *(_copy(end, node) if node in rows else node for node in read)),)
    for node in reversed(graph.nodes):
        if not node.users and (node.op == "call_function" or node in so_far):
            graph.erase_node(node)
    tile.gm.recompile()
    return sums


def _sum_graph(total: fx.Node) -> tuple[fx.Graph, list[fx.Node]]:
    """A graph of ``total`` and of the views that it reads, and what else it reads than ``acc``."""
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


def _copy(end: fx.Node, node: fx.Node) -> fx.Node:
    """A copy of ``node``, made in front of ``end``."""
    with end.graph.inserting_before(end):
        return call_like(end.graph, _aten.clone.default, (node,), like=node.meta["val"])
