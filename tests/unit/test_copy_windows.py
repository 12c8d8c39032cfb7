"""Copies take the time that memory allows: stalls go where bytes were free, and stay elsewhere."""

from dataclasses import replace

import pytest

from memo_compile.planners.move_rules import recompute_keys
from memo_compile.planners.moves import apply_moves
from memo_compile.planners.transfers import Placed, with_time
from memo_compile.step.movable import Action, Mode, Moves, Schedule, StepCosts
from memo_compile.step.problem import CallKind, Half, Problem
from memo_compile.step.simulate import peak_live_bytes, simulate
from memo_compile.step.timed import TimedProgram
from tests.steps.movable import KIB, costs_of, movable_step, recomputer

SAVE, OFFLOAD = Action.SAVE, Action.OFFLOAD
NUM_LAYERS = 6


def within(problem: Problem, costs: StepCosts, times: float = 1.0) -> Placed:
    """``problem`` whose copies may take so many times its peak."""
    return with_time(TimedProgram(problem, costs), int(times * peak_live_bytes(problem)))


def stalls(*, offloaded: range, kib_per_s: int) -> tuple[float, float]:
    """Stalled seconds of a tight schedule before and after, two values of some layers offloaded."""
    step = movable_step(NUM_LAYERS, bytes_per_s=KIB * kib_per_s)
    keep = Mode(actions=(SAVE,) * 5)
    move = Mode(actions=(SAVE, SAVE, SAVE, OFFLOAD, OFFLOAD))
    moves = Moves(
        modes=tuple(move if layer in offloaded else keep for layer in range(NUM_LAYERS)),
        schedule=Schedule(layers=0),
    )
    problem, costs = apply_moves(step, moves, recomputer(step)), costs_of(step)
    wide = within(problem, costs).program.problem
    assert peak_live_bytes(wide) == peak_live_bytes(problem)
    return simulate(problem, costs).stall_s, simulate(wide, costs).stall_s


@pytest.mark.parametrize("kib_per_s", [60, 80, 120])
def test_nothing_waits_for_bytes_that_nobody_needs(kib_per_s):
    before, after = stalls(offloaded=range(3), kib_per_s=kib_per_s)
    assert before > 3
    assert after == 0


def test_a_link_that_is_too_slow_stalls_the_step_as_little_as_its_lanes_allow():
    before, after = stalls(offloaded=range(3), kib_per_s=20)
    assert 0 < after < before / 2


def test_a_step_without_copies_stays_as_it_is():
    problem = movable_step(2).problem
    assert isinstance(problem, Problem)
    assert within(problem, costs_of(movable_step(2))).program.problem is problem


def offloaded_at_once(kib_per_s: int) -> tuple[Problem, StepCosts]:
    """Every layer offloads x, a, b and the larger c, each where it is made, and waits there."""
    step = movable_step(4, bytes_per_s=KIB * kib_per_s)
    mode = Mode(actions=(OFFLOAD, OFFLOAD, OFFLOAD, OFFLOAD, Action.RECOMPUTE))
    once = Schedule(layers=0)
    moves, recompute = Moves(modes=(mode,) * 4, schedule=once), recomputer(step)
    regions = map(recompute, recompute_keys(step.classes["L"], mode))
    return apply_moves(step, moves, recompute), costs_of(step, *regions)


def test_a_large_copy_that_has_place_goes_behind_small_ones_that_have_not():
    problem, costs = offloaded_at_once(60)
    wide = within(problem, costs, 1.138).program.problem
    names = [call.name for call in wide.calls]
    assert names.index("offload.c1") > names.index("offload.a1")
    before = [call.name for call in problem.calls]
    assert before.index("offload.c1") < before.index("offload.a1")
    assert before.index("reload.c1") < before.index("reload.x1")
    assert names.index("reload.c1") > names.index("reload.x1")  # c has no room yet, x and a have
    assert simulate(wide, costs).step_s == pytest.approx(17.683, abs=1e-3)
    assert peak_live_bytes(wide) <= 1.138 * peak_live_bytes(problem)


@pytest.mark.parametrize("kib_per_s", [40, 100])
def test_nothing_changes_below_the_next_times_and_something_does_there(kib_per_s):
    problem, costs = offloaded_at_once(kib_per_s)
    times, steps = 1.0, []
    for _ in range(6):
        wide = within(problem, costs, times)
        calls = wide.program.problem.calls
        steps.append(wide.program.timeline.step_s)
        lacking = wide.lacking_bytes / peak_live_bytes(problem)
        assert within(problem, costs, times + 0.98 * lacking).program.problem.calls == calls
        times += lacking + 1e-6
    assert steps == sorted(steps, reverse=True)
    assert len(set(steps)) >= 5


@pytest.mark.parametrize("kib_per_s", [30])
def test_a_copy_does_not_go_behind_those_of_another_member(kib_per_s):
    """Its value is at hand in its own half only, and half of a group may be left out."""
    problem, costs = offloaded_at_once(kib_per_s)
    calls = tuple(replace(call, member=call.instance) for call in problem.calls)
    halves = tuple(
        Half(phase=phase, member=at, constants=(), arguments=(), results=(), handle="", layouts=())
        for phase, at in dict.fromkeys((call.phase, call.member) for call in calls)
    )
    problem = replace(problem, calls=calls, halves=halves)
    for times in range(100, 190, 15):
        wide = within(problem, costs, times / 100).program.problem
        issued = [call.member for call in wide.calls if call.kind is CallKind.OFFLOAD]
        assert issued == sorted(issued)
