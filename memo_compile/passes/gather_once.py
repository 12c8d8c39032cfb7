"""A backward that recomputes what reads gathered tokens gathers them once for all that it does."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from memo_compile.analysis.joint_units import saved_nodes, tag_saved, tangent_dependents
from memo_compile.analysis.purity import is_wait, only_orders
from memo_compile.analysis.splittable import split_collectives
from memo_compile.analysis.views import base_of, bytes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherOnce:
    """The gather that a model makes in its backward serves what is recomputed there as well.

    Megatron keeps a shard and gathers it for each pass. Where the backward recomputes an MLP, which
    reads the gathered tokens, ``SufficientCut`` saves these; a second gather would come later, and
    cut the MLP's backward in two. Both passes gather as often as before.

    Rewrite, where ``late`` is ``x`` behind the gradient ``g``:
        w = wait(all_gather(x))  # saved         w = wait(all_gather(x))
        late = behind(x, g)                 ->   # x is saved, so that both halves make w
        again = wait(all_gather(late))
        dw = mm(g, again)                        dw = mm(g, w)
    """

    name: ClassVar[str] = "gather-once"
    is_required: ClassVar[bool] = False

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        saved, backward = set(saved_nodes(gm)), tangent_dependents(gm.graph)
        kept = {
            _gathered(node.all_input_nodes[0]): node
            for node in saved
            if is_wait(node) and node not in backward
        }
        shards = {}
        for issue, again in split_collectives(gm.graph.nodes).items():
            first = kept.get(_gathered(issue)) if issue in backward else None
            if first is not None:
                shards[first] = _shard_of(issue)
                again.replace_all_uses_with(first)
                _erase(again)
        if not shards:
            return PassResult(gm, False)
        tag_saved(gm, saved.difference(shards).union(shards.values()))
        gm.recompile()
        return PassResult(gm, True)


def _gathered(issue: fx.Node) -> tuple[Any, ...]:
    """Equal for gathers of one tensor, by the same ranks, into as many bytes."""
    others = tuple(argument for argument in issue.args if not isinstance(argument, fx.Node))
    return issue.target, others, _shard_of(issue), bytes_of(issue.all_input_nodes[0])


def _shard_of(issue: fx.Node) -> fx.Node:
    """What is gathered, before views of it and what only orders it."""
    source = base_of(issue.all_input_nodes[0])
    while only_orders(source):
        source = base_of(source.all_input_nodes[0])
    return source


def _erase(node: fx.Node) -> None:
    """``node``, and what it alone reads."""
    pending = [node]
    while pending:
        unread = pending.pop()
        if unread.op == "call_function" and not unread.users:
            sources = unread.all_input_nodes
            unread.graph.erase_node(unread)
            pending += sources
