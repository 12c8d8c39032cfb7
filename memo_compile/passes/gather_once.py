"""Lets a backward gather sharded tokens once, for its own use and for what it recomputes."""

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
    """Uses the gather of a model's own backward for recomputed operators as well.

    Megatron keeps a shard and gathers it for each pass. Where the backward recomputes an MLP, which
    reads the gathered tokens, ``SufficientCut`` saves these; the backward's own gather would come
    later, and cut the MLP's backward in two. Both halves gather as often as before.

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
        waits = (node for node in saved if is_wait(node) and node not in backward)
        saved_gathers = {_gathered(wait.all_input_nodes[0]): wait for wait in waits}
        shards = {}
        for issue, second in split_collectives(gm.graph.nodes).items():
            first = saved_gathers.get(_gathered(issue)) if issue in backward else None
            if first is not None:
                shards[first] = _shard_of(issue)
                second.replace_all_uses_with(first)
                _erase(second)
        if not shards:
            return PassResult(gm, False)
        tag_saved(gm, saved.difference(shards).union(shards.values()))
        gm.recompile()
        return PassResult(gm, True)


def _gathered(issue: fx.Node) -> tuple[Any, ...]:
    """Returns a key that is equal for gathers of one tensor by the same ranks."""
    settings = tuple(argument for argument in issue.args if not isinstance(argument, fx.Node))
    return issue.target, settings, _shard_of(issue), bytes_of(issue.all_input_nodes[0])


def _shard_of(issue: fx.Node) -> fx.Node:
    """Returns the tensor that is gathered, behind views of it and operators that only order."""
    source = base_of(issue.all_input_nodes[0])
    while only_orders(source):
        source = base_of(source.all_input_nodes[0])
    return source


def _erase(node: fx.Node) -> None:
    """Erases ``node``, and the nodes that it alone reads."""
    pending = [node]
    while pending:
        unread = pending.pop()
        if unread.op == "call_function" and not unread.users:
            sources = unread.all_input_nodes
            unread.graph.erase_node(unread)
            pending += sources
