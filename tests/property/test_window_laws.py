"""Whatever a step recomputes and copies: windows gain time, and keep to their bytes."""

import hypothesis.strategies as st
from hypothesis import given, settings

from memo_compile.check.check_moves import check_moves, recomputations_of
from memo_compile.planners.comm_windows import filled, late
from memo_compile.step.problem import CallKind
from memo_compile.step.simulate import peak_live_bytes, simulate
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
    better = filled(moved, costs, limit_bytes=int(times * peak))
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
