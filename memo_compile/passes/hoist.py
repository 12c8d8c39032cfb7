"""Moves what the first layer makes for all layers before the layers, as a pass."""

from dataclasses import dataclass
from typing import ClassVar

from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from memo_compile.analysis.invariants import apply_order, hoist_invariants
from memo_compile.analysis.joint_units import forward_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class HoistInvariants:
    """T5's relative bias, dropout seeds, masks: see ``analysis.invariants.hoist_invariants``.

    Rewrite:
        layer 0: q0, k0, bias, attend(q0, k0, bias)      bias
        layer 1: q1, k1, attend(q1, k1, bias)        ->  layer 0: q0, k0, attend(q0, k0, bias)
                                                         layer 1: q1, k1, attend(q1, k1, bias)
    """

    name: ClassVar[str] = "hoist-invariants"
    is_required: ClassVar[bool] = False

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Reorder in place."""
        before = forward_nodes(gm)
        order = hoist_invariants(before)
        if order == before:
            return PassResult(gm, False)
        apply_order(gm.graph, order)
        return PassResult(gm, True)
