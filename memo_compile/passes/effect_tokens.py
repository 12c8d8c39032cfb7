"""Operators with an effect (a check of results, a print) and the tokens that order them.

AOTAutograd threads a token through all of a half: each effect takes the token of the one before.
A token is no tensor to Inductor, so that it cannot go from one region to the next; and it need not,
since regions run in the order of their calls, and Inductor orders the effects of one itself.
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
    """Each effect takes a token that is made for it, in place of the one of the effect before.

    Rewrite:
        token  = _make_token()                         token  = _make_token()
        first  = with_effects(token, print, x)         first  = with_effects(token, print, x)
        behind = first[0]                        ->
        second = with_effects(behind, print, y)        second = with_effects(token, print, y)
        last   = second[0]
        _sink_tokens([last])

    Where ``x`` and ``y`` are of two layers, each region makes the token itself, as it makes every
    constant that it reads, and the regions of two layers are equal. Run it when it is known where
    each operator runs: until then the tokens keep the effects in order.
    """

    name: ClassVar[str] = "tokens-apart"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        made = gm.graph.find_nodes(op="call_function", target=_prims._make_token.default)
        effects = [node for node in gm.graph.nodes if has_token(node)]
        for node in effects:
            node.update_arg(0, made[0])
        for sink in gm.graph.find_nodes(op="call_function", target=_prims._sink_tokens.default):
            gm.graph.erase_node(sink)
        for node in effects:
            for item in [user for user in node.users if is_token(user)]:
                gm.graph.erase_node(item)
        return PassResult(gm, bool(effects))


def num_tokens(half: fx.GraphModule) -> int:
    """How many of the results are tokens, which AOTAutograd takes away before it compiles."""
    return sum(isinstance(own, fx.Node) and is_token(own) for own in results_of(half.graph))


def without_tokens(half: fx.GraphModule) -> fx.GraphModule:
    """A half as AOTAutograd compiles it: it makes its first token, and returns none; in place."""
    for node in half.graph.find_nodes(op="placeholder"):
        if is_token(node):
            with half.graph.inserting_after(node):
                made = half.graph.call_function(_prims._make_token.default, ())
            made.meta = {"val": node.meta["val"]}
            node.replace_all_uses_with(made)
            half.graph.erase_node(node)
    output = half.graph.output_node()
    results = [own for own in results_of(half.graph) if not (_is_node(own) and is_token(own))]
    output.args = (tuple(results),)
    return half


def _is_node(value: object) -> bool:
    return isinstance(value, fx.Node)
