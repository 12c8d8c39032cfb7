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
from memo_compile.analysis.views import is_view, makers_of, results_of
from memo_compile.passes.tiles import TiledRegion


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSum:
    """One running sum: ``region(acc, *terms)``, written over ``acc``.

    ``terms`` are inputs of the tile (``is_input``) or its outputs, by position.
    """

    region: RegionGraph
    output: int
    """Of the tile as it was, which the sum makes."""
    terms: tuple["Term", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """What a sum reads of its tile."""

    is_input: bool
    index: int


def take_sums_out(tiled: TiledRegion) -> tuple[RegionGraph, tuple[TileSum, ...]]:
    """The tile without its sums, whose last outputs are what they read, and the sums.

    The inputs of the new tile are those of the old one without the sums before. What a sum reads
    of the rows that the tile returns is returned a second time, as a copy: the whole that the rows
    lie in is not complete before the last tile.
    """
    gm = tiled.tile.gm
    inputs = gm.graph.find_nodes(op="placeholder")
    results = results_of(gm.graph)
    num_rows = sum(output.accumulator is None for output in tiled.tile_outputs)
    rows = list(results[:num_rows])
    outputs: list[fx.Node] = []
    sums = []
    for at, total in enumerate(results[num_rows:], start=num_rows):
        assert isinstance(total, fx.Node)
        graph, sources = _sum_graph(total)
        terms = []
        for source in sources:
            if source.op == "placeholder":
                terms.append(Term(is_input=True, index=inputs.index(source)))
                continue
            if source not in outputs:
                outputs.append(source)
            terms.append(Term(is_input=False, index=num_rows + outputs.index(source)))
        region = replace(
            tiled.tile,
            gm=fx.GraphModule(gm, graph),
            external_outputs=frozenset(),
            static_inputs=(),
            op_by_op=True,
        )
        sums.append(TileSum(region=region, output=at, terms=tuple(terms)))
    kept = inputs[: len(inputs) - len(sums)]
    return replace(tiled.tile, gm=_without_sums(gm, kept, rows, outputs)), tuple(sums)


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


def _without_sums(
    gm: fx.GraphModule, inputs: Sequence[fx.Node], rows: Sequence[fx.Node], more: Sequence[fx.Node]
) -> fx.GraphModule:
    """``gm`` with fewer inputs, and outputs ``rows`` and ``more``."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {node: _placeholder(graph, node) for node in inputs}
    needed = makers_of([*rows, *more], lambda node: node not in inputs)
    for node in gm.graph.nodes:
        if node in needed and node not in made:
            made[node] = graph.node_copy(node, lambda source: made[source])
    outputs = [made[node] for node in rows]
    for node in more:
        out = made[node]
        if node in rows:
            out = graph.call_function(torch.ops.aten.clone.default, (out,))
            out.meta["val"] = node.meta["val"]
        outputs.append(out)
    graph.output(tuple(outputs))
    return fx.GraphModule(gm, graph)
