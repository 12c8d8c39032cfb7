"""Lanes in simulated time, memory before placement, and the closed forms of MEMO's regime."""

from dataclasses import replace
from itertools import pairwise

import pytest

from memo_compile.errors import InputError, InvalidPlan
from memo_compile.planners.moves import apply_moves
from memo_compile.planners.place_step import place_step
from memo_compile.step.movable import Action, Mode, Moves, Schedule
from memo_compile.step.plans import Span
from memo_compile.step.problem import OutsideBuffer
from memo_compile.step.simulate import memory_level, peak_live_bytes, simulate
from tests.steps.movable import (
    BACKWARD_S,
    FORWARD_S,
    KIB,
    NUM_ROWS,
    movable_step,
    recomputer,
    with_regions,
)
from tests.steps.small import two_layers

SAVE, OFFLOAD, RECOMPUTE = Action.SAVE, Action.OFFLOAD, Action.RECOMPUTE
ROTATING = Schedule(layers=1)
ONE_OUT = Mode(actions=(SAVE, SAVE, SAVE, OFFLOAD, SAVE))


def test_the_lanes_of_one_copy_there_and_back():
    """32 KiB at 16 KiB/s: 2 s each way, beside a step of 5 s."""
    step = movable_step(1, bytes_per_s=16 * KIB, copy_latency_s=0.25)
    problem = apply_moves(step, Moves(modes=(ONE_OUT,)), recomputer(step))
    timeline = simulate(problem, step.costs)
    assert timeline.spans == (
        Span(lane="compute", name="P", start_s=0.0, end_s=0.5),
        Span(lane="compute", name="L@0", start_s=0.5, end_s=1.5),
        Span(lane="d2h", name="offload.c0", start_s=1.5, end_s=3.75),
        Span(lane="compute", name="H", start_s=1.5, end_s=2.0),
        Span(lane="stall", name="wait.offload.c0", start_s=2.0, end_s=3.75),
        Span(lane="h2d", name="reload.c0", start_s=3.75, end_s=6.0),
        Span(lane="compute", name="Hb", start_s=3.75, end_s=4.25),
        Span(lane="stall", name="wait.reload.c0", start_s=4.25, end_s=6.0),
        Span(lane="compute", name="Lb@0", start_s=6.0, end_s=8.0),
        Span(lane="compute", name="Pb", start_s=8.0, end_s=8.5),
    )
    assert timeline.step_s == 8.5
    assert timeline.stall_s == 3.5
    assert simulate(problem, step.costs, spans=False) == replace(timeline, spans=())


def test_both_directions_have_their_own_speed():
    step = movable_step(1)
    problem = apply_moves(step, Moves(modes=(ONE_OUT,)), recomputer(step))
    costs = replace(step.costs, d2h_bytes_per_s=32 * KIB, h2d_bytes_per_s=8 * KIB)
    spans = {span.name: span for span in simulate(problem, costs).spans}
    assert spans["offload.c0"].end_s - spans["offload.c0"].start_s == 1.0
    assert spans["reload.c0"].end_s - spans["reload.c0"].start_s == 4.0


def test_copies_of_one_direction_follow_each_other():
    step = movable_step(4, bytes_per_s=8 * KIB)
    problem = apply_moves(step, Moves(modes=(ONE_OUT,) * 4), recomputer(step))
    for lane in ("compute", "d2h", "h2d"):
        spans = [span for span in simulate(problem, step.costs).spans if span.lane == lane]
        assert all(a.end_s <= b.start_s for a, b in pairwise(spans))


def test_a_region_without_seconds():
    step = movable_step(1)
    mode = Mode(actions=(SAVE, SAVE, RECOMPUTE, SAVE, SAVE))
    problem = apply_moves(step, Moves(modes=(mode,)), recomputer(step))
    with pytest.raises(InputError, match=r"region L.recompute.2 of recompute.L@0 has no seconds"):
        simulate(problem, step.costs)
    timeline = simulate(problem, with_regions(step.costs, {"L.recompute.2": 3.0}))
    assert timeline.step_s == simulate(step.problem, step.costs).step_s + 3.0


