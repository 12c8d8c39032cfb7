"""What jumps where a last digit differs is made once, in the forward, and kept."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepJumps:
    """Nothing that jumps (``analysis.jumps``) is made again, so that all of a step goes by one.

    Rewrite (in brackets the half that runs it):
        h = mm(x, a)        [forward, saved]       h    = mm(x, a)        [forward]
        m = amax(h, 0)      [forward, saved]       m    = amax(h, 0)      [forward]
        loss of m           [forward]        ->    mask = eq(h, m)        [forward, saved]
        mask = eq(h, m)     [backward]             loss of m              [forward]
        dh = where(mask, ..) [backward]            dh = where(mask, ..)   [backward]

    Kept is the jump's result: the index of an entry, a byte of truth. It may go to the host.
    ``h`` may then be made again in any other way, of a part of its rows say. A derivative's own
    comparison moves to the forward, right behind what it reads. What the model's selective
    checkpoint() says must be recomputed is recomputed.
    """

    weights: frozenset[int]
    """Positions of the inputs that are parameters and buffers."""
    name: ClassVar[str] = "keep-jumps"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        weights = [placeholders[at] for at in self.weights if at < len(placeholders)]
        found = _in_forward(gm, jumps(gm.graph, weights))
        kept = [node for maker in found for node in (maker, *filter(is_item, maker.users))]
        kept = [node for node in kept if _may_be_kept(node)]
        for node in kept:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return PassResult(gm, bool(kept))


def _may_be_kept(node: fx.Node) -> bool:
    policies = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE
    return node.meta.get("recompute") not in policies


def _in_forward(gm: fx.GraphModule, found: Iterable[fx.Node]) -> list[fx.Node]:
    """Those of ``found`` that are the forward's, and those that are moved there with their makers.

    What the program's own backward computes from products or sums of its own stays there: it runs
    once, as it does eagerly.
    """
    forward, moved, kept = set(forward_nodes(gm)), set[fx.Node](), []
    for node in found:
        makers = makers_of([node], lambda maker: maker not in forward) - forward
        own = {maker for maker in makers if maker.op == "call_function" and not is_constant(maker)}
        if all(map(is_entrywise, own)):
            kept.append(node)
            moved |= own
    for node in moved:
        node.meta["partitioner_tag"] = "is_forward"
    if moved:
        hoist_behind_inputs(gm.graph, moved)
    return kept
