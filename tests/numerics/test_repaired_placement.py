"""A deep step whose placement had holes until it was repaired computes what eager does."""

import functools
from dataclasses import replace

import pytest

from memo_compile.planners.placement import planner
from memo_compile.planners.placement.compiled import has_numba
from tests import models
from tests.numerics import budget_cases
from tests.numerics.budget_cases import Case, Shape, floor_bytes, reference, traced

LAYERS = 12
"""So many have over 2,000 buffers in tiles."""
SCHEDULES = ("poison,copies-early", "poison,copies-late")


@pytest.mark.skipif(not has_numba(), reason="numba is an optional extra")
def test_a_step_whose_placement_was_repaired_equals_eager(monkeypatch):
    repaired = []

    def spied(answer, effort):
        better = plain(answer, effort)
        repaired.append(better.height < answer.height)
        return better

    plain = planner._repaired
    monkeypatch.setattr(planner, "_repaired", spied)
    monkeypatch.setitem(
        budget_cases.MODELS, "deep", functools.partial(models.llama, num_layers=LAYERS)
    )
    monkeypatch.setitem(budget_cases.SHAPES, "tiled", Shape(tokens=64, tiles=4))
    case = Case(model="deep", decision="greedy", shape="tiled")
    step, least = traced(case), floor_bytes(case)
    assert any(repaired)
    for schedule in SCHEDULES:
        asked = replace(case, schedule=schedule).options()
        ours, plan = step.run({**asked, "memory_budget": least})
        assert plan.peak_bytes <= least
        assert plan.offloaded_bytes + plan.recomputed_bytes
        reference(case.model, case.shape).assert_close(ours)
