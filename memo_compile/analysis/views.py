"""Tells which nodes are views of another node's storage, and which node made that storage."""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

_VIEWS_WITHOUT_ALIAS_SCHEMA = (torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default)
"""Declared as fresh results, but Inductor gives them their input's storage."""


def is_tensor(node: object) -> bool:
    """True for a node whose value is one tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """Returns the node's value, or the tensors in its tuple."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return [item for item in values if isinstance(item, torch.Tensor)]


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Returns the shape of the node's value or of its first tensor; empty for a number."""
    return next((tuple(tensor.shape) for tensor in tensors_of(node)), ())


def bytes_of(node: fx.Node) -> int:
    """Returns the bytes of the node's value; 0 if that is not one tensor."""
    return int(node.meta["val"].nbytes) if is_tensor(node) else 0


def results_of(graph: fx.Graph) -> Sequence[Any]:
    """Returns the nodes (or constants) that ``graph`` returns, in order."""
    results = graph.output_node().args[0]
    assert isinstance(results, list | tuple), f"a graph of memo's returns a tuple, got {results}"
    return results


def makers_of(
    ends: Iterable[fx.Node], goes_on: Callable[[fx.Node], bool] = lambda node: True
) -> set[fx.Node]:
    """Returns ``ends`` and the nodes that they depend on, through nodes where it ``goes_on``."""
    makers: set[fx.Node] = set()
    stack = list(ends)
    while stack:
        node = stack.pop()
        if node not in makers:
            makers.add(node)
            stack.extend(node.all_input_nodes if goes_on(node) else ())
    return makers


def is_view(node: fx.Node) -> bool:
    """True when ``node`` returns a view of its first tensor argument.

    A number in place of one (``_conj(1 + 2j)``) makes a tensor of its own.
    """
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    if node.target in _VIEWS_WITHOUT_ALIAS_SCHEMA:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    returns = node.target._schema.returns
    return bool(returns) and all(
        value.alias_info is not None and not value.alias_info.is_write for value in returns
    )


def is_item(node: fx.Node) -> bool:
    """True for an element of a tuple of new tensors; those of a view are views themselves."""
    return node.target is operator.getitem and not is_view(node)


def viewed(node: fx.Node) -> fx.Node:
    """Returns the input that ``node`` is a view of; it may be a view itself."""
    return node.all_input_nodes[0]


def is_movable_view(node: fx.Node) -> bool:
    """True for a view that shows all of its source, so that the source can be saved in its place.

    A slice is not: to save its source would keep more alive. Nor is a view that sizes and
    strides of the source's elements do not describe: of another dtype, such as ``view_as_real``, or
    with lazy conjugation or negation.
    """
    if not is_view(node) or not is_tensor(node):
        return False
    source = viewed(node)
    if not is_tensor(source):
        return False
    shown, whole = node.meta["val"], source.meta["val"]
    changes_reads = (shown.is_conj(), shown.is_neg()) != (whole.is_conj(), whole.is_neg())
    same_reads = shown.dtype is whole.dtype and not changes_reads
    return bool(same_reads and whole.numel() <= shown.numel())


def base_of(node: fx.Node) -> fx.Node:
    """Returns ``node``, or the node that it shows all of: the node to save and to place."""
    while is_movable_view(node):
        node = viewed(node)
    return node


def storage_of(node: fx.Node) -> fx.Node:
    """Returns the node that made the storage of ``node``, through every kind of view."""
    while is_view(node):
        node = viewed(node)
    return node
