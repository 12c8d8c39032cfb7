"""Counts the FLOPs and the bytes of memory traffic of a graph's operators."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from memo_compile.analysis.structure import argument, namespace, op_name
from memo_compile.analysis.views import is_view, storage_of
from memo_compile.costs.hardware import HardwareProfile
from memo_compile.costs.work import NOTHING, NodeCost, roofline_s, work_seconds

_LIKE_FLASH_ATTENTION = re.compile("flash_attention_for_cpu|fused_attention_overrideable")
"""Matches names of attention kernels that torch's registry lacks; their first arguments, and those
of their backwards, are flash attention's."""

_GROUPED_PRODUCTS = ("_grouped_mm", "_scaled_grouped_mm")
"""Products of each expert's rows with its own matrix; torch's registry lacks them (2.11, 2.13)."""

_LOOK_UPS = frozenset(("embedding", "gather", "index", "index_select"))
"""Operators that read as much of their table as they return."""

_FUSED = frozenset(
    (
        "amax amin any argmax argmin mean prod sum var var_mean arange cat constant_pad_nd full "
        "iota convert_element_type embedding gather index inductor_lookup_seed inductor_random "
        "_softmax _log_softmax native_layer_norm _fused_rms_norm"
    ).split()
)
"""Operators that Inductor fuses with their neighbours, beside torch's pointwise ones."""


def node_cost(node: fx.Node) -> NodeCost:
    """Returns the cost of ``node`` by its fake values; views and items of a tuple cost 0.

    A value that only passes from one fusible operator to others never reaches memory, as in
    Inductor's kernels. An operator that torch's registry of FLOPs does not know counts its bytes.
    """
    if node.op != "call_function" or is_view(node) or op_name(node) == "":
        return NOTHING
    return NodeCost(
        flops=_flops(node),
        bytes=_read_bytes(node) + _written_bytes(node),
        link_bytes=_ring_bytes(node),
    )


def graph_cost(gm: fx.GraphModule) -> NodeCost:
    """Returns the sum over all nodes."""
    costs = [node_cost(node) for node in gm.graph.nodes]
    return NodeCost(flops=sum(c.flops for c in costs), bytes=sum(c.bytes for c in costs))


def node_seconds(node: fx.Node, profile: HardwareProfile) -> float:
    """Roofline seconds of one node."""
    return roofline_s(node_cost(node), profile)


def graph_seconds(gm: fx.GraphModule, profile: HardwareProfile) -> float:
    """Roofline seconds of a graph, one operator after the other."""
    return work_seconds(map(node_cost, gm.graph.nodes), profile)


def _flops(node: fx.Node) -> int:
    """Returns the FLOPs of ``node`` by torch's formula; 0 where it has none."""
    formula = _formula(node)
    if formula is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda read: read.meta.get("val"))
    args = tuple(value for value in args if not isinstance(value, torch.dtype))  # addmm's out_dtype
    if "attention" in op_name(node):
        args = _with_heads_of_queries(args)
    flops = int(formula(*args, **kwargs, out_val=node.meta.get("val")))
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    # Causal attention leaves out the upper half of the scores.
    return flops // 2 if is_operator and argument(node, "is_causal") else flops


def _ring_bytes(node: fx.Node) -> int:
    """Returns the bytes of keys and values, backwards of their gradients too, around a ring."""
    if namespace(node) != "memo_shapes" or "attention" not in op_name(node):
        return 0
    sizes = sum(_bytes(argument(node, name).meta.get("val")) for name in ("key", "value"))
    passes = 2 if "backward" in op_name(node) else 1
    return passes * (argument(node, "world") - 1) * sizes


def _formula(node: fx.Node) -> Any:
    """Returns torch's formula for the FLOPs of ``node``; None: it has none."""
    target = node.target
    if op_name(node) in _GROUPED_PRODUCTS:
        return _grouped_product_flops
    if not isinstance(target, torch._ops.OpOverload):
        return flop_registry.get(target)
    name, num_replaced = _LIKE_FLASH_ATTENTION.subn("flash_attention", op_name(node))
    if target.namespace == "aten" and num_replaced:
        return flop_registry.get(getattr(torch.ops.aten, name))
    return flop_registry.get(target.overloadpacket)


def _with_heads_of_queries(args: Sequence[Any]) -> tuple[Any, ...]:
    """Returns ``args`` of an attention kernel with as many heads everywhere, (B, H, T, D) each.

    Keys and values that queries share are repeated: the work is the same, and torch 2.11's formulas
    expect it.
    """
    heads = max((value.shape[1] for value in args if _is_of_heads(value)), default=0)
    return tuple(
        torch.empty(value.shape[0], heads, *value.shape[2:], dtype=value.dtype, device="meta")
        if _is_of_heads(value) and value.shape[1] != heads
        else value
        for value in args
    )


def _is_of_heads(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 4 and value.is_floating_point()


def _grouped_product_flops(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    """Each row, or column, is multiplied with the one matrix of its group.

    (T, K) x (G, K, N), (G, M, K) x (K, T), (M, T) x (T, N) and (G, M, K) x (G, K, N).
    """
    if a.dim() == 3 and b.dim() == 2:
        return 2 * b.numel() * a.shape[-2]
    return 2 * a.numel() * b.shape[-1]


def _read_bytes(node: fx.Node) -> int:
    """Returns the bytes of inputs in memory, each element once; of a table what is looked up."""
    table = looked_up_bytes(node)
    sources = node.all_input_nodes if table is None else node.all_input_nodes[1:]
    in_memory = (source for source in sources if is_in_memory(storage_of(source)))
    total = sum(_bytes(source.meta.get("val")) for source in in_memory)
    return total if table is None else total + min(table)


def looked_up_bytes(node: fx.Node) -> tuple[int, int] | None:
    """Returns bytes of a look-up's table and of its result; None: no look-up, or no table there."""
    if op_name(node) not in _LOOK_UPS or not node.all_input_nodes:
        return None
    table = node.all_input_nodes[0]
    if not is_in_memory(storage_of(table)):
        return None
    return _bytes(table.meta.get("val")), _bytes(node.meta.get("val"))


def _written_bytes(node: fx.Node) -> int:
    """Returns the bytes of results that reach memory; of a fusible tuple, item by item."""
    value = node.meta.get("val")
    if isinstance(value, tuple | list) and _is_fusible(node):
        return sum(_bytes(item.meta.get("val")) for item in node.users if is_in_memory(item))
    return _bytes(value) if is_in_memory(node) else 0


def is_in_memory(node: fx.Node) -> bool:
    """False for a value that Inductor keeps in registers: fusible operators make and read it."""
    is_item = op_name(node) == "" and node.all_input_nodes  # Python's getitem of a tuple
    maker = node.all_input_nodes[0] if is_item else node
    if node.op != "call_function" or not _is_fusible(maker):
        return True
    return any(user.op == "output" or not _is_fusible(user) for user in _readers(node))


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the nodes that read the value of ``node``, through views and items."""
    for user in node.users:
        if is_view(user) or (op_name(user) == "" and user.op == "call_function"):
            yield from _readers(user)
        else:
            yield user


def _is_fusible(node: fx.Node) -> bool:
    """True for an operator that Inductor puts into one kernel with its neighbours."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in node.target.tags or op_name(node) in _FUSED


def _bytes(value: Any) -> int:
    """Bytes of the distinct elements of a tensor, or of all tensors in a sequence."""
    if isinstance(value, tuple | list):
        return sum(_bytes(item) for item in value)
    if not isinstance(value, torch.Tensor):
        return 0
    sizes = zip(value.shape, value.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride != 0) * value.element_size()
