"""The bound of a step against random plans of it: none is faster."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from memo_compile.planners.moves import apply_moves
from memo_compile.planners.policy.candidate import simulated
from memo_compile.planners.policy.model import least_cost_s
from memo_compile.planners.step_bound import step_lower_bound_s
from memo_compile.planners.transfers import with_time
from memo_compile.step.movable import Action, Mode, Moves, Schedule, StepCosts
from memo_compile.step.problem import OutsideBuffer
from memo_compile.step.simulate import peak_live_bytes, simulate
from memo_compile.step.timed import TimedProgram
from tests.steps.drawn_moves import moved_steps, regions_of, talking_steps
from tests.steps.movable import (
    KIB,
    LayerKind,
    costs_of,
    movable_step,
    recomputer,
    repeated,
)

FAST = 1e-7
"""A step that takes some ten seconds in these units takes microseconds."""


@settings(max_examples=150, deadline=None)
@given(drawn=moved_steps() | talking_steps(), wide=st.booleans())
def test_no_plan_is_faster_than_the_bound_at_its_own_peak(drawn, wide):
    step, moves, problem = drawn
    costs = costs_of(step, *regions_of(step, moves))
    if wide:
        program = TimedProgram(problem, costs)
        problem = with_time(program, program.peak_bytes).program.problem
    bound_s = step_lower_bound_s(
        step, budget_bytes=peak_live_bytes(problem), host_budget_bytes=problem.host_bytes
    )
    assert bound_s <= simulate(problem, costs).step_s * (1 + 1e-6)
    assert bound_s >= step_lower_bound_s(step, budget_bytes=None)


@settings(deadline=None)
@given(drawn=moved_steps() | talking_steps(), widen=st.sampled_from([0.0, 1.0, 1.5]))
def test_no_plan_costs_less_than_its_decisions_do_at_least(drawn, widen):
    step, moves, _ = drawn
    moves = replace(moves, schedule=replace(moves.schedule, widen=widen))
    least = least_cost_s(step, moves, recomputer(step))
    assert least <= simulated(step, moves, recomputer(step)).cost_s * (1 + 1e-9)


def test_the_bound_of_a_smaller_budget_is_higher():
    step = movable_step(4)
    most = peak_live_bytes(step.problem)
    bounds = [step_lower_bound_s(step, budget_bytes=most - less * 40 * KIB) for less in range(8)]
    assert bounds == sorted(bounds)
    assert bounds[0] < bounds[2] < bounds[-1]


def test_without_a_budget_it_is_the_computation():
    step = movable_step(3)
    alone = simulate(step.problem, step.costs).step_s
    assert step_lower_bound_s(step, budget_bytes=None) == pytest.approx(alone)


def test_a_budget_that_no_plan_keeps_has_no_end():
    assert step_lower_bound_s(movable_step(3), budget_bytes=KIB) == float("inf")


def test_what_a_call_has_read_may_be_gone_before_it_ends():
    step = _with_room_for_forwards(movable_step(1, reads_early=True), 256 * KIB)
    moved = Moves(
        modes=(Mode(actions=(Action.OFFLOAD,) * 5),),
        schedule=Schedule(layers=0),
    )
    problem = apply_moves(step, moved, recomputer(step))
    bound_s = step_lower_bound_s(step, budget_bytes=peak_live_bytes(problem))
    assert bound_s <= simulate(problem, step.costs).step_s


@pytest.mark.parametrize("bytes_per_s", [16 * KIB, 100 * KIB])
@pytest.mark.parametrize("num_layers", [3, 6])
def test_a_step_of_microseconds_is_bound_like_one_of_seconds(num_layers, bytes_per_s):
    """Engines leave out what costs less than some 1e-7."""
    slow = movable_step(num_layers, bytes_per_s=bytes_per_s)
    fast = _made_fast(slow)
    most = peak_live_bytes(slow.problem)
    for less in range(0, 40 * num_layers, 24):
        budget = most - less * KIB
        seconds = step_lower_bound_s(slow, budget_bytes=budget)
        assert step_lower_bound_s(fast, budget_bytes=budget) == pytest.approx(seconds * FAST)


@pytest.mark.parametrize("releases_pages", [False, True])
def test_what_only_the_loss_needs_is_gone_before_a_backward_that_begins_with_a_copy(releases_pages):
    step = movable_step(3)
    first = step.problem.calls[step.problem.first_backward]
    region = step.problem.regions[first.region]
    outside = OutsideBuffer(kind="kernel", size_bytes=64 * KIB, start=0, end=1)
    regions = {**step.problem.regions, first.region: replace(region, outside=(outside,))}
    changes = {"loss_bytes": 400 * KIB, "releases_pages": releases_pages}
    step = replace(step, problem=replace(step.problem, regions=regions, **changes))
    problem = apply_moves(step, Moves(modes=(Mode(actions=(Action.OFFLOAD,) * 5),) * 3), None)
    added_bytes = peak_live_bytes(replace(problem, loss_bytes=0)) - peak_live_bytes(problem)
    assert added_bytes < 0  # the loss is a part of the peak
    bound_s = step_lower_bound_s(step, budget_bytes=peak_live_bytes(problem))
    assert bound_s <= simulate(problem, step.costs).step_s


@pytest.mark.parametrize("loss_bytes", [200 * KIB, 400 * KIB, 500 * KIB])
@pytest.mark.parametrize("action", [Action.OFFLOAD, Action.RECOMPUTE])
def test_copies_that_begin_once_the_loss_is_gone_hide_behind_the_first_call(loss_bytes, action):
    """A small copy back is the backward's first line; all others begin before its first call."""
    kind = LayerKind(
        reads={"x": (), "s": ("x",), "t": ("x",)},
        sizes={"x": 512, "s": 256 * KIB, "t": 256 * KIB},
        seconds=dict.fromkeys("xst", 0.0),
        num_rows=4,
        kept=frozenset("xt"),
        attention="t",
    )
    region_s = {"P": 0.05, "L": 0.02, "H": 0.01, "Hb": 1.0, "Lb": 0.1, "Pb": 0.1}
    costs = StepCosts(region_s=region_s, d2h_bytes_per_s=7.9e8, h2d_bytes_per_s=7.9e5)
    step = repeated(kind, 1, costs, 2 * KIB)
    problem = replace(step.problem, loss_bytes=loss_bytes, releases_pages=True)
    step = replace(step, problem=problem, token_granule=1)
    mode = Mode(
        actions=(Action.OFFLOAD, action, Action.OFFLOAD),
        recompute_rows=2 if action is Action.RECOMPUTE else None,
    )
    moves = Moves(modes=(mode,), schedule=Schedule(layers=1))
    plan = simulated(step, moves, recomputer(step))
    bound_s = step_lower_bound_s(step, budget_bytes=plan.live_bytes)
    assert bound_s <= plan.timeline.step_s * (1 + 1e-6)


