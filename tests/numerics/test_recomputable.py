"""``memo_compile.register_recomputable``: only declared custom operators run twice."""

import itertools
from typing import Any

import pytest
import torch
from torch import fx, nn

import memo_compile
from memo_compile.analysis.purity import is_repeatable
from memo_compile.analysis.row_rules import rule_of
from memo_compile.errors import ConfigError
from tests.numerics.small import Pair
from tests.numerics.training import assert_planned, in_ci

HIDDEN, TOKENS, LAYERS = 16, 48, 3
runs: list[str] = []


def _operator(name: str) -> Any:
    """The sine, as an operator into which nobody sees; it counts what it runs on."""

    @torch.library.custom_op(f"memo_tests::{name}", mutates_args=())
    def sine(x: torch.Tensor) -> torch.Tensor:
        runs.append(name)
        return x.sin()

    sine.register_fake(torch.empty_like)
    sine.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return sine


OPAQUE, DECLARED = _operator("opaque_sine"), _operator("declared_sine")
assert memo_compile.register_recomputable(DECLARED) is DECLARED


class Layer(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.function(self.up(x)))


def _pair(function: Any, **options: object) -> Pair:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(*(Layer(lambda x: function(x)) for _ in range(LAYERS)))
    return Pair(model, costs="roofline", token_tiles=1, **options)


def _step(pair: Pair, seed: int) -> int:
    """How often the operator runs in a step that computes what eager's does."""
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed))
    pair.zero_grad()
    runs.clear()
    pair.compiled(x).square().mean().backward()
    count = len(runs)
    pair.eager(x).square().mean().backward()
    pair.assert_equal()
    return count


SETTINGS = list(itertools.product(("aten", "inductor"), ("copies-early", "copies-late")))


@pytest.mark.parametrize(
    ("lowering", "schedule"),
    in_ci(SETTINGS, ("aten", "copies-early"), ("inductor", "copies-late")),
)
@pytest.mark.parametrize("function", [OPAQUE, DECLARED], ids=["opaque", "declared"])
def test_an_operator_runs_twice_only_where_it_is_declared(function, lowering, schedule):
    options = {"lowering": lowering, "debug": ("poison", schedule)}
    pair = _pair(function, policy="full-recompute", **options)
    for seed in range(3):
        count = _step(pair, seed)
    assert_planned()
    decisions = {
        row.decision for row in memo_compile.report().plans[-1].decisions if "sine" in row.tensor
    }
    if function is OPAQUE:
        assert count == LAYERS
        assert decisions == {"SAVE"}
    else:
        assert count > LAYERS
        assert "RECOMPUTE" in decisions


def test_a_tight_budget_does_not_run_an_operator_twice_either():
    floors = {}
    for function in (OPAQUE, DECLARED):
        pair = _pair(function, memory_budget=1, host_budget=0)
        with pytest.raises(memo_compile.errors.Infeasible) as refused:
            _step(pair, 0)
        floors[function] = refused.value.floor_bytes
    assert floors[DECLARED] < floors[OPAQUE]
    budget = floors[OPAQUE] + (LAYERS + 1) * 8 * HIDDEN * HIDDEN * 4  # gradients of later steps
    for function in (OPAQUE, DECLARED):
        pair = _pair(function, memory_budget=budget, host_budget=0)
        counts = [_step(pair, seed) for seed in range(2)]
        assert_planned()
        assert counts == [LAYERS] * 2 or function is DECLARED


@torch.library.custom_op("memo_tests::doubles_in_place", mutates_args=("x",))
def doubles(x: torch.Tensor) -> None:
    x.mul_(2)


@pytest.mark.parametrize(
    ("operator", "why"),
    [
        (doubles, "writes into its arguments, and is not pure"),
        (torch.ops.aten.sin, "expected a custom operator"),
        (torch.sin, "expected a custom operator"),
    ],
)
def test_what_is_not_pure_is_not_declared(operator, why):
    with pytest.raises(ConfigError, match=f"register_recomputable: .*{why}"):
        memo_compile.register_recomputable(operator)


def test_an_operator_of_torch_ops_is_declared_by_its_name():
    function = _operator("named_sine")
    memo_compile.register_recomputable(torch.ops.memo_tests.named_sine)
    pair = _pair(function, policy="full-recompute")
    assert _step(pair, 0) > LAYERS


def test_a_declared_operator_has_no_rule_by_its_short_name():
    """It may be called as one of torch is, and mix rows all the same."""
    function = memo_compile.register_recomputable(_operator("softmax"))
    graph = fx.Graph()
    node = graph.call_function(function._opoverload, (graph.placeholder("x"),))
    assert is_repeatable(node)
    assert rule_of(node) is None
