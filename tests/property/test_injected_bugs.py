"""Random steps with moves, and random bugs in them: what the checker lets pass is right.

Right means: with the arena of the plan, and copies and collectives as early or as late as their
waits allow, the step computes what the step without moves computes (``byte_machine``).
"""

import dataclasses
from collections.abc import Callable

import hypothesis.strategies as st
from hypothesis import given, settings

from memo_compile.check.check_moves import check_moves, recomputations_of
from memo_compile.check.check_plan import check
from memo_compile.planners.moves import apply_moves
from memo_compile.planners.place_step import place_step
from memo_compile.planners.recompute_windows import filled
from memo_compile.planners.transfers import late
from memo_compile.step.movable import Action, Mode, Moves, RecomputeKey, RecomputeRegion, Schedule
from memo_compile.step.plans import Plan
from memo_compile.step.problem import CallKind, Copy, Phase, Problem, StepCall
from memo_compile.step.timed import TimedProgram
from tests.steps.byte_machine import is_right, roomy
from tests.steps.drawn_moves import regions_of, talking_steps
from tests.steps.movable import KIB, costs_of, movable_step, recomputer
from tests.steps.moved import Shape

SAVE, OFFLOAD, RECOMPUTE = Action.SAVE, Action.OFFLOAD, Action.RECOMPUTE


@st.composite
def modes(draw) -> Mode:
    kept = [draw(st.sampled_from([SAVE, OFFLOAD])) for _ in "xa"]
    rest = [draw(st.sampled_from([SAVE, OFFLOAD, RECOMPUTE])) for _ in "bcd"]
    rows = draw(st.sampled_from([None, 1, 3, 8])) if RECOMPUTE in rest else None
    return Mode(actions=(*kept, *rest), recompute_rows=rows)


@st.composite
def moved_steps(draw) -> Shape:
    num_layers = draw(st.integers(1, 4))
    step = movable_step(num_layers, bytes_per_s=draw(st.sampled_from([2, 16, 200])) * KIB)
    step = dataclasses.replace(step, problem=_overwriting(step.problem, draw))
    lags = st.sampled_from([0, 1, 2])
    moves = Moves(
        modes=tuple(draw(modes()) for _ in range(num_layers)),
        schedule=Schedule(layers=draw(lags)),
    )
    regions: list[RecomputeRegion] = []
    known = recomputer(step)

    def recompute(key: RecomputeKey) -> RecomputeRegion:
        regions.append(known(key))
        return regions[-1]

    moved = apply_moves(step, moves, recompute)
    return Shape(
        original=step.problem, moved=moved, recomputations=recomputations_of(step, moved, regions)
    )


def _overwriting(problem: Problem, draw: st.DrawFn) -> Problem:
    """The backward of a layer may write over some of what it is the last to read."""
    taken = draw(st.sampled_from([(), (0,), (1,), (2, 5)]))
    regions = {**problem.regions}
    regions["Lb"] = dataclasses.replace(regions["Lb"], overwrites=taken)
    return dataclasses.replace(problem, regions=regions)


@st.composite
def talking_shapes(draw) -> Shape:
    """Tensor parallel layers with moves; waits as they are drawn, recomputations in windows."""
    step, moves, moved = draw(talking_steps())
    regions = regions_of(step, moves)
    if draw(st.booleans()):
        moved = filled(
            TimedProgram(late(moved), costs_of(step, *regions)), limit_bytes=1 << 40
        ).problem
    return Shape(
        original=step.problem, moved=moved, recomputations=recomputations_of(step, moved, regions)
    )


def faults(shape: Shape, moved: Problem, plan: Plan) -> list[str]:
    found = check_moves(shape.original, moved, shape.recomputations).problems
    return [*check(moved, plan).problems, *found]


def works(shape: Shape, moved: Problem, plan: Plan) -> bool:
    return is_right(shape.original, moved, plan, recomputations=shape.recomputations)


@settings(max_examples=40, deadline=None)
@given(st.one_of(moved_steps(), talking_shapes()))
def test_moves_compute_what_the_step_computes(shape):
    plan = place_step(dataclasses.replace(shape.moved, releases_pages=True), solver="greedy")
    assert faults(shape, shape.moved, plan) == []
    assert works(shape, shape.moved, plan)


@settings(max_examples=40, deadline=None)
@given(moved_steps(), st.data())
def test_calls_may_change_places_exactly_when_nothing_changes(shape, data):
    calls = shape.moved.calls
    at = data.draw(st.integers(0, len(calls) - 2))
    swapped = (*calls[:at], calls[at + 1], calls[at], *calls[at + 2 :])
    moved = dataclasses.replace(shape.moved, calls=swapped)
    phases = [call.phase for call in swapped]
    is_legal = (
        phases == sorted(phases, key=lambda phase: phase is Phase.BACKWARD)
        and {calls[at].kind, calls[at + 1].kind} != {CallKind.RUN}
        and works(shape, moved, roomy(moved))
    )
    assert (faults(shape, moved, roomy(moved)) == []) == is_legal


Calls = tuple[StepCall, ...]
Bug = Callable[[st.DataObject, Calls], Calls]


