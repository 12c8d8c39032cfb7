"""Plans near the floor compute what eager does: late modes, and copies that leave bytes free."""

from dataclasses import replace

import pytest

from memo_compile.driver import decide
from memo_compile.planners.policy import candidates, modes
from memo_compile.planners.policy.frontier import Choice
from memo_compile.planners.policy.modes import make_mode, reading_late
from memo_compile.planners.policy.subsets import recompute_sets
from memo_compile.step.movable import Action, LayerClass
from tests.numerics import budget_cases
from tests.numerics.budget_cases import SCHEDULES, Case, Shape, floor_bytes, reference, traced

SPARE = 0.06


def late_modes(step, class_key, recompute, **_):
    """Everything saved, or what may be made again late, and the rest copied."""
    cls = step.classes[class_key]
    found = [make_mode(cls), *modes._late_modes(cls, recompute_sets(cls))]
    return tuple(modes._costs(cls, found, recompute))


def is_late(cls: LayerClass, mode: modes.Mode) -> bool:
    again = frozenset(mode.slots(Action.RECOMPUTE))
    return bool(mode.slots(Action.OFFLOAD) and again) and reading_late(cls, again) == again


@pytest.fixture
def chosen(monkeypatch) -> list[Choice]:
    """The choices among late modes whose copies to the host leave bytes free."""
    found = []

    def choose(step, **more):
        choice = decide_choose(step, **more)
        layers = zip(step.layers, choice.moves.modes, strict=True)
        found.append((choice, any(is_late(step.class_of(own), mode) for own, mode in layers)))
        return choice

    decide_choose = decide.choose
    monkeypatch.setattr(decide, "choose", choose)
    monkeypatch.setattr(modes, "class_modes", late_modes)
    monkeypatch.setattr(candidates.CandidateSource, "steady", lambda _: [])
    for name in ("ONCE", "NEXT", "WIDE"):
        schedule = replace(getattr(candidates, name), spare=SPARE)
        monkeypatch.setattr(candidates, name, schedule)
    shape = Shape(tokens=128, tiles=4)
    monkeypatch.setitem(budget_cases.SHAPES, "long", shape)
    return found


def test_late_modes_and_spared_copies_equal_eager(chosen):
    case = Case(model="llama", decision="greedy", shape="long")
    step, least = traced(case), floor_bytes(case)
    for schedule in SCHEDULES:
        chosen.clear()
        asked = replace(case, schedule=schedule).options()
        ours, plan = step.run({**asked, "copy_bytes_per_s": 2e8, "memory_budget": least})
        choice, is_any_late = chosen[-1]
        assert plan.peak_bytes <= least
        assert choice.moves.schedule.spare == SPARE
        assert is_any_late
        assert plan.offloaded_bytes
        assert plan.recomputed_bytes
        reference(case.model, case.shape).assert_close(ours)
