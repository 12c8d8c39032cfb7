"""Finds collectives of a graph that can begin and be waited for at different places of the step.

They are functional collectives with one result, of fixed size, that only one wait reads. Others
stay inside their region, and are waited for there.
"""

from collections.abc import Iterable

import torch
from memo_runtime.collectives import REDUCTIONS, Collective, CollectiveKind
from torch import fx

from memo_compile.analysis.purity import in_flight, is_wait
from memo_compile.analysis.structure import argument, namespace, op_name
from memo_compile.analysis.views import base_of, is_tensor, is_view, storage_of

_KINDS = {kind.value: kind for kind in CollectiveKind}


def collective_of(node: fx.Node) -> Collective | None:
    """Returns what the collective ``node`` does, for the runtime; None: it cannot be split."""
    kind = _KINDS.get(op_name(node)) if namespace(node) == "_c10d_functional" else None
    if kind is None or not in_flight(node) or not is_tensor(node):
        return None
    group, operation = argument(node, "group_name"), None
    if not isinstance(group, str):
        return None
    if kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER):
        operation = argument(node, "reduce_op")
        if operation not in REDUCTIONS:
            return None
    splits: list[tuple[int, ...]] = [(), ()]
    if kind is CollectiveKind.ALL_TO_ALL:
        declared_splits = argument(node, "output_split_sizes"), argument(node, "input_split_sizes")
        splits = [tuple(sizes) for sizes in declared_splits]
        if not all(type(size) is int for sizes in splits for size in sizes):
            return None
    return Collective(
        kind=kind,
        group_name=group,
        reduce_op=operation,
        output_splits=splits[0],
        input_splits=splits[1],
    )


def split_collectives(nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Returns the wait of each collective of ``nodes`` that can be split, in their order."""
    wait_of: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node.op != "call_function" or collective_of(node) is None:
            continue
        users = list(node.users)
        if len(users) == 1 and is_wait(users[0]) and _is_plain(node):
            wait_of[node] = users[0]
    return wait_of


def _is_plain(node: fx.Node) -> bool:
    """True if input and output are dense, and the input shows all of its base tensor."""
    source = node.all_input_nodes[0]
    if len(node.all_input_nodes) != 1 or not is_tensor(source):
        return False
    base = base_of(source)
    tensors = source.meta["val"], node.meta["val"], base.meta["val"]
    plain = all(value.layout is torch.strided and value.is_contiguous() for value in tensors[:2])
    return bool(plain and tensors[0].numel() == tensors[2].numel() and tensors[1].numel())


def may_reuse_input(node: fx.Node) -> bool:
    """True if an ``all_reduce`` may write its result in place of its input.

    An operator of the graph must have made the input's storage, and nobody else may read it.
    """
    if op_name(node) != CollectiveKind.ALL_REDUCE.value:
        return False
    source = node.all_input_nodes[0]
    root = storage_of(source)
    if root is not base_of(source) or root.op != "call_function":
        return False  # the result would take more than the input's part of its storage
    if root.meta["val"].dtype is not node.meta["val"].dtype:
        return False
    pending = [root]
    while pending:
        for user in pending.pop().users:
            if is_view(user):
                pending.append(user)
            elif user is not node:
                return False
    return True
