"""Layers with operators that have an effect: their results are checked, they print, they count."""

import functools

import pytest
import torch
from torch import nn

import memo_compile
from tests.numerics.closeness import assert_equals_eager
from tests.numerics.small import Pair
from tests.numerics.training import ATEN, INDUCTOR, in_ci

EYE = torch.eye(8)
ROWS = torch.randn(4, 16, 8, generator=torch.Generator().manual_seed(1))

SOLVERS = {
    "inv": lambda w: torch.linalg.inv(w @ w.t() + EYE),
    "cholesky": lambda w: torch.linalg.cholesky(w @ w.t() + EYE),
    "solve": lambda w: torch.linalg.solve(w @ w.t() + EYE, w),
    "cayley": lambda w: torch.linalg.solve(EYE + (w - w.t()), EYE - (w - w.t())),
    "power": lambda w: torch.linalg.matrix_power(w @ w.t() + EYE, -2),
    "lu_factor": lambda w: torch.linalg.lu_factor(w @ w.t() + EYE)[0],
}


class Turned(nn.Module):
    """Layers that multiply with what ``turn`` makes of a weight."""

    def __init__(self, turn, num_layers: int = 3) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8) / 3 for _ in range(num_layers))
        self.turn = turn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x + x @ self.turn(weight)) @ weight
        return x.square().mean()


def require_equal(model: nn.Module, **options: object) -> memo_compile.Report:
    pair = Pair(model, **options)
    for _ in range(2):
        pair.assert_step(ROWS)
    report = memo_compile.report()
    assert report.active
    assert [found.num_layers for found in report.plans[-1].layer_classes] == [3]
    return report


@pytest.mark.parametrize("policy", in_ci(["auto", "full-recompute"], "full-recompute"))
@pytest.mark.parametrize("turn", in_ci(SOLVERS, "cholesky", "cayley"))
def test_what_checks_its_result_stands_in_layers(turn, policy):
    require_equal(Turned(SOLVERS[turn]), policy=policy)


@pytest.mark.parametrize("turn", in_ci(SOLVERS, "inv"))
def test_the_same_through_inductor(turn):
    require_equal(Turned(SOLVERS[turn]), **INDUCTOR)


def test_layers_are_lowered_once():
    few = require_equal(Turned(SOLVERS["inv"], num_layers=3)).plans[-1].num_regions
    torch._dynamo.reset()
    Pair(Turned(SOLVERS["inv"], num_layers=6)).assert_step(ROWS)
    assert memo_compile.report().plans[-1].num_regions == few


def test_a_budget_of_layers_with_effects():
    require_equal(Turned(SOLVERS["inv"]), memory_budget="1MiB")


def test_a_plan_of_a_step_that_never_runs():
    model = Turned(SOLVERS["inv"])
    plan = memo_compile.plan(model, ROWS, options={"lowering": "aten", "memory_budget": "1MiB"})
    assert 0 < plan.peak_bytes <= 1 << 20


def test_a_singular_matrix_is_an_error_as_in_eager():
    model = Turned(torch.linalg.inv)
    with torch.no_grad():
        model.weights[1].zero_()
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        torch.compile(model, backend="memo", options=ATEN)(ROWS)


@functools.cache
def noted() -> tuple[list[float], torch._library.custom_ops.CustomOpDef]:
    """A custom operator that writes down what it is given, in order, and what it wrote down."""
    numbers: list[float] = []

    @torch.library.custom_op("memo_tests::note", mutates_args=())
    def note(x: torch.Tensor, number: float) -> torch.Tensor:
        numbers.append(number)
        return x.clone()

    note.register_fake(lambda x, number: torch.empty_like(x))

    def setup(ctx, inputs, output):
        ctx.number = inputs[1]

    def backward(ctx, gradient):
        return note(gradient, -ctx.number), None

    note.register_autograd(backward, setup_context=setup)
    note.register_effect(torch.library.EffectType.ORDERED)
    return numbers, note


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "auto"},
        {"policy": "full-recompute"},
        {"token_tiles": 2},
        pytest.param(INDUCTOR, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_effects_keep_their_order_and_happen_once(options):
    numbers, note = noted()

    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(8, 8) / 3 for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            note(x, 100.0)
            for at, weight in enumerate(self.weights, start=1):
                x = note(torch.tanh(note(x, at) @ weight), at + 0.5)
            return x.square().mean()

    numbers.clear()
    pair = Pair(Noting(), **options)
    pair.eager(ROWS).backward()
    expected = list(numbers)
    for _ in range(2):
        numbers.clear()
        pair.ours.zero_grad()
        pair.compiled(ROWS).backward()
        assert numbers == expected
        assert_equals_eager(pair.ours, pair.eager)
    assert memo_compile.report().active
