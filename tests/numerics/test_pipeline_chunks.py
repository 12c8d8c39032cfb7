"""A rank with two stages: all their microbatches are one step, and its numbers are eager's."""

import copy
import random

import pytest
import torch
from torch import nn

import memo_compile
from memo_compile.driver.declared import declare_stages
from memo_compile.errors import Infeasible
from memo_compile.reporting import state
from memo_compile.step.interludes import IGNORED_BYTES
from tests.numerics.small import Block

HIDDEN, MICROBATCHES = 16, 3
INTERLEAVED = "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 F1.2 B0.1 B1.2 B0.2"
"""Halves as (stage).(microbatch)."""
NESTED = "F0.0 F0.1 F0.2 F1.0 F1.1 F1.2 B1.2 B1.1 B1.0 B0.2 B0.1 B0.0"
DEVIATING = [
    "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 B0.0 B0.1",  # a microbatch is dropped
    NESTED,
    "F0.0 F1.0 F0.1 F1.1 B1.1 B1.0 F0.2 B0.0 F1.2 B0.1 B1.2 B0.2",
    "F0.0 F0.1 F1.0 B1.0",  # it fails: the others' backwards never come
    "F0.0 F0.1 F1.0 B0.1 B0.0 B1.0",
]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.out = Block(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.block(x)).tanh()


