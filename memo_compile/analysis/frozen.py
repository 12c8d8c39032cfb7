"""Finds what a joint graph computes from the model's frozen state alone: dequantised weights.

The backward can compute such values again, because frozen parameters, buffers and constants stay in
memory anyhow. If the values were saved, packed weights would save no memory.
"""

from collections.abc import Collection

import torch
from torch import fx

from memo_compile.analysis.purity import is_collective, is_known, is_random, is_write, runs_once
from memo_compile.analysis.structure import is_matmul, op_name
from memo_compile.analysis.views import bytes_of, is_item, results_of

_DEAR = frozenset("convolution cholesky cholesky_solve triangular_solve inverse svd qr".split())
"""Operators that take longer than to read their inputs, besides matrix products and linalg."""


def frozen_inputs(
    graph: fx.Graph, static_inputs: Collection[int], num_results: int
) -> set[fx.Node]:
    """Returns the ``static_inputs`` (positions of parameters and buffers) without a gradient."""
    gradients = results_of(graph)[num_results:]
    inputs = graph.find_nodes(op="placeholder")
    return {inputs[at] for at in static_inputs if at < len(gradients) and gradients[at] is None}


def made_of_frozen(
    graph: fx.Graph, frozen: Collection[fx.Node], changing: Collection[fx.Node] = ()
) -> set[fx.Node]:
    """Returns cheap operators that depend on ``frozen`` inputs and constants alone.

        packed -> bitwise_and -> mul(scale) -> view -> mm(x, view)      all before the mm

    Custom operators are among them: one that only reads frozen weights gives the same each time.
    Matrix products and decompositions are not (``is_dear``).

    The program may write ``changing`` inputs between forward and backward, and eager's backward
    would read the old value. So a value that depends on such inputs is returned only if it is
    larger than they are: to save it would cost too much. The copy of an input that
    ``passes.own_inputs`` makes does not change.
    """
    changing_behind: dict[fx.Node, frozenset[fx.Node]] = {
        node: frozenset({node} & set(changing)) for node in frozen
    }
    computed: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "get_attr" or (_is_kept_copy(node) and inputs[0] in changing_behind):
            changing_behind[node] = frozenset()
        elif node.op == "call_function" and all(source in changing_behind for source in inputs):
            if is_dear(node) or not _has_no_effect(node) or runs_once(node):
                continue
            changing_inputs = frozenset[fx.Node]().union(
                *(changing_behind[source] for source in inputs)
            )
            changing_behind[node] = changing_inputs
            if not changing_inputs or bytes_of(node) > sum(map(bytes_of, changing_inputs)):
                computed.add(node)
    return computed


def is_dear(node: fx.Node) -> bool:
    """True for a product or a decomposition, which may take longer than what reads its result."""
    return is_matmul(node) or op_name(node) in _DEAR or "linalg" in op_name(node)


def _is_kept_copy(node: fx.Node) -> bool:
    """True for the copy of an input that ``passes.own_inputs`` makes for the backward."""
    is_clone = node.target is torch.ops.aten.clone.default
    return is_clone and runs_once(node) and node.all_input_nodes[0].op == "placeholder"


def _has_no_effect(node: fx.Node) -> bool:
    """True for an operator that declares no write, no random number and no collective."""
    if is_item(node):
        return _has_no_effect(node.all_input_nodes[0])
    if is_write(node) or is_random(node) or is_collective(node):
        return False
    return is_known(node) or isinstance(node.target, torch._ops.OpOverload)
