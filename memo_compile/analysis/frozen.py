"""Values of a joint graph that are made of the model's frozen state alone: dequantised weights.

Whatever a layer computes of frozen parameters, buffers and constants, it can compute again in the
backward from what stays in memory anyhow. Kept in between, it would cost as much as the weights
that the packing saves.
"""

from collections.abc import Collection

import torch
from torch import fx

from memo_compile.analysis.purity import is_collective, is_known, is_random, is_write, runs_once
from memo_compile.analysis.structure import is_matmul, op_name
from memo_compile.analysis.views import bytes_of, is_item, results_of

_DEAR = frozenset("convolution cholesky cholesky_solve triangular_solve inverse svd qr".split())
"""Operators that cost more than to read their inputs, besides matrix products and linalg."""


def frozen_inputs(
    graph: fx.Graph, static_inputs: Collection[int], num_results: int
) -> set[fx.Node]:
    """Parameters and buffers of a joint graph that get no gradient.

    ``static_inputs`` are the positions of all parameters and buffers. The results of the graph are
    ``num_results`` of the forward, then a gradient or None for each input.
    """
    gradients = results_of(graph)[num_results:]
    inputs = graph.find_nodes(op="placeholder")
    return {inputs[at] for at in static_inputs if at < len(gradients) and gradients[at] is None}


def made_of_frozen(
    graph: fx.Graph, frozen: Collection[fx.Node], changing: Collection[fx.Node] = ()
) -> set[fx.Node]:
    """Operators that compute from ``frozen`` inputs and constants alone, and cheaply.

        packed -> bitwise_and -> mul(scale) -> view -> mm(x, view)      all before the mm

    Custom operators are among them: one that only reads frozen weights gives the same each time.
    Matrix products and decompositions are not: they may take longer than what reads them. Nor is
    what is no larger than the ``changing`` inputs behind it, which the program may write between
    the halves: to keep it costs little, and eager code would.
    """
    behind: dict[fx.Node, frozenset[fx.Node]] = {
        node: frozenset({node} & set(changing)) for node in frozen
    }
    made: set[fx.Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        is_copy = runs_once(node) and is_copied_input(node) and sources[0] in behind
        if is_copy or node.op == "get_attr":
            behind[node] = frozenset()
        elif node.op == "call_function" and all(source in behind for source in sources):
            if _is_cheap(node) and is_functional(node) and not runs_once(node):
                behind[node] = frozenset().union(*(behind[source] for source in sources))
                if not behind[node] or bytes_of(node) > sum(map(bytes_of, behind[node])):
                    made.add(node)
    return made


def is_copied_input(node: fx.Node) -> bool:
    """True for a copy of an input."""
    is_clone = node.target is torch.ops.aten.clone.default
    return is_clone and node.all_input_nodes[0].op == "placeholder"


def is_functional(node: fx.Node) -> bool:
    """True for an operator without known effects: no write, no random number, no message.

    A custom operator may still have an effect that it does not declare.
    """
    if is_item(node):
        return is_functional(node.all_input_nodes[0])
    if is_write(node) or is_random(node) or is_collective(node):
        return False
    return is_known(node) or isinstance(node.target, torch._ops.OpOverload)


def _is_cheap(node: fx.Node) -> bool:
    name = op_name(node)
    return not (is_matmul(node) or name in _DEAR or "linalg" in name)
