"""Rounds values of low precision where the graph says so, whatever kernel makes them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from memo_compile.analysis.structure import has_tag
from memo_compile.analysis.views import is_tensor, is_view
from memo_compile.torch_private import inductor_api

_aten = torch.ops.aten
_LOW = (torch.bfloat16, torch.float16)

_convert = torch.ops.prims.convert_element_type.default
_SUMS = (_aten.sum, _aten.mean, _aten.prod, _aten.cumsum, _aten.var)
"""Reductions that round; those that pick an entry return a rounded number anyway."""

_PRODUCTS = (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm)
"""Operators that read operands from memory, and store their result there."""

_UNMARKED = (_aten.clone.default, _aten.copy.default, _aten.pow.Tensor_Scalar, _convert)
"""Pointwise operators for which Inductor does not round."""


@dataclass(frozen=True, slots=True)
class RoundValues:
    """Lets a recomputation start from the same numbers that the forward used.

    Inductor keeps a fused value in float32; only readers that read it from memory get it rounded.
    A recomputation starts from memory, so it may see other numbers than the forward did. If an
    attention's backward reads recomputed scores of some hundred and the forward's sum of
    exponentials, its gradients are wrong by powers of e. (Sums in float32 may still be taken in
    another order.)

    Rounding costs operations, so each value is rounded once: by its only reader, or where it is
    made. Gradients are computed once, and left to Inductor.

    Rewrite (``!``: Inductor's note that operands and result are rounded as eager rounds them):
        a = x + y                                  a = x + y
        b = convert_element_type(f, bfloat16) ->   b = convert_element_type(f, bfloat16)
        c = a * z                                  c = a * z !
        return b, c, b + 1                         r = b * 1.0 !
                                                   return r, c, r + 1
    """

    name: ClassVar[str] = "round-values"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        unrounded: set[fx.Node] = set()
        changed = False
        for node in list(gm.graph.nodes):
            reads_unrounded = not unrounded.isdisjoint(node.all_input_nodes)
            is_low = is_tensor(node) and node.meta["val"].dtype in _LOW
            is_fused = is_low and not is_view(node) and _is_fused(node)
            if is_view(node) and reads_unrounded:
                unrounded.add(node)
            elif _can_mark(node) and (reads_unrounded or (is_fused and _is_read_twice(node))):
                node.meta[inductor_api.ROUNDED] = changed = True
            elif is_fused and not _can_mark(node) and _is_read_twice(node):
                _round(node)
                changed = True
            elif is_fused:
                unrounded.add(node)
        return PassResult(gm, changed)


def _is_forward(node: fx.Node) -> bool:
    """True unless AOTAutograd has tagged the operator as the backward's own."""
    return node.op == "call_function" and node.meta.get("partitioner_tag") != "is_backward"


def _can_mark(node: fx.Node) -> bool:
    """True for an operator of the forward for which Inductor can round operands and result."""
    is_pointwise = has_tag(node, torch.Tag.pointwise)
    return _is_forward(node) and is_pointwise and node.target not in _UNMARKED


def _is_fused(node: fx.Node) -> bool:
    """True for an operator whose result Inductor rounds only where it is stored."""
    if not _is_forward(node) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    is_kernel = torch.Tag.pointwise in node.target.tags or node.target.overloadpacket in _SUMS
    return is_kernel and node.target is not _aten.clone.default


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the readers of ``node`` or a view of it that do not read from memory."""
    for user in node.users:
        if is_view(user):
            yield from _readers(user)
        elif user.op == "call_function" and not _reads_memory(user):
            yield user


def _reads_memory(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.overloadpacket in _PRODUCTS or inductor_api.falls_back(target)


def _is_read_twice(node: fx.Node) -> bool:
    """True if ``node`` has several readers, or one that cannot round it."""
    readers = list(_readers(node))
    return len(readers) > 1 or not all(map(_can_mark, readers))


def _round(node: fx.Node) -> None:
    """Lets all readers, the graph's results too, read ``node`` as it would be stored."""
    with node.graph.inserting_after(node):
        rounded = node.graph.call_function(_aten.mul.Tensor, (node, 1.0))
    rounded.meta.update(val=node.meta["val"], **{inductor_api.ROUNDED: True})
    node.replace_all_uses_with(rounded, lambda user: user is not rounded)
