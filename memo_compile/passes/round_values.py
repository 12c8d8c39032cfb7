"""Values of low precision are rounded where the graph says, in whatever kernel they are made."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from memo_compile import shim
from memo_compile.analysis.views import is_tensor

_aten = torch.ops.aten
_LOW = (torch.bfloat16, torch.float16)

_SUMS = (_aten.sum, _aten.mean, _aten.prod, _aten.cumsum, _aten.var, _aten.var_mean)
"""Reductions that round; those that pick an entry give what was rounded before."""


@dataclass(frozen=True, slots=True)
class RoundValues:
    """What the forward computes and what is computed again are then the same, in other kernels too.

    Inductor keeps a fused value in float32, and gives it rounded to those only that read it from
    memory. A recomputation starts from what lies in memory. Attention that reads scores of some
    hundred made of the one, and a sum of exponentials that was made of the other, has gradients
    that are wrong by powers of e. Gradients are computed once, and left to Inductor.

    Rewrite (``!``: Inductor's note that operands and result are rounded as eager rounds them):
        a = x + y                                  a = x + y !
        b = convert_element_type(f, bfloat16) ->   b = convert_element_type(f, bfloat16)
        c = b * z                                  r = b * 1.0 !
        return b, c                                c = r * z !
                                                   return r, c
    """

    name: ClassVar[str] = "round-values"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        chosen = [node for node in gm.graph.nodes if is_rounded(node)]
        for node in chosen:
            node.meta[shim.ROUNDED] = True
            if _is_low(node) and _keeps_more(node):
                _round(node)
        return PassResult(gm, bool(chosen))


def is_rounded(node: fx.Node) -> bool:
    """True for an operator on values of low precision that may be computed again.

    AOTAutograd tags the backward's own operators; what memo's passes make has no tag.
    """
    if node.op != "call_function" or node.meta.get("partitioner_tag") == "is_backward":
        return False
    return any(map(_is_low, (node, *node.all_input_nodes)))


def _is_low(node: fx.Node) -> bool:
    return is_tensor(node) and node.meta["val"].dtype in _LOW


def _keeps_more(node: fx.Node) -> bool:
    """True for an operator whose result Inductor rounds only where it is stored, if it is read."""
    if all(user.op == "output" for user in node.users):
        return False
    target = node.target
    if target is torch.ops.prims.convert_element_type.default:
        return True
    return isinstance(target, torch._ops.OpOverload) and target.overloadpacket in _SUMS


def _round(node: fx.Node) -> None:
    """Have all readers, the graph's results too, read ``node`` as it would be stored."""
    with node.graph.inserting_after(node):
        rounded = node.graph.call_function(_aten.mul.Tensor, (node, 1.0))  # which reads it once
    rounded.meta.update(val=node.meta["val"], **{shim.ROUNDED: True})
    node.replace_all_uses_with(rounded, lambda user: user is not rounded)
