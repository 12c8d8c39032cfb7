"""Random steps: every plan passes the independent checker, reaches no lower than it may."""

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given, settings

from memo_compile.check.check_plan import check
from memo_compile.planners.place_step import place_step
from memo_compile.step.plans import Plan
from memo_compile.step.problem import (
    FixedBytes,
    Phase,
    Problem,
    RegionBuffer,
    RegionOutput,
    RegionProfile,
    StepCall,
    Storage,
)
from memo_compile.step.residency import HEAP_SLACK
from memo_compile.step.serialise import from_json, to_json

LINES = 6


@st.composite
def regions(draw, name: str, num_inputs: int) -> RegionProfile:
    """Up to five buffers; each output is a buffer, an input's alias, or the user's."""
    buffers = []
    for index in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, LINES - 1))
        end = draw(st.integers(start + 1, LINES))
        size = 512 * draw(st.integers(0, 6))
        buffers.append(RegionBuffer(name=f"b{index}", size_bytes=size, start=start, end=end))
    drawn = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(
            st.sampled_from([Storage.ARENA, Storage.ARENA, Storage.INPUT, Storage.EXTERNAL])
        )
        if kind is Storage.ARENA:
            index = draw(st.integers(0, len(buffers) - 1))
            drawn.append(RegionOutput(storage=kind, index=index))
        elif kind is Storage.INPUT and num_inputs:
            index = draw(st.integers(0, num_inputs - 1))
            drawn.append(RegionOutput(storage=kind, index=index))
        else:
            drawn.append(RegionOutput(storage=Storage.EXTERNAL, size_bytes=512))
    return RegionProfile(
        name=name,
        num_lines=LINES,
        buffers=tuple(buffers),
        input_ends=tuple(draw(st.integers(0, LINES)) for _ in range(num_inputs)),
        outputs=tuple(drawn),
    )


@st.composite
def steps(draw) -> Problem:
    """Three regions, up to eight calls, each reading any earlier values."""
    arity = {"r0": 1, "r1": 2, "r2": 3}
    profiles = {name: draw(regions(name, count)) for name, count in arity.items()}
    values, calls = ["in"], []
    for number in range(draw(st.integers(1, 8))):
        region = draw(st.sampled_from(sorted(profiles)))
        inputs = tuple(draw(st.sampled_from(values)) for _ in range(arity[region]))
        outputs = tuple(f"v{number}_{i}" for i in range(len(profiles[region].outputs)))
        phase = Phase.FORWARD if number < 4 else Phase.BACKWARD
        name = f"{region}@{number}"
        calls.append(
            StepCall(name=name, region=region, phase=phase, inputs=inputs, outputs=outputs)
        )
        values += outputs
    fixed = FixedBytes(parameters=512, gradients=1024, new_gradients=512, inputs=100)
    return Problem(regions=profiles, calls=tuple(calls), inputs=("in",), fixed=fixed)


@settings(max_examples=150, deadline=None)
@given(problem=steps(), releases_pages=st.booleans())
def test_every_plan_is_valid(problem, releases_pages):
    plan = place_step(replace(problem, releases_pages=releases_pages), solver="greedy")
    assert check(problem, plan).ok
    assert (
        plan.lower_bound_bytes
        <= plan.arena_bytes
        <= sum(
            buffer.size_bytes
            for call in problem.calls
            for buffer in problem.regions[call.region].buffers
        )
    )


@settings(max_examples=60, deadline=None)
@given(problem=steps())
def test_giving_pages_back_never_raises_the_peak(problem):
    kept = place_step(problem, solver="greedy")
    given_back = place_step(replace(problem, releases_pages=True), solver="greedy")
    slack = 1 + HEAP_SLACK
    assert given_back.peak_bytes <= kept.peak_bytes * slack
    assert given_back.arena_bytes == kept.arena_bytes


@settings(max_examples=60, deadline=None)
@given(problem=steps())
def test_json_round_trip(problem):
    plan = place_step(problem, solver="greedy")
    assert from_json(to_json(problem), Problem) == problem
    assert from_json(to_json(plan), Plan) == plan
