"""Random steps: every plan passes the independent checker, reaches no lower than it may."""

import sys
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given, settings

from memo_compile.check.check_plan import check
from memo_compile.planners.place_step import beneath_ordinary, place_step
from memo_compile.step.plans import Plan
from memo_compile.step.problem import (
    FixedBytes,
    OutsideBuffer,
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
    workspace_bytes = 512 * draw(st.sampled_from([0, 0, 1, 20]))
    workspace = OutsideBuffer(kind="work space", size_bytes=workspace_bytes, start=1, end=3)
    return RegionProfile(
        name=name,
        num_lines=LINES,
        buffers=tuple(buffers),
        input_ends=tuple(draw(st.integers(0, LINES)) for _ in range(num_inputs)),
        outputs=tuple(drawn),
        outside=(workspace,) if workspace_bytes else (),
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
    problem = replace(problem, releases_pages=releases_pages)
    plan = place_step(problem, solver="greedy")
    assert check(problem, plan).ok
    assert check(problem, beneath_ordinary(problem, replace(plan, peak_bytes=sys.maxsize))).ok
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


def test_a_work_space_finds_room_over_what_is_alive_beside_it():
    """Each call makes a value; the last one reads r2's, and takes 10240 bytes for itself.

    In the lowest arena (4096 bytes) r2 lies over r1, which is dead by then; under r1 it is lower.
    """
    sizes, reads = (512, 2048, 2048, 1536), ((), (0,), (1,), (2,))
    workspace = OutsideBuffer(kind="work space", size_bytes=10240, start=0, end=1)
    regions = {
        f"r{at}": RegionProfile(
            name=f"r{at}",
            num_lines=1,
            buffers=(RegionBuffer(name="b", size_bytes=size, start=0, end=1),),
            input_ends=(1,) * len(reads[at]),
            outputs=(RegionOutput(storage=Storage.ARENA, index=0),),
            outside=(workspace,) if at == 3 else (),
        )
        for at, size in enumerate(sizes)
    }
    calls = tuple(
        StepCall(
            name=f"r{at}@{at}",
            region=f"r{at}",
            phase=Phase.FORWARD if at < 2 else Phase.BACKWARD,
            inputs=tuple(f"v{source}" for source in reads[at]),
            outputs=(f"v{at}",),
        )
        for at in range(len(sizes))
    )
    fixed = FixedBytes(parameters=0, gradients=0, new_gradients=0, inputs=0)
    problem = Problem(regions=regions, calls=calls, inputs=(), fixed=fixed, releases_pages=True)
    lowest = place_step(problem)
    assert (lowest.arena_bytes, lowest.peak_bytes) == (4096, int(14336 * (1 + HEAP_SLACK)))
    most = int((10240 + 2048 + 1536) * (1 + HEAP_SLACK))
    assert place_step(problem, budget_bytes=most).peak_bytes == most


@settings(max_examples=60, deadline=None)
@given(problem=steps())
def test_json_round_trip(problem):
    plan = place_step(problem, solver="greedy")
    assert from_json(to_json(problem), Problem) == problem
    assert from_json(to_json(plan), Plan) == plan
