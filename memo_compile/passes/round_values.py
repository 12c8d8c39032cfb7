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
    """What is computed again is then what it was, although other kernels compute it.

    Inductor keeps a fused value in float32, and gives it rounded to those only that read it from
    memory. A recomputation starts from what lies in memory. Attention that reads scores of some
    hundred made of the one, and a sum of exponentials that was made of the other, has gradients
    that are wrong by powers of e.

    Rewrite (``!``: Inductor's note that operands and result are rounded as eager rounds them):
        a = x + y                                  a = x + y !
        b = convert_element_type(f, bfloat16) ->   b = convert_element_type(f, bfloat16)
        c = b * z                                  r = maximum(b, b) !
        return b, c                                c = r * z !
                                                   return r, c
    """

    name: ClassVar[str] = "round-values"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        calls = [node for node in gm.graph.nodes if node.op == "call_function"]
        touching = [node for node in calls if any(map(_is_low, (node, *node.all_input_nodes)))]
        for node in touching:
            node.meta[shim.ROUNDED] = True
            if _is_low(node) and _keeps_more(node):
                _round(node)
        return PassResult(gm, bool(touching))


def _is_low(node: fx.Node) -> bool:
    return is_tensor(node) and node.meta["val"].dtype in _LOW


def _keeps_more(node: fx.Node) -> bool:
    """True for an operator whose result Inductor rounds only where it is stored."""
    target = node.target
    if target is torch.ops.prims.convert_element_type.default:
        return True
    return isinstance(target, torch._ops.OpOverload) and target.overloadpacket in _SUMS


def _round(node: fx.Node) -> None:
    """Have all readers, the graph's results too, read ``node`` as it would be stored."""
    with node.graph.inserting_after(node):
        rounded = node.graph.call_function(_aten.maximum.default, (node, node))
    rounded.meta.update(val=node.meta["val"], **{shim.ROUNDED: True})
    node.replace_all_uses_with(rounded, lambda user: user is not rounded)
