"""Runs operators that jump once, in the forward, and saves their results."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils.checkpoint import CheckpointPolicy

from memo_compile.analysis.joint_units import forward_nodes
from memo_compile.analysis.jumps import is_entrywise, jumps
from memo_compile.analysis.purity import is_constant
from memo_compile.analysis.views import is_item, makers_of
from memo_compile.passes.cse import hoist_behind_inputs

_DECIDED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE)
"""Tags of nodes for which the model's checkpoint(), or another pass, has decided already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepJumps:
    """Lets no operator that jumps (``analysis.jumps``) run twice: the step reads one result of it.

    Rewrite (in brackets the half that runs it):
        h = mm(x, a)        [forward, saved]       h    = mm(x, a)        [forward]
        m = amax(h, 0)      [forward, saved]       m    = amax(h, 0)      [forward]
        loss of m           [forward]        ->    mask = eq(h, m)        [forward, saved]
        mask = eq(h, m)     [backward]             loss of m              [forward]
        dh = where(mask, ..) [backward]            dh = where(mask, ..)   [backward]

    The result of the jump is saved: an index, or a boolean, for each entry. It may be copied to the
    host. The forward and the backward then read the same mask, even if the backward recomputes
    ``h`` by other kernels, for instance on a part of its rows. A comparison of the backward moves
    to the forward, directly behind its inputs. An operator that the model's selective checkpoint()
    tags as recomputed is recomputed.
    """

    weights: frozenset[int]
    """Positions of the inputs that are parameters and buffers."""
    name: ClassVar[str] = "keep-jumps"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        weights = [placeholders[at] for at in self.weights if at < len(placeholders)]
        jumping = _moved_to_forward(gm, jumps(gm.graph, weights))
        results = [node for maker in jumping for node in (maker, *filter(is_item, maker.users))]
        saved = [node for node in results if node.meta.get("recompute") not in _DECIDED]
        for node in saved:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return PassResult(gm, bool(saved))


def _moved_to_forward(gm: fx.GraphModule, jumping: Iterable[fx.Node]) -> list[fx.Node]:
    """Moves ``jumping`` operators that only the backward runs to the forward, with their makers.

    Returns all of ``jumping`` that are in the forward then. A jump stays in the backward, where it
    runs once, if a product or a sum of the program's own backward had to move along.
    """
    forward, moved, in_forward = set(forward_nodes(gm)), set[fx.Node](), []
    for node in jumping:
        makers = makers_of([node], lambda maker: maker not in forward) - forward
        makers = {node for node in makers if node.op == "call_function" and not is_constant(node)}
        if all(map(is_entrywise, makers)):
            in_forward.append(node)
            moved |= makers
    for node in moved:
        node.meta["partitioner_tag"] = "is_forward"
    if moved:
        hoist_behind_inputs(gm.graph, moved)
    return in_forward
