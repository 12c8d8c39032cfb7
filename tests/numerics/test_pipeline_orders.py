"""One stage's microbatches in any order: the planned one, and steps that deviate from it."""

import contextlib
import copy
import gc
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

HIDDEN = 16
SOME = torch.ones(4, HIDDEN)
PLANNED = "F0 F1 B0 F2 B1 F3 B2 B3"
DEVIATING = [
    "F0 F1 B0 F2 B1 B2",  # a microbatch is dropped
    "F0 F1 B1 F2 B0 F3 B2 B3",
    "F0 F1 B1 F3 B0 B3",
    "F0 F1 F2 F3 B0 B1 B2 B3",
    "F0 F1 F2 B0 F3 B3 B2 B1",
    "F0 F1 B0 F2",  # it fails: the others' backwards never come
    "F0 B0 F1 B1 F2 B2 F3 B3",
]


class Stage:
    """A compiled stage and the same in eager, whose gradients are compared after each step."""

    def __init__(self, num_microbatches: int = 1, **options: object) -> None:
        torch._dynamo.reset()
        state.reset()
        torch.manual_seed(0)
        self.own = nn.Sequential(Block(HIDDEN), Block(HIDDEN))
        self.eager = copy.deepcopy(self.own)
        declare_stages(self.own, num_microbatches=num_microbatches)
        chosen = {"lowering": "aten", "strict": True, "costs": "roofline", **options}
        self.run = torch.compile(self.own, backend="memo", dynamic=False, options=chosen)

    def step(self, order: str) -> None:
        for run in (self.run, self.eager):
            run.zero_grad()
        batch = torch.randn(8, 4, HIDDEN)
        self._run(self.run, order, batch)
        self._run(self.eager, order, batch)
        for mine, theirs in zip(self.own.parameters(), self.eager.parameters(), strict=True):
            most = float(theirs.grad.abs().max())
            assert float((mine.grad - theirs.grad).abs().max()) <= 3e-6 * most, order

    @staticmethod
    def _run(run: nn.Module, order: str, batch: torch.Tensor) -> None:
        live: dict[int, torch.Tensor] = {}
        for half in order.split():
            number = int(half[1:])
            if half[0] == "F":
                live[number] = run(batch[number]).pow(2).mean()
            else:
                live.pop(number).backward()


def test_steps_that_deviate_have_eagers_gradients_and_the_next_is_planned_again() -> None:
    for copies in ("copies-late", "copies-early"):
        stage = Stage(policy="full-offload", debug=("poison", copies))
        stage.step(PLANNED)
        stage.step(PLANNED)
        for order in DEVIATING:
            stage.step(order)
            before = memo_compile.report().unplanned_steps
            stage.step(PLANNED)
            assert memo_compile.report().unplanned_steps == before, order
        assert any("no member" in note for note in memo_compile.report().notes)


def test_an_order_that_comes_again_is_planned_for() -> None:
    stage = Stage(policy="full-recompute", debug=("poison",))
    stage.step(PLANNED)
    for _ in range(3):
        stage.step("F0 F1 F2 F3 B0 B1 B2 B3")
    before = memo_compile.report().unplanned_steps
    stage.step("F0 F1 F2 F3 B0 B1 B2 B3")
    assert memo_compile.report().unplanned_steps == before


def test_random_orders_have_eagers_gradients() -> None:
    stage, chance = Stage(policy="full-offload", debug=("poison", "copies-late")), random.Random(0)
    stage.step(PLANNED)
    for _ in range(20):
        order = [f"{half}{number}" for number in range(4) for half in "FB"]
        chance.shuffle(order)
        forwards = iter(sorted(half for half in order if half[0] == "F"))
        waiting, found = [], []
        for half in order:  # forwards in their order, a backward only of what is live
            if half[0] == "F":
                found.append(next(forwards))
                waiting.append(found[-1][1:])
            elif waiting:
                found.append(f"B{waiting.pop(chance.randrange(len(waiting)))}")
        stage.step(" ".join([*found, *(f"B{number}" for number in waiting)]))


def test_steps_that_deviate_under_a_budget_are_right_or_refused() -> None:
    """What is refused leaves nothing behind: the next step is planned, with eager's gradients."""

    def three_steps() -> None:
        stage = Stage(num_microbatches=4, memory_budget=1)
        for _ in range(3):
            stage.step(PLANNED)

    with pytest.raises(Infeasible, match="floor") as error:
        three_steps()
    assert error.value.floor_bytes is not None
    budget = error.value.floor_bytes + IGNORED_BYTES
    stage = Stage(num_microbatches=4, memory_budget=budget, debug=("poison", "copies-late"))
    for _ in range(2):
        stage.step(PLANNED)
    for order in [*DEVIATING, *DEVIATING[:3]]:
        with contextlib.suppress(Infeasible):
            stage.step(order)
        with torch.no_grad():
            torch.testing.assert_close(stage.run(SOME), stage.eager(SOME))
        gc.collect()
        before = memo_compile.report().unplanned_steps
        stage.step(PLANNED)
        assert memo_compile.report().unplanned_steps == before, order
        assert memo_compile.report().groups[-1].peak_bytes <= budget


@pytest.mark.full
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_the_first_refusal_names_a_floor_that_holds(num_microbatches: int) -> None:
    def steps(**options: object) -> None:
        stage = Stage(num_microbatches=num_microbatches, debug=("poison",), **options)
        for _ in range(4):
            stage.step(PLANNED)

    steps()
    unbounded = memo_compile.report().groups[-1].peak_bytes
    with pytest.raises(Infeasible, match="floor") as refused:
        steps(memory_budget=1)
    floor = refused.value.floor_bytes
    assert floor is not None
    assert floor <= unbounded
    steps(memory_budget=floor + IGNORED_BYTES)
    assert memo_compile.report().groups[-1].peak_bytes <= floor + IGNORED_BYTES


def held_microbatches(budget: int, **options: object) -> int:
    """Four of a large input each, one after the other, as 1F1B's last rank runs and keeps them.

    Returns in how many plans. Gradients are compared with eager's.
    """
    torch._dynamo.reset()
    state.reset()
    torch.manual_seed(0)
    own = nn.Sequential(Block(HIDDEN), Block(HIDDEN))
    eager = copy.deepcopy(own)
    chosen = {"lowering": "aten", "strict": True, "costs": "roofline", **options}
    chosen |= {"memory_budget": budget, "gradients": "accumulated", "token_tiles": 1}
    run, held = torch.compile(own, backend="memo", dynamic=False, options=chosen), []
    for _ in range(4):
        x = torch.randn(2**14, HIDDEN, requires_grad=True)  # 1 MiB, as is what comes of it
        held.append((x, run(x)))
        held[-1][1].pow(2).mean().backward()
        eager(x.detach()).pow(2).mean().backward()
    for mine, theirs in zip(own.parameters(), eager.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-5, atol=1e-8)
    return len(memo_compile.report().plans)


def test_microbatches_that_are_held_count_before_the_first_of_them() -> None:
    floors = []
    for more in ({}, {"microbatches": 4}):
        with pytest.raises(Exception, match="floor") as refused:
            held_microbatches(1, **more)
        floors.append(getattr(refused.value, "inner_exception", refused.value).floor_bytes)
    alone, together = floors
    assert 4.5 * 2**20 < together - alone < 6.5 * 2**20, "three times input and result, and slack"
    with pytest.raises(Infeasible, match=r"results of .* that are held"):
        held_microbatches(alone)
    assert held_microbatches(together, microbatches=4) == 1
