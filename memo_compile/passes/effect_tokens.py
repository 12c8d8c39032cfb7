"""Removes the tokens by which AOTAutograd keeps operators with an effect in order.

An operator with an effect (it prints, or checks a result) takes a token and returns one, which the
next such operator of the half takes. A token has no memory in Inductor, so it cannot cross from
region to region. It need not: regions run in the order of their calls, and Inductor itself keeps
the effects of one region in order.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from memo_compile.analysis.purity import has_token, is_token
from memo_compile.analysis.views import results_of

_prims = torch.ops.prims


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensApart:
    """Gives every operator with an effect the half's first token, not that of the one before.

    Rewrite:
        token  = _make_token()                         token  = _make_token()
        first  = with_effects(token, print, x)         first  = with_effects(token, print, x)
        behind = first[0]                        ->
        second = with_effects(behind, print, y)        second = with_effects(token, print, y)
        last   = second[0]
        _sink_tokens([last])

    The first token is a constant, which each region makes itself. So no token goes from layer to
    layer, and the regions of equal layers are equal. Run the pass when it is settled in which
    region each operator runs: until then the tokens keep the effects in order.
    """

    name: ClassVar[str] = "tokens-apart"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        first_token = gm.graph.find_nodes(op="call_function", target=_prims._make_token.default)
        effects = [node for node in gm.graph.nodes if has_token(node)]
        for node in effects:
            node.update_arg(0, first_token[0])
        for sink in gm.graph.find_nodes(op="call_function", target=_prims._sink_tokens.default):
            gm.graph.erase_node(sink)
        for node in effects:
            for item in [user for user in node.users if is_token(user)]:
                gm.graph.erase_node(item)
        return PassResult(gm, bool(effects))


def num_tokens(half: fx.GraphModule) -> int:
    """Counts the results that are tokens, which AOTAutograd removes before it compiles."""
    return sum(map(_is_token, results_of(half.graph)))


def without_tokens(half: fx.GraphModule) -> fx.GraphModule:
    """Rewrites ``half`` as AOTAutograd compiles it: it makes its first token, and returns none."""
    for node in half.graph.find_nodes(op="placeholder"):
        if is_token(node):
            with half.graph.inserting_after(node):
                token = half.graph.call_function(_prims._make_token.default, ())
            token.meta = {"val": node.meta["val"]}
            node.replace_all_uses_with(token)
            half.graph.erase_node(node)
    output = half.graph.output_node()
    output.args = (tuple(result for result in results_of(half.graph) if not _is_token(result)),)
    return half


def _is_token(result: object) -> bool:
    return isinstance(result, fx.Node) and is_token(result)
