"""What takes no time is made by one region on the way, and again by a later one: as eager."""

from dataclasses import replace

import pytest

from memo_compile.driver import decide
from memo_compile.planners import move_rules
from memo_compile.planners.move_rules import recompute_keys
from tests.numerics import budget_cases
from tests.numerics.budget_cases import SCHEDULES, Case, Shape, floor_bytes, reference, traced

NO_TIME = 1.0
"""So that all of a layer takes no time."""


@pytest.fixture
def passing(monkeypatch) -> list[tuple[int, ...]]:
    """The slots that regions of chosen plans make on the way."""
    found = []

    def choose(step, **more):
        choice = decide_choose(step, **more)
        for layer, mode in zip(step.layers, choice.moves.modes, strict=True):
            found.extend(key.passing for key in recompute_keys(step.class_of(layer), mode))
        return choice

    decide_choose = decide.choose
    monkeypatch.setattr(decide, "choose", choose)
    monkeypatch.setattr(move_rules, "NO_TIME", NO_TIME)
    monkeypatch.setitem(budget_cases.SHAPES, "long", Shape(tokens=128, tiles=4))
    return found


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_slots_that_two_regions_make_equal_eager(passing, model):
    case = Case(model=model, decision="full-recompute", shape="long")
    step, least = traced(case), floor_bytes(case)
    for schedule in SCHEDULES:
        passing.clear()
        asked = replace(case, schedule=schedule).options()
        ours, plan = step.run({**asked, "memory_budget": least})
        assert any(passing)
        assert plan.peak_bytes <= least
        reference(case.model, case.shape).assert_close(ours)