def test_a_wait_for_nothing():
    step = movable_step(1)
    problem = apply_moves(step, Moves(modes=(ONE_OUT,)), recomputer(step))
    without = tuple(call for call in problem.calls if call.name != "reload.c0")
    words = r"wait.reload.c0 waits for reload.c0, which was not issued before it"
    with pytest.raises(InvalidPlan, match=words):
        simulate(replace(problem, calls=without), step.costs)


def per_layer(problem, costs, more=None):
    """Seconds of a layer's forward and of its backward in the middle of the step."""
    spans = {span.name: span for span in simulate(problem, with_regions(costs, more or {})).spans}
    num_layers = sum(name.startswith("L@") for name in spans)
    low, high = num_layers // 4, 3 * num_layers // 4
    forward = spans[f"L@{high}"].end_s - spans[f"L@{low}"].end_s
    backward = spans[f"Lb@{low}"].end_s - spans[f"Lb@{high}"].end_s
    return forward / (high - low), backward / (high - low)


@pytest.mark.parametrize("bytes_per_s", [4 * KIB, 30 * KIB, 50 * KIB, 80 * KIB, 300 * KIB])
@pytest.mark.parametrize("rows", [0, 2, 4, NUM_ROWS])
def test_the_closed_forms_of_rotating_buffers(bytes_per_s, rows):
    """n max(T, S / B) and n max(2T + (1 - alpha) R, S / B), within 1 % of the whole step."""
    num_layers = 400
    step = movable_step(num_layers, bytes_per_s=bytes_per_s)
    if rows:
        part = None if rows == NUM_ROWS else rows
        mode = Mode(
            actions=(OFFLOAD, OFFLOAD, RECOMPUTE, RECOMPUTE, RECOMPUTE), recompute_rows=part
        )
    else:
        mode = Mode(actions=(OFFLOAD,) * 5)
    moves = Moves(modes=(mode,) * num_layers, schedule=ROTATING)
    problem = apply_moves(step, moves, recomputer(step))
    always_bytes, others_bytes, recompute_s = 16 * KIB, 72 * KIB, 0.4
    one_minus_alpha = rows / NUM_ROWS
    copy_s = (always_bytes + (1 - one_minus_alpha) * others_bytes) / bytes_per_s
    forward_s = max(FORWARD_S, copy_s)
    backward_s = max(BACKWARD_S + one_minus_alpha * recompute_s, copy_s)
    again = [name for name in problem.regions if ".recompute." in name]
    more = dict.fromkeys(again, one_minus_alpha * recompute_s)
    timeline = simulate(problem, with_regions(step.costs, more))
    assert timeline.step_s == pytest.approx(num_layers * (forward_s + backward_s), rel=0.01)
    assert per_layer(problem, step.costs, more) == pytest.approx((forward_s, backward_s), rel=0.01)


def test_memory_by_line_of_a_small_step():
    """Constant memory 1 KiB; a loss of 512 B in the forward, 1 KiB of gradient in each backward."""
    falls = replace(two_layers(), releases_pages=True)
    levels = memory_level(falls)
    assert levels[0] == 2 * KIB
    assert KIB + max(levels) == peak_live_bytes(falls)
    assert levels[-1] == 2 * KIB
    stays = memory_level(two_layers())
    assert min(stays - levels) == 0
    assert KIB + max(stays) == peak_live_bytes(two_layers())


def test_kernels_memory_counts():
    problem = two_layers()
    outside = OutsideBuffer(kind="aten.conv", size_bytes=64 * KIB, start=1, end=2)
    region = replace(problem.regions["Lb"], outside=(outside,))
    more = replace(problem, regions={**problem.regions, "Lb": region})
    assert peak_live_bytes(more) > peak_live_bytes(problem) + 56 * KIB
    assert peak_live_bytes(more) <= place_step(more, solver="greedy").peak_bytes


def test_a_step_of_nothing():
    problem = replace(two_layers(), calls=())
    assert peak_live_bytes(problem) == KIB
    assert simulate(problem, movable_step(1).costs).step_s == 0
