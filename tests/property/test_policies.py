"""Whatever the step and the budget: a smaller budget never gives a larger peak or a faster step.

A floor that one process names is kept by another, which measures other seconds.
"""

import functools
import zlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memo_compile.errors import Infeasible
from memo_compile.planners.place_step import place_step
from memo_compile.planners.policy import choose
from memo_compile.step.movable import MEASURED, MovableStep
from memo_compile.step.plans import Plan
from memo_compile.step.problem import Problem
from memo_compile.step.simulate import peak_live_bytes
from tests.steps.movable import KIB, movable_step, recomputer


def place(problem: Problem) -> Plan:
    """A checked plan: InvalidPlan fails the test."""
    return place_step(problem, solver="greedy")


@settings(max_examples=8, deadline=None)
@given(
    num_layers=st.integers(1, 5),
    bytes_per_s=st.sampled_from((4 * KIB, 24 * KIB, 90 * KIB, 400 * KIB)),
    transient_bytes=st.sampled_from((2 * KIB, 40 * KIB)),
    host_budget_bytes=st.sampled_from((None, 100 * KIB)),
    exact=st.booleans(),
    solver=st.booleans(),
    shares=st.lists(st.floats(0.3, 1.0), min_size=2, max_size=3),
)
def test_smaller_budgets_never_give_larger_peaks(
    num_layers, bytes_per_s, transient_bytes, host_budget_bytes, exact, solver, shares
):
    step = movable_step(num_layers, bytes_per_s=bytes_per_s, transient_bytes=transient_bytes)
    recompute = recomputer(step)
    top = peak_live_bytes(step.problem)
    before = floor_bytes = None
    for share in sorted(shares, reverse=True):
        budget_bytes = int(top * share)
        chosen = functools.partial(
            choose,
            step,
            budget_bytes=budget_bytes,
            host_budget_bytes=host_budget_bytes,
            policy="auto",
            recompute=recompute,
            place=place,
            exact=exact,
            solver=solver,
        )
        try:
            choice = chosen()
        except Infeasible as error:
            floor_bytes = error.floor_bytes
            break
        assert choice.plan.peak_bytes <= budget_bytes
        assert host_budget_bytes is None or choice.problem.host_bytes <= host_budget_bytes
        assert not exact or all(mode.recompute_rows is None for mode in choice.moves.modes)
        if before is not None:
            assert choice.plan.peak_bytes <= before.plan.peak_bytes
            assert choice.timeline.step_s >= before.timeline.step_s * (1 - 1e-3)
        before = choice
    assert floor_bytes is None or floor_bytes > budget_bytes


class WithHoles:
    """A placement that leaves up to a share of the bytes alive unused; which, the program says."""

    def __init__(self, problem: Problem, share: float) -> None:
        names = ",".join(call.name for call in problem.calls)
        holes = share * (zlib.crc32(names.encode()) % 100) / 100
        self.peak_bytes = int(peak_live_bytes(problem) * (1 + holes))


@pytest.mark.full
@settings(max_examples=8, deadline=None)
@given(
    num_layers=st.integers(2, 5),
    bytes_per_s=st.sampled_from((12 * KIB, 40 * KIB, 90 * KIB)),
    holes=st.sampled_from((0.02, 0.1, 0.3)),
    policy=st.sampled_from(("auto", "greedy")),
)
def test_neither_do_they_where_placements_have_holes(num_layers, bytes_per_s, holes, policy):
    step = movable_step(num_layers, bytes_per_s=bytes_per_s)
    top = peak_live_bytes(step.problem)
    before = floor_bytes = None
    for percent in range(100, 30, -5):
        budget_bytes = top * percent // 100
        chosen = functools.partial(
            choose,
            step,
            budget_bytes=budget_bytes,
            host_budget_bytes=None,
            policy=policy,
            recompute=recomputer(step),
            place=functools.partial(WithHoles, share=holes),
            solver=False,
        )
        try:
            choice = chosen()
        except Infeasible as error:
            floor_bytes = error.floor_bytes
            break
        if before is not None:
            assert choice.plan.peak_bytes <= before.plan.peak_bytes
            assert choice.timeline.step_s >= before.timeline.step_s * (1 - 1e-3)
        before = choice
    assert floor_bytes is None or floor_bytes > budget_bytes


seconds = st.floats(0.05, 20.0)
"""By so much another process may measure."""


def measured(step: MovableStep, forward: float, backward: float, copies: float) -> MovableStep:
    """``step`` as a process sees it that measured other seconds."""
    factor = {"L": forward, "Lb": backward}
    costs = replace(
        step.costs,
        region_s={name: s * factor.get(name, 1.0) for name, s in step.costs.region_s.items()},
        d2h_bytes_per_s=step.costs.d2h_bytes_per_s / copies,
        h2d_bytes_per_s=step.costs.h2d_bytes_per_s / copies,
        source=MEASURED,
    )
    return replace(step, costs=costs)


@settings(max_examples=8, deadline=None)
@given(
    num_layers=st.integers(1, 5),
    transient_bytes=st.sampled_from((2 * KIB, 40 * KIB)),
    host_budget_bytes=st.sampled_from((None, 100 * KIB)),
    policy=st.sampled_from(("auto", "greedy")),
    here=st.tuples(seconds, seconds, seconds),
    there=st.tuples(seconds, seconds, seconds),
)
def test_a_floor_is_kept_where_other_seconds_are_measured(
    num_layers, transient_bytes, host_budget_bytes, policy, here, there
):
    step = movable_step(num_layers, transient_bytes=transient_bytes)

    def chosen(budget_bytes: int, times: tuple[float, float, float]) -> Plan:
        return choose(
            measured(step, *times),
            budget_bytes=budget_bytes,
            host_budget_bytes=host_budget_bytes,
            policy=policy,
            recompute=recomputer(step),
            place=place,
        ).plan

    with pytest.raises(Infeasible) as refused:
        chosen(1, here)
    floor_bytes = refused.value.floor_bytes
    assert floor_bytes is not None
    assert chosen(floor_bytes, there).peak_bytes <= floor_bytes
