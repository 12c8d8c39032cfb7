"""Chooses what the forward keeps for the backward: three passes that tag, and change nothing else.

    SaveMinCut     what torch's own partitioner would keep
    EqualCut       the same in every layer of a class
    SufficientCut  all that a layer's backward starts from

The halves are cut out of the joint graph by these tags (``shim.extract_halves``).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from memo_compile import shim
from memo_compile.analysis.joint_units import JointUnits
from memo_compile.analysis.saved import (
    equal_in_layers,
    saved_nodes,
    sufficient,
    tag_saved,
    whole_in_forward,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveMinCut:
    """Tags what torch's min-cut partitioner keeps, as whole tensors of the forward.

    Rewrite:
        relu = relu(mm)                ->    relu = relu(mm)  # saved
        t = permute(relu, [1, 0])            t = permute(relu, [1, 0])
    """

    joint_inputs: Any
    """As AOTAutograd gives them to a partitioner."""
    num_fwd_outputs: int
    static_lifetime_input_indices: list[int] | None
    name: ClassVar[str] = "save-min-cut"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Tag in place."""
        names = shim.min_cut_saved_names(
            gm,
            self.joint_inputs,
            num_fwd_outputs=self.num_fwd_outputs,
            static_lifetime_input_indices=self.static_lifetime_input_indices,
        )
        return PassResult(gm, tag_saved(gm, whole_in_forward(names, gm)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualCut:
    """Every layer of a class keeps the same tensors, so that one region serves them all.

    Rewrite:
        layer 0: a0 = mm(x0), b0 = relu(a0)  # saved     layer 0: a0 = mm(x0)  # saved, b0
        layer 1: a1 = mm(x1)  # saved, b1            ->  layer 1: a1 = mm(x1)  # saved, b1
        layer 2: a2 = mm(x2)  # saved, b2                layer 2: a2 = mm(x2)  # saved, b2
    """

    units: JointUnits
    for_tiles: bool
    """Wide chains are to run in tiles: what is much wider than its unit's input is not saved."""
    name: ClassVar[str] = "equal-cut"
    is_required: ClassVar[bool] = False

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Tag in place."""
        chosen = equal_in_layers(self.units, set(saved_nodes(gm)), for_tiles=self.for_tiles)
        return PassResult(gm, tag_saved(gm, chosen))


@dataclass(frozen=True, slots=True, kw_only=True)
class SufficientCut:
    """No layer's backward recomputes what another unit made, or what must not be made twice.

    Rewrite:
        x1 = add(x0, b0)                  ->    x1 = add(x0, b0)  # saved
        backward of layer 1 reads x1            backward of layer 1 reads x1
    """

    units: JointUnits
    num_fwd_outputs: int
    name: ClassVar[str] = "sufficient-cut"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Tag in place."""
        chosen = set(saved_nodes(gm))
        kept = sufficient(gm, self.units, chosen, num_fwd_outputs=self.num_fwd_outputs)
        return PassResult(gm, tag_saved(gm, kept))
