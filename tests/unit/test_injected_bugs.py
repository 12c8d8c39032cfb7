"""Every bug that a planner of moves could have, put into steps that are right, is caught.

Each mutation of each step is a test of its own with the complaint that must name it. Where a
mutation may be harmless, ``byte_machine`` says whether it is: it runs the step on cells under the
worst timings of its copies, and the checker must agree with it in both directions.
"""

import dataclasses

import pytest

from memo_compile.check.check_plan import check
from memo_compile.step.problem import CallKind, Phase, Problem, arena_buffers
from tests.steps.bugs import (
    OFFLOAD,
    RELOAD,
    RUN,
    WAIT,
    calls_of,
    dropped,
    expect,
    faults,
    is_ordered,
    named,
    plan_of,
    replaced,
    shape_of,
    with_calls,
    works,
)
from tests.steps.byte_machine import roomy
from tests.steps.moved import SHAPES


@pytest.mark.parametrize("name", SHAPES)
def test_the_steps_themselves_are_right(name):
    shape, plan = shape_of(name), plan_of(name)
    assert faults(shape, shape.moved, plan) == []
    assert works(shape, shape.moved, plan)
    assert check(shape.original, roomy(shape.original)).ok


@pytest.mark.parametrize(("name", "index"), calls_of(WAIT))
def test_a_wait_is_dropped(name, index):
    shape = shape_of(name)
    wait = shape.moved.calls[index]
    found = faults(shape, dropped(shape.moved, index))
    expect(found, f"{wait.waits_for} is never waited for")
    assert not works(shape, dropped(shape.moved, index))


@pytest.mark.parametrize(("name", "index"), calls_of(*CallKind))
def test_a_call_and_the_next_change_places(name, index):
    """Caught exactly when the results can change, or the forward mixes with the backward."""
    shape = shape_of(name)
    calls = shape.moved.calls
    if index + 1 == len(calls):
        assert calls[index].phase is Phase.BACKWARD, "the last call has no next one"
        return
    pair = (calls[index + 1], calls[index])
    swapped = with_calls(shape.moved, (*calls[:index], *pair, *calls[index + 2 :]))
    is_legal = works(shape, swapped) and is_ordered(swapped)
    if {calls[index].kind, calls[index + 1].kind} == {RUN}:
        is_legal = False  # regions run in the order that the user's program gave them
    assert (faults(shape, swapped) == []) == is_legal


BUFFERS = [
    pytest.param(name, buffer.id, id=f"{name}: {buffer.id}")
    for name in SHAPES
    for buffer in arena_buffers(shape_of(name).moved)
]


@pytest.mark.parametrize(("name", "buffer"), BUFFERS)
def test_a_buffer_is_put_on_each_other_one(name, buffer):
    """Caught exactly when the lives cross, those of copies in flight included."""
    moved, plan = shape_of(name).moved, roomy(shape_of(name).moved)
    lives = {buffer.id: buffer for buffer in arena_buffers(moved)}
    mine = lives[buffer]
    for other in lives.values():
        if other.id == buffer:
            continue
        offsets = {**plan.offsets, buffer: plan.offsets[other.id]}
        wide = plan.arena_bytes + mine.size_bytes
        broken = dataclasses.replace(
            plan,
            offsets=offsets,
            arena_bytes=wide,
            resident_bytes=(wide,) * len(moved.calls),
            peak_bytes=plan.peak_bytes + mine.size_bytes,
        )
        text = "; ".join(check(moved, broken).problems)
        is_named = any(
            f"{left} and {right} share" in text
            for left, right in ((buffer, other.id), (other.id, buffer))
        )
        assert is_named == (mine.start < other.end and other.start < mine.end), (other, text)


def pairs_of(kind: CallKind) -> list:
    return [
        pytest.param(
            name, first, second, id=f"{name}: {calls[first].name} and {calls[second].name}"
        )
        for name in SHAPES
        for calls in [shape_of(name).moved.calls]
        for first in range(len(calls))
        for second in range(len(calls))
        if first != second and calls[first].kind is kind and calls[second].kind is kind
    ]


@pytest.mark.parametrize(("name", "first", "second"), pairs_of(OFFLOAD))
def test_two_values_share_host_memory(name, first, second):
    """All values of these steps are on the host at one time, at the turn."""
    moved = shape_of(name).moved
    taken = moved.calls[second].copy.host_offset
    moved = _at_host(_at_host(moved, first, taken), _reload_of(moved, first), taken)
    expect(faults(shape_of(name), moved), "overwrites host bytes")
    assert not works(shape_of(name), moved)


def _at_host(moved: Problem, index: int, offset: int) -> Problem:
    copy = dataclasses.replace(moved.calls[index].copy, host_offset=offset)
    return replaced(moved, index, copy=copy)


def _reload_of(moved: Problem, offload: int) -> int:
    return named(moved, moved.calls[offload].name.replace("offload", "reload"))


