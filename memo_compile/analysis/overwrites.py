"""Which inputs of a joint graph the step overwrites, and which operators read them before."""

from collections.abc import Iterator
from typing import Any

from torch import fx

from memo_compile.analysis.purity import is_write, written_arguments
from memo_compile.analysis.views import is_item, storage_of

READS_OVERWRITTEN = "memo_reads_overwritten"
"""Key of ``node.meta``: the operator reads an input that is overwritten, and runs once."""


def overwritten(graph: fx.Graph) -> set[fx.Node]:
    """Inputs of a joint graph that the step writes into: in the graph, or from what it returns."""
    found = written_storages(graph) | set(_written_by_the_caller(graph))
    return {node for node in found if node.op == "placeholder"}


def written_storages(graph: fx.Graph) -> set[fx.Node]:
    """The makers of all storages that an operator of ``graph`` writes into."""
    return {
        storage_of(target)
        for node in graph.nodes
        if is_write(node)
        for target in written_arguments(node)
    }


def _written_by_the_caller(graph: fx.Graph) -> Iterator[fx.Node]:
    """Inputs whose new value is a result: AOTAutograd describes both (2.11, 2.13)."""
    described: dict[Any, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        if node.meta.get("desc") is not None:
            described[node.meta["desc"]] = node
    for description in graph.output_node().meta.get("desc") or ():
        source = described.get(getattr(description, "mutated_input", None))
        if source is not None:
            yield source


def runs_once(node: fx.Node) -> bool:
    """True for an operator that reads an overwritten input, and for an item of its results."""
    makers = node.all_input_nodes if is_item(node) else [node]
    return any(READS_OVERWRITTEN in maker.meta for maker in makers)