def test_copies_need_room_on_the_host():
    step = movable_step(4, bytes_per_s=1e9)
    budget = peak_live_bytes(step.problem) - 150 * KIB
    free = step_lower_bound_s(step, budget_bytes=budget)
    assert free < step_lower_bound_s(step, budget_bytes=budget, host_budget_bytes=0)


def _made_fast(step):
    costs = replace(
        step.costs,
        region_s={name: seconds * FAST for name, seconds in step.costs.region_s.items()},
        d2h_bytes_per_s=step.costs.d2h_bytes_per_s / FAST,
        h2d_bytes_per_s=step.costs.h2d_bytes_per_s / FAST,
    )
    cls = step.classes["L"]
    ops = tuple(replace(op, seconds=op.seconds * FAST) for op in cls.ops)
    return replace(step, costs=costs, classes={"L": replace(cls, ops=ops)})


def _with_room_for_forwards(step, size_bytes):
    """``step`` whose forwards take ``size_bytes`` for themselves, so that its peak is there."""
    forward = step.problem.regions["L"]
    transient = replace(forward.buffers[0], size_bytes=size_bytes)
    forward = replace(forward, buffers=(transient, *forward.buffers[1:]))
    problem = replace(step.problem, regions={**step.problem.regions, "L": forward})
    return replace(step, problem=problem)
