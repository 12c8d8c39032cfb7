"""Takes the running sums out of a tile: each becomes a region of one operator, run in place.

A sum's result lies in the bytes of what came before. A lowering that makes several kernels of
``acc + sum(x)`` may put the second term there before it has read the first, so that nothing else
may stand in the region, and operators run one by one (``RegionGraph.op_by_op``).

Rewrite, tile(x, acc):                  ->    tile(x):            sum0(acc, picked):
    picked = gather(x)                            picked = ...        return add(acc, picked)
    return (picked, add(acc, picked))             return (picked,)
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from memo_compile import shim
from memo_compile.analysis.regions import RegionGraph, layout_of
from memo_compile.analysis.views import is_view, results_of
from memo_compile.passes.extract import placeholder_like
from memo_compile.step.tilings import Operand, Ref, RunningSum, Source


def take_sums_out(
    name: str,
    tile: RegionGraph,
    tile_inputs: Sequence[Operand],
    num_rows: int,
    totals: Sequence[int],
) -> list[tuple[RegionGraph, RunningSum]]:
    """Take the sums of region ``name`` out of ``tile``; its last outputs become what they read.

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
            name=f"{name}.sum{len(sums)}",
            gm=shim.graph_module(tile.gm, alone),
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
