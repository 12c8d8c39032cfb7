"""Copies take the time that memory allows: stalls go where bytes were free, and stay elsewhere."""

import pytest

from memo_compile.planners.copy_windows import widened
from memo_compile.planners.moves import apply_moves
from memo_compile.step.movable import Action, Mode, Moves, Schedule
from memo_compile.step.problem import Problem
from memo_compile.step.simulate import peak_live_bytes, simulate
from tests.steps.movable import KIB, costs_of, movable_step, recomputer

SAVE, OFFLOAD = Action.SAVE, Action.OFFLOAD
NUM_LAYERS = 6


def stalls(*, offloaded: range, kib_per_s: int) -> tuple[float, float]:
    """Stalled seconds of a tight schedule before and after, two values of some layers offloaded."""
    step = movable_step(NUM_LAYERS, bytes_per_s=KIB * kib_per_s)
    keep = Mode(actions=(SAVE,) * 5)
    move = Mode(actions=(SAVE, SAVE, SAVE, OFFLOAD, OFFLOAD))
    moves = Moves(
        modes=tuple(move if layer in offloaded else keep for layer in range(NUM_LAYERS)),
        schedule=Schedule(offload_lag=0, reload_lead=0),
    )
    problem, costs = apply_moves(step, moves, recomputer(step)), costs_of(step)
    wide = widened(problem, costs).problem
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
    assert widened(problem, costs_of(movable_step(2))).problem is problem
