"""Removes attention masks that allow all, or what ``is_causal`` allows.

transformers makes a mask of positions for each step that is compiled. With a mask torch takes a
slower kernel, and makes a bias of the scores' size.
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
from memo_compile.analysis.structure import has_tag
from memo_compile.analysis.views import makers_of

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""Arguments of ``scaled_dot_product_attention`` that may be given by position."""
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
"""Functions of ``torch`` known to only read their arguments."""
STANDS_FOR = "memo_stands_for"
"""Attribute of a function that memo puts in place of another function: the other function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedlessMasks:
    """Removes needless masks from the calls of attention in a Dynamo graph.

    Rewrite, with ``allowed`` = {"y": Allowed.CAUSAL}:
        i = arange(T)
        m = i[None, :] <= i[:, None]
        y = scaled_dot_product_attention(q, k, v, attn_mask=m)
            ->    y = scaled_dot_product_attention(q, k, v, is_causal=True)
    """

    allowed: Mapping[str, Allowed]
    """Name of a call of attention -> what its mask allows, as ``needless_masks`` returns."""
    name: ClassVar[str] = "needless-masks"
    is_required: ClassVar[bool] = False

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        for node in _attentions(gm.graph):
            allowed = self.allowed.get(node.name)
            if allowed is None:
                continue
            arguments = _arguments(node)
            mask = arguments.pop("attn_mask")
            arguments["is_causal"] = allowed is Allowed.CAUSAL
            node.args = tuple(arguments.pop(name) for name in _ARGUMENTS[:3])
            node.kwargs = arguments
            _erase_unread(gm.graph, makers_of([mask]))
        return PassResult(gm, bool(self.allowed))


def needless_masks(gm: fx.GraphModule) -> dict[str, Allowed]:
    """Returns what masks that depend on positions alone allow, by the names of attention's calls.

    ``gm`` is a Dynamo graph without symbols.
    """
    allowed_of: dict[str, Allowed] = {}
    cache: dict[fx.Node, Allowed | None] = {}
    for node in _attentions(gm.graph):
        arguments = _arguments(node)
        mask = arguments["attn_mask"]
        if not _fits(mask, arguments["query"], arguments["key"]):
            continue
        if mask not in cache:
            cache[mask] = _allowed(gm, mask)
        if (allowed := cache[mask]) is not None:
            allowed_of[node.name] = allowed
    return allowed_of


def _attentions(graph: fx.Graph) -> list[fx.Node]:
    """Returns the calls of attention with a boolean mask."""
    return [node for node in graph.nodes if _is_attention(node) and _has_mask(_arguments(node))]


def _is_attention(node: fx.Node) -> bool:
    """True for torch's attention, and for a function of memo that stands for it."""
    target = getattr(node.target, STANDS_FOR, node.target)
    return node.op == "call_function" and target is functional.scaled_dot_product_attention


def _arguments(node: fx.Node) -> dict[str, Any]:
    return {**dict(zip(_ARGUMENTS, node.args, strict=False)), **node.kwargs}


def _has_mask(arguments: Mapping[str, Any]) -> bool:
    """True for a boolean mask, given with query, key and value and without ``is_causal``."""
    mask = arguments.get("attn_mask")
    value = mask.meta.get("example_value") if isinstance(mask, fx.Node) else None
    return (
        isinstance(value, torch.Tensor)
        and value.dtype is torch.bool
        and arguments.get("is_causal", False) is False
        and all(name in arguments for name in _ARGUMENTS[:3])
    )


def _fits(mask: fx.Node, query: Any, key: Any) -> bool:
    """False if the mask may be larger than the scores: torch widens the result, or refuses."""
    nodes = [node for node in (mask, query, key) if isinstance(node, fx.Node)]
    shapes = [node.meta["example_value"].shape for node in nodes if "example_value" in node.meta]
    if len(shapes) < 3:
        return False
    mask_shape, query_shape, key_shape = shapes
    scores = (*query_shape[:-1], key_shape[-2])
    pairs = zip(reversed(mask_shape), reversed(scores), strict=False)
    return len(mask_shape) <= len(scores) and all(length in (1, size) for length, size in pairs)


def _allowed(gm: fx.GraphModule, mask: fx.Node) -> Allowed | None:
    """Returns what ``mask`` allows; None: unknown. Its makers are traced alone, to ATen."""
    makers = makers_of([mask])
    if any(node.op not in ("call_function", "call_method") for node in makers):
        return None
    if _may_be_written(gm.graph, makers):
        return None
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        if node in makers:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[mask])
    try:
        with torch.no_grad():
            traced = make_fx(fx.GraphModule(gm, graph), tracing_mode="fake")()
    except Exception:  # torch cannot trace it alone: the mask stays
        return None
    seeded = torch.Tag.nondeterministic_seeded
    if any(has_tag(node, seeded) for node in traced.graph.nodes):
        return None  # without the draw, later random numbers would differ
    traced.graph.eliminate_dead_code()
    return allowed_by(traced.graph)


def _may_be_written(graph: fx.Graph, makers: Iterable[fx.Node]) -> bool:
    """True if a node that reads the memory of ``makers`` is not known to leave it unchanged."""
    written = {_UNKNOWN_MEMORY, *map(_memory_of, makers)} - {None}
    return any(
        node.op not in ("output", "placeholder")
        and any(_memory_of(source) in written for source in node.all_input_nodes)
        and not _only_reads(node)
        for node in graph.nodes
    )


_UNKNOWN_MEMORY = -1


def _memory_of(node: fx.Node) -> int | None:
    """Returns the number of the storage that ``node`` lies in; None: it is no tensor."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return value.untyped_storage()._cdata
    except NotImplementedError:  # a tensor inside of vmap or grad
        return _UNKNOWN_MEMORY


def _only_reads(node: fx.Node) -> bool:
    """True for methods of tensors, Python's operators and functions that are known not to write."""
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
    """Erases those of ``nodes`` that nothing reads any more."""
    for node in reversed(list(graph.nodes)):
        if node in nodes and not node.users and node.op != "placeholder":
            graph.erase_node(node)
