"""Whatever a step recomputes and copies: windows gain time, and keep to their bytes."""

import hypothesis.strategies as st
from hypothesis import given, settings

from memo_compile.check.check_moves import check_moves, recomputations_of
from memo_compile.planners.begin_order import in_begin_order
from memo_compile.planners.gather_again import gathered_again
from memo_compile.planners.place_step import place_step
from memo_compile.planners.recompute_windows import filled
from memo_compile.planners.transfers import at_once, late, with_time
from memo_compile.step.problem import CallKind
from memo_compile.step.simulate import peak_live_bytes, simulate
from memo_compile.step.timed import TimedProgram
from tests.steps.among_ranks import sharded, sharded_costs
from tests.steps.byte_machine import is_right
from tests.steps.drawn_moves import regions_of, talking_steps
from tests.steps.movable import costs_of


@settings(max_examples=60, deadline=None)
@given(talking_steps(), st.sampled_from([0.9, 1.0, 1.02, 1.1, 2.0]))
def test_filled_windows_cost_neither_time_nor_more_bytes(drawn, times):
    step, moves, moved = drawn
    regions = regions_of(step, moves)
    costs = costs_of(step, *regions)
    moved = late(moved)
    before, peak = simulate(moved, costs), peak_live_bytes(moved)
    better = filled(TimedProgram(moved, costs), limit_bytes=int(times * peak)).problem
    assert simulate(better, costs).step_s <= before.step_s
    assert peak_live_bytes(better) <= max(peak, int(times * peak))
    assert check_moves(step.problem, better, recomputations_of(step, better, regions)).ok
    for kinds in ((CallKind.ISSUE,), (CallKind.RUN,), (CallKind.RECOMPUTE,)):
        names = [
            [call.name for call in some.calls if call.kind in kinds] for some in (moved, better)
        ]
        assert sorted(names[0]) == sorted(names[1])
        if kinds != (CallKind.RECOMPUTE,):
            assert names[0] == names[1]


@settings(max_examples=60, deadline=None)
@given(talking_steps(), st.sampled_from([1.0, 1.1, 2.0]), st.sampled_from([1.0, 1.1, 2.0]))
def test_every_order_of_waits_and_copies_is_right(drawn, times, room):
    """Whatever memory there is, and whichever copies get more time before."""
    step, moves, moved = drawn
    regions = regions_of(step, moves)
    costs = costs_of(step, *regions)
    limit_bytes = int(times * peak_live_bytes(moved))
    wide = with_time(TimedProgram(moved, costs), limit_bytes, collectives=False).program.problem
    plain = late(wide)
    limit_bytes = int(room * peak_live_bytes(plain))
    orders = [
        *(at_once(wide), plain, late(wide, holds_inputs=True)),
        with_time(TimedProgram(wide, costs), limit_bytes).program.problem,
        with_time(TimedProgram(plain, costs), limit_bytes).program.problem,
        with_time(TimedProgram(plain, costs), limit_bytes, copies=False).program.problem,
    ]
    for problem in orders:
        verdict = check_moves(step.problem, problem, recomputations_of(step, problem, regions))
        assert verdict.ok, str(verdict)
        assert place_step(problem, solver="greedy").check.ok


SECONDS = st.sampled_from([0.0, 0.5, 1.0, 3.0])


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 5),
    st.sampled_from([1024, 4096]),
    st.sampled_from(["kept", "again in the graph", "again"]),
    st.booleans(),
    st.tuples(SECONDS, SECONDS),
    st.sampled_from([0.9, 1.0, 1.1, 2.0]),
)
def test_gathers_cost_neither_time_nor_more_bytes(layers, size, how, converts, seconds, times):
    problem = sharded(layers, size, converts=converts, again=how == "again in the graph")
    problem, costs = gathered_again(problem) if how == "again" else problem, sharded_costs(*seconds)
    moved = late(problem)
    before, peak = simulate(moved, costs), peak_live_bytes(moved)
    better = with_time(TimedProgram(moved, costs), int(times * peak)).program.problem
    assert simulate(better, costs).step_s <= before.step_s
    assert peak_live_bytes(better) <= max(peak, int(times * peak))
    assert check_moves(problem, better).ok
    assert in_begin_order(moved) == moved
    begun = [
        [call.name for call in some.calls if call.kind is CallKind.ISSUE]
        for some in (moved, better, in_begin_order(better))
    ]
    assert begun[0] == begun[1] == begun[2]
    assert is_right(moved, better, place_step(better, solver="greedy"), num_random=1)
