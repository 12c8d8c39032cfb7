"""A plan that lacks a few bytes of its budget is placed with all effort."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from memo_compile.driver.step_planner import NEARLY, StepPlanner
from memo_compile.errors import Infeasible
from memo_compile.planners.place_step import placed_step
from tests.steps.movable import movable_step


def test_a_capacity_below_what_is_alive_is_refused_and_one_at_it_is_kept():
    problem = movable_step(4).problem
    least = placed_step(problem).lower_bound_bytes
    assert placed_step(problem, capacity_bytes=least).arena_bytes <= least
    with pytest.raises(Infeasible, match="no arena of"):
        placed_step(problem, capacity_bytes=least - 512)


@pytest.mark.parametrize(("missing", "tries"), [(0.5, 1), (2.0, 0)])
def test_only_what_lacks_few_bytes_is_placed_without_holes(missing, tries):
    """Of candidates that a second's search leaves above the budget, by parts of ``NEARLY``."""
    problem = movable_step(4).problem
    whole = placed_step(problem)
    more = int(missing * NEARLY * whole.arena_bytes)
    with_holes = replace(
        whole, arena_bytes=whole.arena_bytes + more, peak_bytes=whole.peak_bytes + more
    )
    capacities = []

    def place(problem, capacity_bytes=None, **limits):
        capacities.extend([] if capacity_bytes is None else [capacity_bytes])
        return with_holes if capacity_bytes is None else whole

    planner = SimpleNamespace(_place=place, known=SimpleNamespace(place=None))
    planner._placed_without_holes = lambda *own: StepPlanner._placed_without_holes(planner, *own)
    found = StepPlanner._place_candidate(planner, problem, whole.peak_bytes)
    assert capacities == [whole.lower_bound_bytes] * tries
    if tries:
        assert found.peak_bytes == whole.peak_bytes