class Stages:
    """Two compiled stages and the same in eager; gradients are compared after each step."""

    def __init__(
        self,
        *,
        alike: bool = False,
        rows: tuple[int, ...] = (4,),
        shares: tuple[float, ...] = (),
        **options: object,
    ) -> None:
        torch._dynamo.reset()
        state.reset()
        torch.manual_seed(0)
        self.rows = rows
        self.own = [nn.Sequential(Block(HIDDEN)), nn.Sequential(Block(HIDDEN)) if alike else Head()]
        self.eager = copy.deepcopy(self.own)
        declare_stages(*self.own, num_microbatches=MICROBATCHES, shares=shares)
        chosen = {"lowering": "aten", "strict": True, "costs": "roofline", **options}
        self.run = [
            torch.compile(part, backend="memo", dynamic=False, options=chosen) for part in self.own
        ]

    def step(self, order: str, *, zero: bool = True) -> None:
        if zero:
            for part in (*self.own, *self.eager):
                part.zero_grad()
        numbers = [
            [
                torch.randn(2, 2, self.rows[at % len(self.rows)], HIDDEN)
                for at in range(MICROBATCHES)
            ]
            for _ in self.own
        ]
        ours, theirs = (self._run(run, order, numbers) for run in (self.run, self.eager))
        assert ours.keys() == theirs.keys()
        pairs = [(ours[name], theirs[name]) for name in ours]
        for own, eager in zip(self.own, self.eager, strict=True):
            pairs += [
                (mine.grad, other.grad)
                for mine, other in zip(own.parameters(), eager.parameters(), strict=True)
                if other.grad is not None
            ]
        for mine, other in pairs:
            assert float((mine - other).abs().max()) <= 5e-6 * float(other.abs().max()), order

    @staticmethod
    def _run(
        run: list[nn.Module], order: str, numbers: list[list[torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Results and gradients of inputs; what comes from other ranks is drawn."""
        live: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        found: dict[str, torch.Tensor] = {}
        for half in order.split():
            stage, microbatch = (int(part) for part in half[1:].split("."))
            given, arriving = numbers[stage][microbatch]
            if half[0] == "F":
                x = given.clone().requires_grad_()
                live[half[1:]] = x, run[stage](x)
                found[half] = live[half[1:]][1].detach().clone()
            else:
                x, made = live.pop(half[1:])
                made.backward(arriving)
                assert x.grad is not None
                found[half] = x.grad
        return found


@pytest.mark.parametrize("alike", [False, True])
def test_two_stages_of_a_rank_are_planned_as_one_step(alike: bool) -> None:
    stages = Stages(alike=alike, policy="full-offload", debug=("poison", "copies-late"))
    stages.step("F0.0 F1.0 B1.0 B0.0")  # as torch does to find out shapes
    stages.step(INTERLEAVED)
    before = memo_compile.report().unplanned_steps
    for _ in range(2):
        stages.step(INTERLEAVED)
    stages.step(INTERLEAVED, zero=False)
    report = memo_compile.report()
    assert report.unplanned_steps == before
    (group,) = report.groups
    assert group.num_instances == 2 * MICROBATCHES
    assert group.offloaded_bytes == group.host_bytes > 0


def test_steps_that_deviate_have_eagers_gradients_and_the_next_is_planned_again() -> None:
    stages = Stages(policy="full-offload", debug=("poison", "copies-early"), memory_budget="1GiB")
    for _ in range(2):
        stages.step(INTERLEAVED)
    for order in DEVIATING:
        stages.step(order)
        before = memo_compile.report().unplanned_steps
        stages.step(INTERLEAVED)
        assert memo_compile.report().unplanned_steps == before, order
    for _ in range(2):
        stages.step(NESTED)
    before = memo_compile.report().unplanned_steps
    stages.step(NESTED)
    assert memo_compile.report().unplanned_steps == before, "an order that comes again"


def test_random_orders_of_two_stages_have_eagers_gradients() -> None:
    stages, chance = (
        Stages(policy="full-offload", debug=("poison", "copies-late")),
        random.Random(1),
    )
    stages.step(INTERLEAVED)
    for _ in range(8):
        forwards = [f"{stage}.{at}" for stage in range(2) for at in range(MICROBATCHES)]
        chance.shuffle(forwards)
        waiting: list[str] = []
        order: list[str] = []
        while forwards or waiting:
            if forwards and (not waiting or chance.random() < 0.6):
                waiting.append(forwards.pop())
                order.append(f"F{waiting[-1]}")
            else:
                order.append(f"B{waiting.pop(chance.randrange(len(waiting)))}")
        stages.step(" ".join(order))


def test_microbatches_of_two_sizes_are_one_step_under_a_budget() -> None:
    stages = Stages(rows=(4, 3), policy="full-recompute", debug=("poison",), memory_budget="1GiB")
    for _ in range(2):
        stages.step(INTERLEAVED)
    before = memo_compile.report().unplanned_steps
    stages.step(INTERLEAVED)
    report = memo_compile.report()
    assert report.unplanned_steps == before
    assert [group.num_instances for group in report.groups] == [2 * MICROBATCHES]


def test_kwais_amounts_are_what_goes_to_the_host() -> None:
    offloaded = {}
    for shares in ((0.0, 0.0), (0.5, 0.0), (0.5, 0.5), (1.0, 1.0)):
        stages = Stages(alike=True, shares=shares, debug=("poison", "copies-late"))
        for _ in range(2):
            stages.step(INTERLEAVED)
        (group,) = memo_compile.report().groups
        assert group.offloaded_bytes == group.host_bytes
        assert group.recomputed_bytes == 0
        offloaded[shares] = group.offloaded_bytes
    all_bytes = offloaded[1.0, 1.0]
    assert offloaded[0.0, 0.0] == 0 < all_bytes
    assert 2 * offloaded[0.5, 0.0] == offloaded[0.5, 0.5]
    assert 0.5 * all_bytes <= offloaded[0.5, 0.5] < all_bytes


def test_a_budget_below_the_floor_of_stages_that_share_a_graph_is_refused() -> None:
    stages = Stages(alike=True, memory_budget=1)
    for _ in range(2):  # in so many memory is looked at
        stages.step(INTERLEAVED)
    with pytest.raises(Infeasible, match="6 forwards of a pipeline's rank") as refused:
        stages.step(INTERLEAVED)
    assert refused.value.floor_bytes is not None
    budget = refused.value.floor_bytes + 4 * IGNORED_BYTES
    stages = Stages(alike=True, memory_budget=budget)
    for _ in range(3):
        stages.step(INTERLEAVED)
    (group,) = memo_compile.report().groups
    assert group.peak_bytes <= budget
