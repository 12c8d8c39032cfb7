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
_READING = frozenset(
    "abs add all any arange argmax bitwise_and bitwise_not bitwise_or bitwise_xor broadcast_to "
    "cat clamp clone concat cos cumsum diff div einsum eq exp flatten flip floor_divide full "
    "full_like gather ge greater greater_equal gt index_select isin le less less_equal "
    "logical_and logical_not logical_or logical_xor lt masked_fill matmul maximum mean minimum "
    "mul ne neg not_equal numel ones ones_like outer pow remainder repeat_interleave reshape roll "
    "select sin squeeze stack sub sum take transpose tril triu unsqueeze where zeros "
    "zeros_like".split()
)
"""Functions of ``torch`` that read what they are given; others are not looked at."""
STANDS_FOR = "memo_stands_for"
"""Attribute of a function that memo puts in the place of another: that one."""


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
        given = _given(node)
        mask = given["attn_mask"]
        if not _fits(mask, given["query"], given["key"]):
            continue
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
    target = getattr(node.target, STANDS_FOR, node.target)
    return node.op == "call_function" and target is functional.scaled_dot_product_attention


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


def _fits(mask: fx.Node, query: Any, key: Any) -> bool:
    """False where the mask may be larger than the scores: torch widens the result, or refuses."""
    made = [read for read in (mask, query, key) if isinstance(read, fx.Node)]
    shapes = [read.meta["example_value"].shape for read in made if "example_value" in read.meta]
    if len(shapes) < 3:
        return False
    of_mask, of_query, of_key = shapes
    scores = (*of_query[:-1], of_key[-2])
    pairs = zip(reversed(of_mask), reversed(scores), strict=False)
    return len(of_mask) <= len(scores) and all(mine in (1, size) for mine, size in pairs)


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
    if any(_draws(node) for node in traced.graph.nodes):  # what is not drawn changes what follows
        return None
    traced.graph.eliminate_dead_code()
    return allowed_by(traced.graph)


def _draws(node: fx.Node) -> bool:
    """True where random numbers are drawn."""
    tags = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()
    return torch.Tag.nondeterministic_seeded in tags


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
    memory = {_UNKNOWN_MEMORY, *map(_memory, makers)} - {None}
    return any(
        node.op not in ("output", "placeholder")
        and any(_memory(read) in memory for read in node.all_input_nodes)
        and not _only_reads(node)
        for node in graph.nodes
    )


_UNKNOWN_MEMORY = -1


def _memory(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return value.untyped_storage()._cdata
    except NotImplementedError:  # of a tensor inside of vmap or grad
        return _UNKNOWN_MEMORY


def _only_reads(node: fx.Node) -> bool:
    """True for a tensor's methods, Python's operators and functions that are known not to write."""
    target = node.target
    if node.op == "call_method":
        name = str(target)
        return name.strip("_") not in _IN_PLACE and (name[:2] == "__" or name[-1] != "_")
    if _is_attention(node) or target in (getattr, functional.embedding):
        return True
    name, module = getattr(target, "__name__", ""), getattr(target, "__module__", None)
    if module in ("operator", "_operator"):
        return name not in _IN_PLACE
    return name in _READING and target is getattr(torch, name) and node.kwargs.get("out") is None


def _erase_unread(graph: fx.Graph, nodes: set[fx.Node]) -> None:
    """Those of ``nodes`` that nothing reads any more."""
    for node in reversed(list(graph.nodes)):
        if node in nodes and not node.users and node.op != "placeholder":
            graph.erase_node(node)
