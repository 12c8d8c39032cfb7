"""Takes some nodes of a graph into a graph of their own, and makes nodes like others."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memo_compile.analysis.views import makers_of
from memo_compile.passes.at_numbers import SIZES
from memo_compile.torch_private import fx_graphs


def placeholder_like(graph: fx.Graph, name: str, node: fx.Node) -> fx.Node:
    """A placeholder behind the others of ``graph``, of a value like that of ``node``."""
    made = graph.placeholder(name)
    made.meta = {key: node.meta[key] for key in ("val", SIZES) if key in node.meta}
    return made


def call_like(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    like: torch.Tensor,
) -> fx.Node:
    """A new call in ``graph``, whose value is like the fake ``like``."""
    node = graph.call_function(target, args, kwargs or {})
    node.meta["val"] = like
    return node


@dataclass(slots=True, kw_only=True)
class Extract:
    """A graph of some nodes of another: what it is given, and the copy of every node."""

    owner: fx.GraphModule
    graph: fx.Graph
    """Without its output, which ``finish`` gives it."""
    inputs: list[fx.Node]
    made: dict[fx.Node, fx.Node]
    """Inputs first, then the others, in order."""

    @property
    def gm(self) -> fx.GraphModule:
        """The graph as a module; it must have its output."""
        return fx_graphs.graph_module(self.owner, self.graph)

    def finish(self, outputs: Sequence[fx.Node]) -> None:
        """The graph returns the copies of ``outputs``."""
        self.graph.output(tuple(self.made[output] for output in outputs))


def extract(
    gm: fx.GraphModule, outputs: Sequence[fx.Node], is_given: Callable[[fx.Node], bool]
) -> Extract:
    """What makes ``outputs``, back to the nodes that are given; those become placeholders."""
    needed = makers_of(outputs, lambda node: not is_given(node))
    nodes = [node for node in gm.graph.nodes if node in needed]
    return copied(gm, list(filter(is_given, nodes)), nodes)


def copied(gm: fx.GraphModule, inputs: list[fx.Node], nodes: Iterable[fx.Node]) -> Extract:
    """``nodes`` in this order, each behind what it is made of from ``inputs``, the placeholders."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        made[node] = placeholder_like(graph, f"in_{len(made)}", node)

    def make(node: fx.Node) -> None:
        if node not in made:
            for source in node.all_input_nodes:
                make(source)
            made[node] = graph.node_copy(node, lambda source: made[source])

    for node in nodes:
        make(node)
    return Extract(owner=gm, graph=graph, inputs=inputs, made=made)
