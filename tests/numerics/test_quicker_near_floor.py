"""Steps whose layers recompute in different ways near the floor compute what eager does."""

from dataclasses import replace

from memo_compile.planners.policy.candidates import CandidateSource
from memo_compile.planners.policy.modes import layer_modes
from tests.numerics.budget_cases import Case, floor_bytes, reference, traced

SCHEDULES = ("poison,copies-early", "poison,copies-late")


def test_plans_that_were_changed_slot_by_slot_equal_eager(monkeypatch):
    """All other plans of greedy are left out here."""
    found = []

    def only_changed(source):
        plain, modes = near_floor(source), layer_modes(source.step, source.recompute)
        changed = [own for own in source._slot_by_slot(plain, modes) if own not in plain]
        found.extend(changed)
        return tuple(changed)

    near_floor = CandidateSource._near_floor
    case = Case(model="mixtral", decision="greedy")
    step, least = traced(case), floor_bytes(case)
    monkeypatch.setattr(CandidateSource, "_near_floor", only_changed)
    monkeypatch.setattr(CandidateSource, "_far_from_floor", lambda source: ())
    for schedule in SCHEDULES:
        asked = replace(case, schedule=schedule).options()
        ours, plan = step.run({**asked, "memory_budget": int(1.02 * least)})
        assert found
        assert next(point.policy for point in plan.frontier if point.chosen) == "greedy"
        assert plan.peak_bytes <= int(1.02 * least)
        assert plan.offloaded_bytes + plan.recomputed_bytes
        reference(case.model, case.shape).assert_close(ours)
