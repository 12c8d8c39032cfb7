"""Lifetimes of a step that is small enough to draw."""

import dataclasses

import pytest

from memo_compile.errors import InputError
from memo_compile.step.ordinary import outside_peak
from memo_compile.step.plans import Observed, Plan, ReportedPlan
from memo_compile.step.problem import (
    OutsideBuffer,
    Problem,
    RegionBuffer,
    arena_buffers,
    call_starts,
    live_bytes,
)
from memo_compile.step.serialise import from_json, to_json
from tests.steps.small import HEAD, KIB, planned, two_layers


def test_calls_lie_end_to_end():
    assert call_starts(two_layers()) == (0, 5, 10, 13, 18, 23)


def test_lives_on_the_time_axis():
    lives = {
        buffer.id: (buffer.start, buffer.end, buffer.transient)
        for buffer in arena_buffers(two_layers())
    }
    assert lives == {
        "L@0/t": (0, 2, True),
        "L@0/y": (1, 18 + 2, False),
        "L@1/t": (5, 7, True),
        "L@1/y": (6, 13 + 2, False),
        "E@2/t": (10, 12, True),
        "Lb@3/t": (13, 16, True),
        "Lb@3/g": (14, 18 + 3, False),
        "Lb@4/t": (18, 21, True),
        "Lb@4/g": (19, 22, False),
    }


def test_live_bytes_are_the_sum_at_each_line():
    curve = live_bytes(arena_buffers(two_layers()))
    assert curve[1] == 6 * KIB
    assert curve[2] == 4 * KIB
    assert curve[6] == 10 * KIB
    assert max(curve.values()) == curve[19] == 15 * KIB
    assert curve[max(curve)] == 0


def test_outside_memory_counts_where_it_is_largest():
    kernel = OutsideBuffer(kind="conv", size_bytes=KIB, start=0, end=1)
    more = OutsideBuffer(kind="sort", size_bytes=2 * KIB, start=1, end=2)
    head = dataclasses.replace(HEAD, outside=(kernel, more))
    problem = two_layers()
    problem = dataclasses.replace(problem, regions={**problem.regions, "E": head})
    assert outside_peak(problem) == {"sort": 2 * KIB}


def test_nonsense_buffers_are_refused():
    with pytest.raises(InputError, match="multiples of 512 B, got 100"):
        RegionBuffer(name="b", size_bytes=100, start=0, end=1)
    with pytest.raises(InputError, match=r"start < end, got \[3, 3\)"):
        RegionBuffer(name="b", size_bytes=512, start=3, end=3)


def test_json_round_trip():
    problem = two_layers()
    plan = planned(problem)
    assert from_json(to_json(problem), Problem) == problem
    assert from_json(to_json(plan), Plan) == plan
    assert to_json(from_json(to_json(plan), Plan)) == to_json(plan)


def test_a_plan_is_written_with_what_was_observed_and_read_with_it_or_without():
    plan = planned(two_layers())
    reported = ReportedPlan.of(plan, Observed(planning_s=0.5, offloaded_bytes=7))
    assert from_json(to_json(reported), ReportedPlan) == reported
    assert from_json(to_json(reported), Plan) == plan
    assert from_json(to_json(plan), ReportedPlan) == ReportedPlan.of(plan, Observed())
    assert reported.offloaded_bytes == 7
    assert not hasattr(plan, "offloaded_bytes")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "plan.json:1: not JSON"),
        ("[]", "plan.json: expected a Plan"),
        (to_json(two_layers()), "plan.json: expected a Plan"),
        ('{"kind": "Plan", "schema": 99}', "expected schema 1, got 99"),
        ('{"kind": "Plan", "schema": 1, "offsetz": {}}', "plan.json: plan.offsetz: unknown field"),
        ('{"kind": "Plan", "schema": 1}', "missing"),
    ],
)
def test_broken_files_are_named(text, message):
    with pytest.raises(InputError, match=message):
        from_json(text, Plan, where="plan.json")


def test_a_problem_whose_calls_and_regions_disagree_is_named():
    problem = two_layers()
    call = problem.calls[0]
    regions = {name: made for name, made in problem.regions.items() if name != call.region}
    longer = dataclasses.replace(call, inputs=(*call.inputs, "more"))
    for broken, message in (
        ({"regions": regions}, rf"problem.calls\[0\].region: there is no region {call.region}"),
        ({"calls": (longer, *problem.calls[1:])}, rf"problem.calls\[0\]: {call.region} has"),
    ):
        text = to_json(dataclasses.replace(problem, **broken))
        with pytest.raises(InputError, match=f"problem.json: {message}"):
            from_json(text, Problem, where="problem.json")
