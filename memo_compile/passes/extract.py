"""Takes some nodes of a graph into a graph of their own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from memo_compile.analysis.views import makers_of


def placeholder_like(graph: fx.Graph, name: str, node: fx.Node) -> fx.Node:
    """A placeholder behind the others of ``graph``, of a value like that of ``node``."""
    made = graph.placeholder(name)
    made.meta = {"val": node.meta["val"]}
    return made


@dataclass(slots=True, kw_only=True)
class Extract:
    """A graph of some nodes of another: what it is given, and the copy of every node."""

    owner: fx.GraphModule
    graph: fx.Graph
    """Without its output, which ``finish`` gives it."""
    inputs: list[fx.Node]
    made: dict[fx.Node, fx.Node]
    """Inputs first, then the others, each in the order of the owner's graph."""

    @property
    def gm(self) -> fx.GraphModule:
        """The graph as a module; it must have its output."""
        return fx.GraphModule(self.owner, self.graph)

    def finish(self, outputs: Sequence[fx.Node]) -> None:
        """The graph returns the copies of ``outputs``."""
        self.graph.output(tuple(self.made[output] for output in outputs))


def extract(
    gm: fx.GraphModule, outputs: Sequence[fx.Node], is_given: Callable[[fx.Node], bool]
) -> Extract:
    """What makes ``outputs``, back to the nodes that are given; those become placeholders."""
    needed = makers_of(outputs, lambda node: not is_given(node))
    inputs = [node for node in gm.graph.nodes if node in needed and is_given(node)]
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        made[node] = placeholder_like(graph, f"in_{len(made)}", node)
    for node in gm.graph.nodes:
        if node in needed and node not in made:
            made[node] = graph.node_copy(node, lambda source: made[source])
    return Extract(owner=gm, graph=graph, inputs=inputs, made=made)