def _pick(data: st.DataObject, calls: Calls, **having: object) -> int:
    """The index of a call that has these things; 0 where there is none."""
    found = [
        index
        for index, call in enumerate(calls)
        if all(bool(getattr(call, name)) == wanted for name, wanted in having.items())
    ]
    return data.draw(st.sampled_from(found or [0]))


def _change(calls: Calls, index: int, **changes: object) -> Calls:
    changed = dataclasses.replace(calls[index], **changes)
    return (*calls[:index], changed, *calls[index + 1 :])


def drop(data: st.DataObject, calls: Calls) -> Calls:
    index = data.draw(st.integers(0, len(calls) - 1))
    return calls[:index] + calls[index + 1 :]


def displace(data: st.DataObject, calls: Calls) -> Calls:
    index = data.draw(st.integers(0, len(calls) - 1))
    to = data.draw(st.integers(0, len(calls) - 1))
    rest = calls[:index] + calls[index + 1 :]
    phase = rest[min(to, len(rest) - 1)].phase
    return (*rest[:to], dataclasses.replace(calls[index], phase=phase), *rest[to:])


def wait_for_another(data: st.DataObject, calls: Calls) -> Calls:
    index = _pick(data, calls, waits_for=True)
    other = calls[_pick(data, calls, copy=True)]
    if calls[index].kind is CallKind.COMM_WAIT:
        issued = [call.name for call in calls if call.kind is CallKind.ISSUE]
        return _change(calls, index, waits_for=data.draw(st.sampled_from(issued)))
    if calls[index].kind is not CallKind.WAIT or other.copy is None:
        return calls
    return _change(calls, index, waits_for=other.name)


def copy_other_bytes(data: st.DataObject, calls: Calls) -> Calls:
    index = _pick(data, calls, copy=True)
    copy = calls[index].copy
    if copy is None:
        return calls
    shifts = st.sampled_from([-2048, -512, 0, 512, 2048, 8192])
    start = max(0, copy.start_bytes + data.draw(shifts))
    host = max(0, copy.host_offset + data.draw(shifts))
    end = max(start + 512, copy.end_bytes + data.draw(shifts))
    changed = Copy(start_bytes=start, end_bytes=end, host_offset=host)
    return _change(calls, index, copy=changed)


def read_another(data: st.DataObject, calls: Calls) -> Calls:
    index = _pick(data, calls, inputs=True)
    inputs = list(calls[index].inputs)
    values = sorted({value for call in calls for value in (*call.inputs, *call.outputs)})
    inputs[data.draw(st.integers(0, len(inputs) - 1))] = data.draw(st.sampled_from(values))
    return _change(calls, index, inputs=tuple(inputs))


def permute_outputs(data: st.DataObject, calls: Calls) -> Calls:
    index = _pick(data, calls, outputs=True)
    outputs = data.draw(st.permutations(calls[index].outputs))
    return _change(calls, index, outputs=tuple(outputs))


def write_elsewhere(data: st.DataObject, calls: Calls) -> Calls:
    index = _pick(data, calls, into=True)
    if not calls[index].into:
        return calls
    into = list(calls[index].into)
    at = data.draw(st.integers(0, len(into) - 1))
    shift = data.draw(st.sampled_from([-512, 512, 1024]))
    into[at] = dataclasses.replace(into[at], offset_bytes=into[at].offset_bytes + shift)
    return _change(calls, index, into=tuple(into))


BUGS: tuple[Bug, ...] = (
    drop,
    displace,
    wait_for_another,
    copy_other_bytes,
    read_another,
    permute_outputs,
    write_elsewhere,
)


def lenient(plan: Plan, num_calls: int) -> Plan:
    """The offsets alone are on trial: other lives, other sums."""
    return dataclasses.replace(
        plan,
        resident_bytes=(plan.arena_bytes,) * num_calls,
        peak_bytes=10 * plan.peak_bytes,
        lower_bound_bytes=0,
    )


@settings(max_examples=120, deadline=None)
@given(st.one_of(moved_steps(), talking_shapes()), st.sampled_from(BUGS), st.booleans(), st.data())
def test_what_passes_is_right(shape, bug, is_tight, data):
    plan = place_step(shape.moved, solver="greedy")
    calls = bug(data, shape.moved.calls)
    moved = dataclasses.replace(shape.moved, calls=calls)
    plan = lenient(plan, len(calls)) if is_tight else roomy(moved)
    if faults(shape, moved, plan) == []:
        assert works(shape, moved, plan)


@settings(max_examples=40, deadline=None)
@given(st.one_of(moved_steps(), talking_shapes()), st.data())
def test_placements_that_pass_are_right(shape, data):
    """A buffer anywhere in the arena: if the checker says nothing, nothing is destroyed."""
    plan = place_step(shape.moved, solver="greedy")
    buffer = data.draw(st.sampled_from(sorted(plan.offsets)))
    offset = 512 * data.draw(st.integers(0, plan.arena_bytes // 512))
    broken = lenient(plan, len(shape.moved.calls))
    broken = dataclasses.replace(broken, offsets={**plan.offsets, buffer: offset})
    if check(shape.moved, broken).ok:
        assert works(shape, shape.moved, broken)
