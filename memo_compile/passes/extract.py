"""Copies some nodes of a graph into a graph of their own, and makes nodes like others."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memo_compile.analysis.views import makers_of
from memo_compile.passes.at_numbers import SIZES
from memo_compile.torch_private import fx_graphs


def placeholder_like(graph: fx.Graph, name: str, node: fx.Node) -> fx.Node:
    """Adds a placeholder with a value like that of ``node`` behind the others of ``graph``."""
    placeholder = graph.placeholder(name)
    placeholder.meta = {key: node.meta[key] for key in ("val", SIZES) if key in node.meta}
    return placeholder


def call_like(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    like: torch.Tensor,
) -> fx.Node:
    """Adds a call to ``graph``, whose value is the fake ``like``."""
    node = graph.call_function(target, args, kwargs or {})
    node.meta["val"] = like
    return node


@dataclass(slots=True, kw_only=True)
class Extract:
    """A graph of copies of some nodes of the graph of ``owner``."""

    owner: fx.GraphModule
    graph: fx.Graph
    """Without its output, which ``finish`` adds."""
    inputs: list[fx.Node]
    """The nodes of ``owner`` that are placeholders here."""
    copies: dict[fx.Node, fx.Node]
    """Node of ``owner`` -> its copy: inputs first, then the others, in order."""

    @property
    def gm(self) -> fx.GraphModule:
        """The graph as a module; it must have its output."""
        return fx_graphs.graph_module(self.owner, self.graph)

    def finish(self, outputs: Sequence[fx.Node]) -> None:
        """Lets the graph return the copies of ``outputs``."""
        self.graph.output(tuple(self.copies[output] for output in outputs))


def extract(
    gm: fx.GraphModule, outputs: Sequence[fx.Node], is_given: Callable[[fx.Node], bool]
) -> Extract:
    """Copies the makers of ``outputs``, back to nodes that are given, which become placeholders."""
    needed = makers_of(outputs, lambda node: not is_given(node))
    nodes = [node for node in gm.graph.nodes if node in needed]
    return copied(gm, list(filter(is_given, nodes)), nodes)


def copied(gm: fx.GraphModule, inputs: list[fx.Node], nodes: Iterable[fx.Node]) -> Extract:
    """Copies ``nodes`` in order, each behind its makers, back to ``inputs``, the placeholders."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = placeholder_like(graph, f"in_{len(copies)}", node)

    def make(node: fx.Node) -> None:
        if node not in copies:
            for source in node.all_input_nodes:
                make(source)
            copies[node] = graph.node_copy(node, copies.__getitem__)

    for node in nodes:
        make(node)
    return Extract(owner=gm, graph=graph, inputs=inputs, copies=copies)
