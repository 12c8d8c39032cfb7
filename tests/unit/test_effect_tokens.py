"""Effects in a half's graph: each has a token of its own, none is a result."""

import operator

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from memo_compile.analysis.purity import has_effect, has_token, is_token
from memo_compile.analysis.views import results_of
from memo_compile.passes.effect_tokens import TokensApart, num_tokens, without_tokens
from memo_compile.passes.own_inputs import inputs_of

with_effects = torch.ops.higher_order.with_effects
show = torch.ops.aten._print.default


def half_with_prints(num_prints: int) -> fx.GraphModule:
    """A forward as AOTAutograd gives it to a partitioner."""
    graph = fx.Graph()
    token, x = graph.placeholder("primals_1"), graph.placeholder("primals_2")
    with FakeTensorMode():
        token.meta["val"], x.meta["val"] = torch.empty(0), torch.empty(4)
    behind = token
    for _ in range(num_prints):
        shown = graph.call_function(with_effects, (behind, show, "here"))
        behind = graph.call_function(operator.getitem, (shown, 0))
        x = graph.call_function(torch.ops.aten.cos.default, (x,))
    graph.output((behind, x))
    return fx.GraphModule({}, graph)


def test_tokens_are_no_inputs_and_no_results():
    half = half_with_prints(2)
    assert [node.name for node in inputs_of(half.graph)] == ["primals_2"]
    assert num_tokens(half) == 1
    without_tokens(half)
    half.graph.lint()
    assert num_tokens(half) == 0
    assert [node.target for node in results_of(half.graph)] == [torch.ops.aten.cos.default]
    assert [node.name for node in half.graph.find_nodes(op="placeholder")] == ["primals_2"]


def test_each_effect_has_its_own_token():
    half = without_tokens(half_with_prints(3))
    assert TokensApart()(half).modified
    half.graph.lint()
    effects = [node for node in half.graph.nodes if has_token(node)]
    assert len(effects) == 3
    assert all(has_effect(node) for node in effects)
    made = half.graph.find_nodes(op="call_function", target=torch.ops.prims._make_token.default)
    assert {node.args[0] for node in effects} == set(made)
    assert not any(is_token(node) for node in half.graph.nodes)


def test_a_half_without_effects_stays():
    half = half_with_prints(0)
    assert not TokensApart()(half).modified
