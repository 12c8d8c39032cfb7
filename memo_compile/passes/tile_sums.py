"""Takes the running sums out of a tile: each becomes a region of one operator, run in place.

A sum's result lies in the bytes of what came before. A lowering that makes several kernels of
``acc + sum(x)`` may put the second term there before it has read the first, so that nothing else
may stand in the region, and operators run one by one (``RegionGraph.op_by_op``).

Rewrite, tile(x, acc):                  ->    tile(x):            sum0(acc, picked):
    picked = gather(x)                            picked = ...        return add(acc, picked)
    return (picked, add(acc, picked))             return (picked,)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from memo_compile.analysis.regions import RegionGraph
from memo_compile.analysis.views import is_view, results_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """What a sum reads of its tile: an input (``is_input``) or an output, by position."""

    is_input: bool
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSum:
    """One running sum: ``region(total, *terms)``, written over ``total``."""

    region: RegionGraph
    total: int
    """Output of the part before the tiles, which holds what was summed so far."""
    terms: tuple[Term, ...]


def take_sums_out(tile: RegionGraph, num_rows: int, totals: Sequence[int]) -> tuple[TileSum, ...]:
    """The sums, which ``tile`` loses: its last outputs are what they read.

    ``tile`` returns ``num_rows`` rows and then its sums, and its last inputs are the sums so far,
    ``totals``. What a sum reads of the rows that the tile returns is returned a second time, as a
    copy: the whole that the rows lie in is not complete before the last tile.
    """
    graph = tile.gm.graph
    end, results = graph.output_node(), results_of(graph)
    inputs = graph.find_nodes(op="placeholder")
    so_far = inputs[len(inputs) - len(totals) :]
    rows, read, sums = results[:num_rows], dict[fx.Node, int](), []
    for total, node in zip(totals, results[num_rows:], strict=True):
        alone, sources = _sum_graph(node)
        terms = (
            Term(is_input=True, index=inputs.index(source))
            if source.op == "placeholder"
            else Term(is_input=False, index=read.setdefault(source, num_rows + len(read)))
            for source in sources
        )
        region = replace(
            tile,
            gm=fx.GraphModule(tile.gm, alone),
            external_outputs=frozenset(),
            static_inputs=(),
            op_by_op=True,
        )
        sums.append(TileSum(region=region, total=total, terms=tuple(terms)))
    end.args = ((*rows, *(_copied(end, node) if node in rows else node for node in read)),)
    for node in reversed(graph.nodes):
        if not node.users and (node.op == "call_function" or node in so_far):
            graph.erase_node(node)
    tile.gm.recompile()
    return tuple(sums)


def _sum_graph(total: fx.Node) -> tuple[fx.Graph, list[fx.Node]]:
    """``total`` by itself, with the views that it reads through, and what those look at."""
    acc, *others = total.all_input_nodes
    graph = fx.Graph()
    made = {acc: _placeholder(graph, acc)}
    sources: list[fx.Node] = []
    views: list[fx.Node] = []
    for node in others:
        while is_view(node):
            views.append(node)
            (node,) = node.all_input_nodes
        if node not in made:
            made[node] = _placeholder(graph, node)
            sources.append(node)
    for node in [*dict.fromkeys(reversed(views)), total]:
        made[node] = graph.node_copy(node, lambda source: made[source])
    graph.output((made[total],))
    return graph, sources


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    made = graph.placeholder(node.name)
    made.meta = {"val": node.meta["val"]}
    return made


def _copied(end: fx.Node, node: fx.Node) -> fx.Node:
    with end.graph.inserting_before(end):
        made = end.graph.call_function(torch.ops.aten.clone.default, (node,))
    made.meta["val"] = node.meta["val"]
    return made
