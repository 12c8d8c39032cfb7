"""The option ``gradients``: whether ``.grad`` exists when a step begins."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

import memo_compile
from memo_compile.driver.assemble import Assembly
from memo_compile.errors import Infeasible
from memo_compile.units import format_enough
from tests.numerics.small import Pair, Stack, rows
from tests.numerics.training import in_ci

MOVING = {
    "costs": "roofline",
    "token_granule": 4,
    "token_tiles": 1,
    "outputs": "dropped",
    "lowering": "aten",
}
STEPS = 4


def gradient_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


@functools.cache
def floor(gradients: str = "auto") -> tuple[int, str]:
    """The floor of a budget that no plan fits, and the words."""
    with pytest.raises(Infeasible) as raised:
        memo_compile.plan(
            Stack(num_layers=3),
            rows(1, 32),
            options={**MOVING, "gradients": gradients, "memory_budget": 1},
        )
    assert raised.value.floor_bytes is not None
    return raised.value.floor_bytes, str(raised.value)


def accumulate(pair: Pair, seed: int) -> None:
    """One more micro-batch."""
    pair.each(lambda model: model(rows(seed, 32)).backward())
    pair.assert_equal()


@pytest.fixture
def num_replans(monkeypatch):
    """How often a step was planned anew after it was compiled."""
    found = []
    replan = Assembly._replan
    monkeypatch.setattr(
        Assembly,
        "_replan",
        lambda self, *args, **more: found.append(1) or replan(self, *args, **more),
    )
    return found


def test_both_floors_are_in_the_first_error():
    kept = gradient_bytes(Stack(num_layers=3))
    fresh, words = floor()
    assert f"(accumulation): {format_enough(fresh + kept)}" in words
    accumulated, words = floor("accumulated")
    assert fresh <= accumulated < fresh + kept  # what leaves early is there once
    enough = f"at most {format_enough(accumulated)}"
    assert f"where no .grad exists before the step: {enough}" in words


@pytest.mark.parametrize("early_gradients", in_ci([True, False], True))
def test_a_plan_that_does_not_run_counts_gradients_as_the_backend_does(early_gradients):
    options = {
        **MOVING,
        "gradients": "accumulated",
        "early_gradients": early_gradients,
        "memory_budget": floor("accumulated")[0] + gradient_bytes(Stack(num_layers=3)),
    }
    planned = memo_compile.plan(Stack(num_layers=3), rows(1, 32), options=options)
    Pair(Stack(num_layers=3), **options).compiled(rows(1, 32))
    (ran,) = memo_compile.report().plans
    assert (planned.peak_bytes, planned.arena_bytes) == (ran.peak_bytes, ran.arena_bytes)


@pytest.mark.parametrize("gradients", ["accumulated", "auto"])
def test_accumulation_under_a_budget(gradients, num_replans):
    """What is said to be kept is planned for once, what is only found is planned for when found."""
    options = {**MOVING, "gradients": gradients}
    budget = floor("accumulated")[0]
    pair = Pair(Stack(num_layers=3), **options, memory_budget=budget + 2**14)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (pair.eager, pair.ours)]
    for step in range(STEPS):
        accumulate(pair, step)
        (plan,) = memo_compile.report().plans
        if gradients == "accumulated" or step % 2:
            assert plan.fixed.gradients == 2 * gradient_bytes(pair.ours)
        assert plan.peak_bytes <= plan.budget_bytes
        if step % 2:  # two micro-batches each
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert memo_compile.report().active
    assert len(num_replans) == (0 if gradients == "accumulated" else 1)


def test_gradients_that_exist_count_unless_they_are_said_not_to():
    model = Stack(num_layers=1)
    model(rows(1)).backward()
    planned = {
        gradients: memo_compile.plan(
            model, rows(1), options={"gradients": gradients, "lowering": "aten"}
        ).fixed.gradients
        for gradients in ("auto", "fresh", "accumulated")
    }
    kept = gradient_bytes(model)
    assert planned == {"auto": 2 * kept, "fresh": kept, "accumulated": 2 * kept}


def test_a_fresh_step_that_finds_gradients_is_planned_for_them(num_replans):
    """The promise may be broken, the budget not."""
    kept = gradient_bytes(Stack(num_layers=3))
    fresh = floor()[0]
    bound = fresh + kept // 2  # enough where gradients that are added leave early
    options = {**MOVING, "gradients": "fresh", "early_gradients": False}
    pair = Pair(Stack(num_layers=3), **options, memory_budget=bound)
    accumulate(pair, 1)
    with pytest.raises(Infeasible, match="Gradients were kept from the last step"):
        pair.compiled(rows(2, 32))
    pair.zero_grad()
    accumulate(pair, 2)
    assert memo_compile.report().plans[0].peak_bytes <= bound


class Gated(nn.Module):
    """Makes gradients of many sizes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)
        self.norm, self.other = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x):
        scaled = self.norm(x) * self.scale
        across = scaled.transpose(1, 2).contiguous().transpose(1, 2)
        left, right = torch.cat([across, scaled], -1).chunk(2, -1)
        x = x + self.left(left) * torch.sigmoid(self.right(right))
        gate, value = self.up(self.other(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * value)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)
        self.layers, self.norm = nn.ModuleList(Gated() for _ in range(3)), nn.LayerNorm(16)

    def forward(self, ids, labels):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


@pytest.mark.full
def test_the_floor_with_gradients_also_runs_the_first_step_which_has_none():
    """That step keeps its own gradients, which others would add to the ones that are there."""
    torch.manual_seed(0)
    batch, options = torch.randint(64, (2, 2, 33)), {**MOVING, "gradients": "accumulated"}
    with pytest.raises(Infeasible) as raised:
        memo_compile.plan(Named(), *batch, options={**options, "memory_budget": 1})
    pair = Pair(Named(), **options, memory_budget=raised.value.floor_bytes)
    for _ in range(3):
        pair.each(lambda model: model(*batch).backward())
        pair.assert_equal()
