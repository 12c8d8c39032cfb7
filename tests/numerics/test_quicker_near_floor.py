"""Steps whose layers recompute in different ways near the floor compute what eager does."""

from dataclasses import replace

from memo_compile.planners.policy.candidates import CandidateSource
from tests.numerics.budget_cases import Case, floor_bytes, reference, traced

SCHEDULES = ("poison,copies-early", "poison,copies-late")


def test_a_plan_with_quicker_modes_equals_eager(monkeypatch):
    """All plans of greedy's sequences are left out here but those that got quicker modes."""
    found = []

    def only(source, model, **_):
        slower = set(plain(source, model))
        for chosen in plain(source, model, quickens=True):
            if chosen not in slower:
                found.append(chosen)
                yield chosen

    plain = CandidateSource._near_floor_of
    monkeypatch.setattr(CandidateSource, "_near_floor_of", only)
    monkeypatch.setattr(CandidateSource, "_far_from_floor", lambda source: ())
    case = Case(model="mixtral", decision="greedy")
    step, least = traced(case), floor_bytes(case)
    for schedule in SCHEDULES:
        asked = replace(case, schedule=schedule).options()
        ours, plan = step.run({**asked, "memory_budget": least})
        assert found
        assert next(point.policy for point in plan.frontier if point.chosen) == "greedy"
        assert plan.peak_bytes <= least
        assert plan.offloaded_bytes + plan.recomputed_bytes
        reference(case.model, case.shape).assert_close(ours)
