"""What takes no time is made by one region on the way, and again by a later one: as eager."""

from dataclasses import dataclass, field, replace

import pytest

from memo_compile.driver import decide
from memo_compile.planners import move_rules
from memo_compile.planners.move_rules import closure_of, recompute_keys
from tests.numerics import budget_cases
from tests.numerics.budget_cases import SCHEDULES, Case, Shape, floor_bytes, reference, traced

ALL, SOME = 1.0, 0.2
"""So that all of a layer takes no time, and so that some of it does."""


@dataclass
class Made:
    """What regions of chosen plans make that others make too, or read."""

    passing: list[tuple[int, ...]] = field(default_factory=list)
    """What they make on the way."""
    read: list[frozenset[int | None]] = field(default_factory=list)
    """What they read that an earlier region of the layer has made again."""

    def add(self, cls, keys):
        """Those of ``keys``, the regions of a layer."""
        made = set()
        for key in keys:
            ops = closure_of(cls, key.slots, key.passing)
            sources = {cls.ops[source].slot for at in ops for source in cls.ops[at].inputs}
            self.passing.append(key.passing)
            self.read.append(frozenset(sources & made))
            made.update(key.slots)


@pytest.fixture
def made(monkeypatch) -> Made:
    found = Made()

    def choose(step, **more):
        choice = decide_choose(step, **more)
        for layer, mode in zip(step.layers, choice.moves.modes, strict=True):
            found.add(step.class_of(layer), recompute_keys(step.class_of(layer), mode))
        return choice

    decide_choose = decide.choose
    monkeypatch.setattr(decide, "choose", choose)
    return found


@pytest.mark.full
@pytest.mark.parametrize(("model", "no_time"), [("llama", ALL), ("gpt2", ALL), ("llama", SOME)])
def test_slots_that_two_regions_make_equal_eager(made, monkeypatch, model, no_time):
    monkeypatch.setattr(move_rules, "NO_TIME", no_time)
    shape = f"long, no time {no_time}"  # floors are remembered by it
    monkeypatch.setitem(budget_cases.SHAPES, shape, Shape(tokens=128, tiles=4))
    case = Case(model=model, decision="full-recompute", shape=shape)
    step, least = traced(case), floor_bytes(case)
    for schedule in SCHEDULES:
        made.passing.clear()
        made.read.clear()
        asked = replace(case, schedule=schedule).options()
        ours, plan = step.run({**asked, "memory_budget": least})
        assert any(made.passing)
        assert any(made.read) == (no_time == SOME)
        assert plan.peak_bytes <= least
        reference(case.model, case.shape).assert_close(ours)
