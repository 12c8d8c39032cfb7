"""Leaves out attention masks that say no more than ``is_causal`` does, as a pass.

transformers makes a mask of positions for each step that is compiled, for which torch takes a
slower kernel, and a bias of the scores' size. Without a mask eager attention runs causal.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.infra.pass_base import PassResult
from torch.nn import functional

from memo_compile.analysis.position_masks import Allowed, allowed_by

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""Of ``scaled_dot_product_attention``, those that may be given by position."""
_IN_PLACE = frozenset(
    "iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor "
    "setitem delitem".split()
)
"""Functions of ``operator`` that write into their first argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedlessMasks:
    """A Dynamo graph whose attention reads no masks that are not needed.

    Rewrite, with ``allowed`` = {"y": Allowed.CAUSAL}:
        i = arange(T)
        m = i[None, :] <= i[:, None]
        y = scaled_dot_product_attention(q, k, v, attn_mask=m)
            ->    y = scaled_dot_product_attention(q, k, v, is_causal=True)
    """

    allowed: Mapping[str, Allowed]
    """Name of a node that is attention -> what its mask says, as ``needless_masks`` finds."""
    name: ClassVar[str] = "needless-masks"
    is_required: ClassVar[bool] = False

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        for node in _attentions(gm.graph):
            allowed = self.allowed.get(node.name)
            if allowed is None:
                continue
            given = _given(node)
            mask = given.pop("attn_mask")
            given["is_causal"] = allowed is Allowed.CAUSAL
            node.args = tuple(given.pop(name) for name in _ARGUMENTS[:3])
            node.kwargs = given
            _erase_unread(gm.graph, _makers(mask))
        return PassResult(gm, bool(self.allowed))


def needless_masks(gm: fx.GraphModule) -> dict[str, Allowed]:
    """What the masks say that are made of positions alone, by the names of what reads them.

    ``gm`` is a Dynamo graph without symbols.
    """
    found: dict[str, Allowed] = {}
    known: dict[fx.Node, Allowed | None] = {}
    for node in _attentions(gm.graph):
        mask = _given(node)["attn_mask"]
        if mask not in known:
            known[mask] = _allowed(gm, mask)
        if (allowed := known[mask]) is not None:
            found[node.name] = allowed
    return found


def _attentions(graph: fx.Graph) -> list[fx.Node]:
    """Calls of attention with a boolean mask."""
    return [node for node in graph.nodes if _is_attention(node) and _has_mask(_given(node))]


def _is_attention(node: fx.Node) -> bool:
    """True for torch's attention, and for what stands for it where a step is planned elsewhere."""
    attention = functional.scaled_dot_product_attention
    return (
        node.op == "call_function" and getattr(node.target, "__wrapped__", node.target) is attention
    )


def _given(node: fx.Node) -> dict[str, Any]:
    return {**dict(zip(_ARGUMENTS, node.args, strict=False)), **node.kwargs}


def _has_mask(given: Mapping[str, Any]) -> bool:
    mask = given.get("attn_mask")
    value = mask.meta.get("example_value") if isinstance(mask, fx.Node) else None
    return (
        isinstance(value, torch.Tensor)
        and value.dtype is torch.bool
        and given.get("is_causal", False) is False
        and all(name in given for name in _ARGUMENTS[:3])
    )


def _allowed(gm: fx.GraphModule, mask: fx.Node) -> Allowed | None:
    makers = _makers(mask)
    if any(node.op not in ("call_function", "call_method") for node in makers):
        return None
    if _may_be_written(gm.graph, makers):
        return None
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        if node in makers:
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(made[mask])
    try:
        with torch.no_grad():
            traced = make_fx(fx.GraphModule(gm, graph), tracing_mode="fake")()
    except Exception:  # what torch cannot trace by itself is a mask like others
        return None
    traced.graph.eliminate_dead_code()
    return allowed_by(traced.graph)


def _makers(node: fx.Node) -> set[fx.Node]:
    """``node`` and all that it is made of."""
    found, left = {node}, [node]
    while left:
        new = set(left.pop().all_input_nodes) - found
        found |= new
        left += new
    return found


def _may_be_written(graph: fx.Graph, makers: Iterable[fx.Node]) -> bool:
    """True where a node that reads the memory of ``makers`` is not known to leave it as it is."""
    memory = {place for node in makers if (place := _memory(node)) is not None}
    return any(
        node.op not in ("output", "placeholder")
        and any(_memory(read) in memory for read in node.all_input_nodes)
        and not _only_reads(node)
        for node in graph.nodes
    )


def _memory(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _only_reads(node: fx.Node) -> bool:
    """True for a tensor's methods, Python's operators and functions of torch that do not write."""
    target = node.target
    if node.op == "call_method":
        name = str(target)
        return name.strip("_") not in _IN_PLACE and (name[:2] == "__" or name[-1] != "_")
    if _is_attention(node) or target is getattr:
        return True
    name, module = getattr(target, "__name__", "_"), getattr(target, "__module__", None) or ""
    if module in ("operator", "_operator"):
        return name not in _IN_PLACE
    is_torchs = getattr(torch, name, None) is target or module == "torch.functional"
    return is_torchs and not name.endswith("_") and node.kwargs.get("out") is None


def _erase_unread(graph: fx.Graph, nodes: set[fx.Node]) -> None:
    """Those of ``nodes`` that nothing reads any more."""
    for node in reversed(list(graph.nodes)):
        if node in nodes and not node.users:
            graph.erase_node(node)