@pytest.mark.parametrize(("name", "index"), calls_of(RELOAD))
def test_a_reload_begins_before_its_offload_has_ended(name, index):
    shape, calls = shape_of(name), shape_of(name).moved.calls
    reload = dataclasses.replace(calls[index], phase=Phase.FORWARD)
    source = reload.name.replace("reload", "offload")
    rest = calls[:index] + calls[index + 1 :]
    at = next(i for i, call in enumerate(rest) if call.waits_for == source)
    moved = with_calls(shape.moved, (*rest[:at], reload, *rest[at:]))
    expect(faults(shape, moved), f"{reload.name} begins before a wait for {source}")
    assert not works(shape, moved)
    # one place later it is legal, and only early
    later = with_calls(shape.moved, (*rest[: at + 1], reload, *rest[at + 1 :]))
    moved_back = replaced(later, at + 1, phase=rest[at].phase)
    assert faults(shape, moved_back) == []


CHANGES = {
    "starts 512 B later": (512, 0, 0),
    "starts 512 B earlier": (-512, 0, 0),
    "ends 512 B later": (0, 512, 0),
    "ends 512 B earlier": (0, -512, 0),
    "is 512 B further on the host": (0, 0, 512),
    "is 512 B less far on the host": (0, 0, -512),
    "is of the 512 B before": (-512, -512, 0),
    "is of the 512 B behind": (512, 512, 0),
    "leaves out its first 512 B": (512, 0, 512),
}
RANGE_PHRASES = (
    "to another place",
    "which nothing has written",
    "nothing fills bytes",
    "overwrites host bytes",
    "copies bytes",
    "uses host bytes",
)


@pytest.mark.parametrize(("name", "index"), calls_of(OFFLOAD, RELOAD))
def test_a_copy_moves_other_bytes(name, index):
    """One end of the copy only, so that the two ends never fit."""
    shape = shape_of(name)
    copy = shape.moved.calls[index].copy
    for change, (start, end, host) in CHANGES.items():
        numbers = (copy.start_bytes + start, copy.end_bytes + end, copy.host_offset + host)
        if min(numbers) < 0:
            assert copy.start_bytes == 0 or copy.host_offset == 0, "Copy itself refuses these"
            continue
        names = ("start_bytes", "end_bytes", "host_offset")
        other = dataclasses.replace(copy, **dict(zip(names, numbers, strict=True)))
        found = faults(shape, replaced(shape.moved, index, copy=other))
        assert any(phrase in text for phrase in RANGE_PHRASES for text in found), (change, found)


@pytest.mark.parametrize(("name", "index"), calls_of(OFFLOAD))
def test_both_ends_of_a_copy_leave_out_bytes(name, index):
    """The two fit, but the value comes back with a hole."""
    shape = shape_of(name)
    moved = shape.moved
    for at in (index, _reload_of(moved, index)):
        copy = moved.calls[at].copy
        moved = replaced(moved, at, copy=dataclasses.replace(copy, end_bytes=copy.end_bytes - 512))
    expect(faults(shape, moved), "nothing fills bytes")
    assert not works(shape, moved)


@pytest.mark.parametrize(("name", "index"), calls_of(OFFLOAD))
def test_the_tail_that_alignment_added_may_stay_behind(name, index):
    """Harmless: a value's last bytes, fewer than 512, may be no bytes of the tensor."""
    shape = shape_of(name)
    moved = shape.moved
    for at in (index, _reload_of(moved, index)):
        copy = moved.calls[at].copy
        moved = replaced(moved, at, copy=dataclasses.replace(copy, end_bytes=copy.end_bytes - 256))
    assert faults(shape, moved) == []


@pytest.mark.parametrize(("name", "index"), calls_of(RELOAD))
def test_the_value_is_read_whose_bytes_are_gone(name, index):
    """On the planned arena. Harmless exactly where nothing took these bytes meanwhile."""
    shape, plan = shape_of(name), plan_of(name)
    new = shape.moved.calls[index].outputs[0]
    moved = _never_reloaded(shape.moved, new, new.removeprefix("reloaded."))
    plan = dataclasses.replace(
        plan,
        resident_bytes=(plan.arena_bytes,) * len(moved.calls),
        peak_bytes=plan.peak_bytes + plan.arena_bytes,
    )
    found = faults(shape, moved, plan)
    assert (found == []) == works(shape, moved, plan), found
    if found:
        expect(found, "share bytes while both are alive")


def _never_reloaded(moved: Problem, new: str, old: str) -> Problem:
    """Readers of ``new`` read ``old``; what fills ``new`` is gone."""
    calls = []
    for call in moved.calls:
        fills = new in call.outputs or any(target.value == new for target in call.into)
        if fills or (call.kind is WAIT and new in call.inputs):
            continue
        inputs = tuple(old if value == new else value for value in call.inputs)
        calls.append(dataclasses.replace(call, inputs=inputs))
    return with_calls(moved, tuple(calls))
