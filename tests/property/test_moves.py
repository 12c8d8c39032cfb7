"""Random decisions on synthetic steps: every program is alive, waited for, and can be placed."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from memo_compile.check.check_moves import check_moves, recomputations_of
from memo_compile.planners.move_rules import facts_of
from memo_compile.planners.moves import apply_moves
from memo_compile.planners.place_step import place_step
from memo_compile.planners.policy.model import least_bytes
from memo_compile.planners.transfers import with_time
from memo_compile.step.movable import RecomputeKey
from memo_compile.step.problem import CallKind, Problem, arena_buffers, call_starts, live_bytes
from memo_compile.step.program_text import program_text
from memo_compile.step.residency import ordinary_bytes, step_constant_bytes
from memo_compile.step.serialise import from_json, to_json
from memo_compile.step.simulate import most_per_call, peak_live_bytes, simulate
from memo_compile.step.timed import TimedProgram
from tests.steps.drawn_moves import moved_steps, regions_of
from tests.steps.movable import costs_of, recomputer


def check_order(problem: Problem) -> None:
    """Every read is of a value that exists and that no copy still fills."""
    made, filling, issued, waited = set(problem.inputs), {}, {}, set()
    for call in problem.calls:
        if call.kind is CallKind.WAIT:
            value = issued[call.waits_for]
            assert call.inputs == (value,)
            assert call.waits_for not in waited
            waited.add(call.waits_for)
            filling.pop(value, None)
        for value in call.inputs:
            assert value in made, f"{call.name} reads {value}"
            assert value not in filling, f"{call.name} reads {value} too early"
        assert {into.value for into in call.into} <= made
        assert not made.intersection(call.outputs)
        made.update(call.outputs)
        if call.kind is CallKind.OFFLOAD:
            issued[call.name] = call.inputs[0]
        elif call.kind is CallKind.RELOAD:
            issued[call.name] = call.outputs[0]
            filling[call.outputs[0]] = call.name
    assert waited == issued.keys()


def check_schedule(step, moves, problem: Problem) -> None:
    """Copies of layer i last for the schedule's layers."""
    at = {call.name: index for index, call in enumerate(problem.calls)}
    layers = moves.schedule.layers
    for number, layer in enumerate(step.layers):
        for value in layer.values:
            if f"offload.{value}" not in at:
                continue
            assert at[f"wait.offload.{value}"] < at["Hb"]
            if number + layers + 1 < len(step.layers):
                assert at[f"wait.offload.{value}"] < at[step.layers[number + layers + 1].forward]
            if number + layers + 1 < len(step.layers):
                assert at[f"reload.{value}"] > at[step.layers[number + layers + 1].backward]


@settings(max_examples=40, deadline=None)
@given(drawn=moved_steps())
def test_every_program_is_in_order_and_can_be_placed(drawn):
    step, moves, problem = drawn
    check_order(problem)
    check_schedule(step, moves, problem)
    assert [c for c in problem.calls if c.kind is CallKind.RUN and "L@" in c.name] == [
        c for c in step.problem.calls if "L@" in c.name
    ]
    assert place_step(problem, solver="greedy").check.ok
    assert program_text(problem) == program_text(apply_moves(step, moves, recomputer(step)))
    assert from_json(to_json(problem), Problem) == problem


@settings(max_examples=40, deadline=None)
@given(drawn=moved_steps())
def test_every_program_computes_what_the_step_computes(drawn):
    """The independent replay: every read holds the bytes that it held before any move."""
    step, moves, _ = drawn
    recompute = recomputer(step)
    asked = []

    def recorded(key: RecomputeKey):
        asked.append(recompute(key))
        return asked[-1]

    problem = apply_moves(step, moves, recorded)
    verdict = check_moves(step.problem, problem, recomputations_of(step, problem, asked))
    assert verdict.ok, str(verdict)


@settings(max_examples=40, deadline=None)
@given(drawn=moved_steps())
def test_the_live_peak_is_that_of_the_buffers(drawn):
    step, moves, problem = drawn
    starts = call_starts(problem)
    curve = live_bytes(arena_buffers(problem))
    most = 0
    beside = ordinary_bytes(problem).most
    alive = 0
    for index, more in enumerate(beside):
        best = 0
        for line in range(starts[index], starts[index + 1]):
            alive = curve.get(line, alive)
            best = max(best, alive)
        most = max(most, best + more)
    falls = replace(problem, releases_pages=True)
    assert peak_live_bytes(falls) == step_constant_bytes(problem) + most
    own = peak_live_bytes(problem)
    for program in (
        step.problem,
        problem,
        problem,
    ):  # what is known of shared calls changes nothing
        assert peak_live_bytes(program, facts_of(step).tables) == peak_live_bytes(program)
    assert least_bytes(step, moves) <= own
    for releases_pages in (False, True):
        device = replace(problem, releases_pages=releases_pages)
        plan = place_step(device, solver="greedy")
        assert peak_live_bytes(device) <= plan.peak_bytes


@settings(max_examples=40, deadline=None)
@given(drawn=moved_steps())
def test_time_is_that_of_the_calls_and_of_the_stalls(drawn):
    step, moves, problem = drawn
    costs = costs_of(step, *regions_of(step, moves))
    timeline = simulate(problem, costs)
    runs = (CallKind.RUN, CallKind.RECOMPUTE)
    compute_s = sum(costs.call_s(call) for call in problem.calls if call.kind in runs)
    assert timeline.step_s == pytest.approx(compute_s + timeline.stall_s)
    lanes: dict[str, float] = {}
    for span in timeline.spans:
        lane = "compute" if span.lane == "stall" else span.lane
        assert span.start_s >= lanes.get(lane, 0.0)
        lanes[lane] = span.end_s


def most_in_forward(problem: Problem) -> int:
    """The most bytes alive during a call of the forward, with what is always there."""
    alive = most_per_call(problem)[: problem.first_backward]
    return int(alive.max()) + step_constant_bytes(problem)


@settings(max_examples=80, deadline=None)
@given(
    drawn=moved_steps(),
    times=st.sampled_from([1.0, 1.0, 1.1, 1.5]),
    spare=st.sampled_from([0.0, 0.0, 0.02, 0.2, 1.0]),
)
def test_copies_with_more_time_make_no_step_slower_nor_larger(drawn, times, spare):
    step, moves, problem = drawn
    asked = regions_of(step, moves)
    costs = costs_of(step, *asked)
    peak = peak_live_bytes(problem)
    limit, spare_bytes = int(peak * times), int(spare * peak)
    wide = with_time(TimedProgram(problem, costs), limit, spare_bytes=spare_bytes).program.problem
    check_order(wide)
    assert sorted(call.name for call in wide.calls) == sorted(call.name for call in problem.calls)
    assert peak <= peak_live_bytes(wide) <= peak * times
    most = max(most_in_forward(problem), int(peak * (times - spare)) + 1)
    assert most_in_forward(wide) <= most
    before, after = simulate(problem, costs), simulate(wide, costs)
    assert after.step_s <= before.step_s * (1 + 1e-6)
    assert check_moves(step.problem, wide, recomputations_of(step, wide, asked)).ok
    assert place_step(wide, solver="greedy").check.ok
