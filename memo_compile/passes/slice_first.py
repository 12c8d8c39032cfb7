"""Slices what a wide product is made of rather than the product, as a pass over a Dynamo graph.

A shifted loss reads ``logits[:, :-1]``: all tokens' logits exist, and their gradients as well, and
in tiles of tokens the slice would fit no tile. The product of the other tokens is all that is
needed, and its rows run in tiles like any others.
"""

import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult
from torch.nn import functional

_aten = torch.ops.aten
_ALL = slice(None)

_PRODUCTS = (
    functional.linear,
    torch.matmul,
    torch.mm,
    operator.matmul,
    "matmul",
    "mm",
    _aten.linear.default,
    _aten.matmul.default,
    _aten.mm.default,
)
"""Calls whose result has the leading dimensions of the first argument, the second a matrix."""

_BY_ELEMENT = frozenset(
    "add bfloat16 clamp contiguous div double float half mul neg sub tanh to truediv type".split()
)
"""Functions of ``torch`` and ``operator``, and methods: each number of the result depends on those
at its place in the operands. None writes into one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceFirst:
    """A wide product of which only one slice is read is made for that slice.

    Rewrite, of 4096 tokens in ``x``:
        y = linear(x, w)                          s = x[:, :-1]
        z = y.float()                      ->     y = linear(s, w)    # of 4095
        l = z[:, :-1]                             l = y.float()
    """

    name: ClassVar[str] = "slice-first"
    is_required: ClassVar[bool] = False

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        rewritten = [_made_of_slice(node) for node in reversed(list(gm.graph.nodes))]
        return PassResult(gm, any(rewritten))


class _Sliced(NamedTuple):
    """What a slice reads of its first argument."""

    kept: tuple[slice, ...]
    """Of each dimension."""
    rest: tuple[Any, ...]
    """An index that drops and adds dimensions behind that; empty: there is none."""


def _made_of_slice(node: fx.Node) -> bool:
    """Have ``node`` made for the one slice of it that is read, if it leads to a wide product."""
    readers = {user: _sliced(user, node) for user in node.users}
    slices = {None if read is None else str(read.kept) for read in readers.values()}
    read = next(iter(readers.values()), None)
    if read is None or len(slices) != 1 or not _leads_to_product(node):
        return False
    if read.kept[-1] != _ALL or all(part == _ALL for part in read.kept):
        return False
    if not all(_may_move(user, node) for user in readers):
        return False
    graph = node.graph
    operands: Sequence[Any] = [node.args[0]] if node.target in _PRODUCTS else node.all_input_nodes
    with graph.inserting_before(node):
        cut = {operand: _cut(operand, node, read.kept) for operand in operands}
        made = graph.node_copy(node, lambda source: cut.get(source, source))
    made.meta.pop("example_value", None)
    for user, own in readers.items():
        result = made
        if own is not None and own.rest:
            with graph.inserting_before(user):
                result = graph.call_function(operator.getitem, (made, own.rest))
        if "example_value" in user.meta:
            result.meta["example_value"] = user.meta["example_value"]
        user.replace_all_uses_with(result)
        graph.erase_node(user)
    graph.erase_node(node)
    return True


def _cut(operand: Any, node: fx.Node, kept: tuple[slice, ...]) -> Any:
    """What ``node`` needs of an operand for the part ``kept`` of its result."""
    shape, whole = _shape(operand), _shape(node)
    aligned = kept[len(kept) - len(shape) :] if shape else ()
    sizes = zip(aligned, shape, whole[len(whole) - len(shape) :], strict=True)
    index = tuple(
        _ALL if isinstance(own, int) and own == 1 and size != 1 else part
        for part, own, size in sizes
    )
    if all(part == _ALL for part in index):
        return operand
    return node.graph.call_function(operator.getitem, (operand, index))


def _sliced(user: fx.Node, node: fx.Node) -> _Sliced | None:
    """What ``user`` reads of ``node``; None where it is no slice of it by numbers."""
    rank = len(_shape(node))
    if (
        not user.args
        or user.args[0] is not node
        or user.all_input_nodes.count(node) != 1
        or not rank
    ):
        return None
    if user.target is operator.getitem:
        index = user.args[1] if isinstance(user.args[1], tuple) else (user.args[1],)
        return _by_index(index, rank)
    if user.target in ("narrow", torch.narrow):
        given = _given(user, "dim", "start", "length")
        start, length = given["start"], given["length"]
        if not (isinstance(start, int) and isinstance(length, int)):
            return None
        part = slice(start, start + length if start + length or start >= 0 else None)
    elif user.target is _aten.slice.Tensor:
        given = _given(user, "dim", "start", "end", "step")
        end = given.get("end")
        part = slice(given.get("start"), None if end == sys.maxsize else end, given.get("step"))
    else:
        return None
    dim = given.get("dim", 0) % rank
    return _Sliced(tuple(part if at == dim else _ALL for at in range(rank)), ())


def _given(user: fx.Node, *names: str) -> dict[str, Any]:
    """The arguments behind the first, by name."""
    return {**dict(zip(names, user.args[1:], strict=False)), **user.kwargs}


def _by_index(index: tuple[Any, ...], rank: int) -> _Sliced | None:
    """What an index of slices and numbers reads of ``rank`` dimensions."""
    is_basic = all(
        item is None or item is Ellipsis or isinstance(item, slice) or type(item) is int
        for item in index
    )
    if not is_basic:
        return None
    taken = sum(isinstance(item, slice | int) for item in index)
    kept: list[slice] = []
    rest: list[Any] = []
    for item in index:
        if item is Ellipsis:
            kept += [_ALL] * (rank - taken)
        elif isinstance(item, int):
            kept.append(slice(item, item + 1 or None))
        elif item is not None:
            kept.append(item)
        rest.append(_ALL if isinstance(item, slice) else 0 if isinstance(item, int) else item)
    kept += [_ALL] * (rank - len(kept))
    is_plain = all(item is Ellipsis or isinstance(item, slice) for item in index)
    return _Sliced(tuple(kept), () if is_plain else tuple(rest))


def _leads_to_product(node: fx.Node) -> bool:
    """True for a wide product, and what is made of one that nothing else reads, place by place."""
    if node.target in _PRODUCTS:
        first, second = node.args[:2]
        shape, made = _shape(first), _shape(node)
        if len(shape) != len(made) or len(_shape(second)) != 2:
            return False
        return isinstance(shape[-1], int) and isinstance(made[-1], int) and shape[-1] < made[-1]
    return _is_by_element(node) and any(
        len(source.users) == 1 and _leads_to_product(source) for source in node.all_input_nodes
    )


def _is_by_element(node: fx.Node) -> bool:
    target = node.target
    if "out" in node.kwargs or not _shape(node):
        return False
    if node.op == "call_method":
        return target in _BY_ELEMENT
    if isinstance(target, torch._ops.OpOverload):
        is_pure = not target._schema.is_mutable
        is_pure = is_pure and torch.Tag.nondeterministic_seeded not in target.tags
        return is_pure and torch.Tag.pointwise in target.tags
    name = getattr(target, "__name__", "")
    known = (getattr(module, name, None) for module in (torch, operator))
    return node.op == "call_function" and name in _BY_ELEMENT and target in known


def _may_move(user: fx.Node, node: fx.Node) -> bool:
    """True where the slice ``user`` of ``node`` can be taken in front of ``node``."""
    bounds = [source for source in user.all_input_nodes if source is not node]
    if not all(bound < node for bound in bounds):
        return False
    between = node
    while between is not user:
        if getattr(between.target, "__name__", "") == "_set_grad_enabled":
            return False
        between = between.next
    return True


def _shape(node: Any) -> tuple[Any, ...]:
    """Of a tensor; empty for what is none."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()
