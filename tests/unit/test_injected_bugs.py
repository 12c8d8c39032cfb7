"""Every bug that a planner of moves could have, put into steps that are right, is caught.

Each mutation of each step is a test of its own with the complaint that must name it. Where a
mutation may be harmless, ``byte_machine`` says whether it is: it runs the step on cells under the
worst timings of its copies, and the checker must agree with it in both directions.
"""

import dataclasses
from functools import cache

import pytest

from memo_compile.planners.check import check
from memo_compile.planners.check_moves import Remake, check_moves
from memo_compile.planners.step import plan_step
from memo_compile.plans import Plan
from memo_compile.problem import CallKind, Phase, Problem, StepCall, arena_buffers, call_starts
from tests.unit.byte_machine import is_right, roomy
from tests.unit.moved_steps import SHAPES, Shape

OFFLOAD, RELOAD, WAIT = CallKind.OFFLOAD, CallKind.RELOAD, CallKind.WAIT
RECOMPUTE, RUN = CallKind.RECOMPUTE, CallKind.RUN


@cache
def shape_of(name: str) -> Shape:
    return SHAPES[name]()


@cache
def plan_of(name: str) -> Plan:
    return plan_step(shape_of(name).moved, solver="greedy", releases_pages=True)


def faults(shape: Shape, moved: Problem, plan: Plan | None = None) -> list[str]:
    """What the checker says; without a plan, on one in which no buffers share bytes."""
    of_plan = check(moved, roomy(moved) if plan is None else plan).problems
    return [*of_plan, *check_moves(shape.original, moved, shape.remakes).problems]


def works(shape: Shape, moved: Problem, plan: Plan | None = None) -> bool:
    plan = roomy(moved) if plan is None else plan
    return is_right(shape.original, moved, plan, remakes=shape.remakes, used_bytes=shape.used_bytes)


def is_ordered(moved: Problem) -> bool:
    """The forward is one call of autograd and the backward another."""
    phases = [call.phase for call in moved.calls]
    return phases == sorted(phases, key=lambda phase: phase is Phase.BACKWARD)


def with_calls(moved: Problem, calls: tuple[StepCall, ...]) -> Problem:
    return dataclasses.replace(moved, calls=calls)


def replaced(moved: Problem, index: int, **changes) -> Problem:
    call = dataclasses.replace(moved.calls[index], **changes)
    return with_calls(moved, (*moved.calls[:index], call, *moved.calls[index + 1 :]))


def dropped(moved: Problem, index: int) -> Problem:
    return with_calls(moved, moved.calls[:index] + moved.calls[index + 1 :])


def named(problem: Problem, name: str) -> int:
    return next(i for i, call in enumerate(problem.calls) if call.name == name)


def calls_of(*kinds: CallKind, shapes=tuple(SHAPES)) -> list:
    """(shape, index of a call of these kinds), each with a readable test id."""
    return [
        pytest.param(shape, index, id=f"{shape}: {call.name}")
        for shape in shapes
        for index, call in enumerate(shape_of(shape).moved.calls)
        if call.kind in kinds
    ]


def expect(found: list[str], *phrases: str) -> None:
    """Some complaint has one of the phrases in it."""
    assert any(phrase in text for phrase in phrases for text in found), found


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


@pytest.mark.parametrize(("name", "index"), calls_of(WAIT))
def test_a_wait_is_dropped_from_the_planned_step(name, index):
    """With the lives of the step without the wait: nothing but the checker knows of the copy."""
    shape = shape_of(name)
    broken = dropped(shape.moved, index)
    plan = dataclasses.replace(plan_of(name), resident_bytes=())
    expect(list(check(broken, plan).problems), "is never waited for")


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


def test_swaps_are_legal_about_as_often_as_not():
    """The test before this one would be empty if it never saw both."""
    legal = {True: 0, False: 0}
    for name in SHAPES:
        shape = shape_of(name)
        calls = shape.moved.calls
        for i in range(len(calls) - 1):
            swapped = with_calls(shape.moved, (*calls[:i], calls[i + 1], calls[i], *calls[i + 2 :]))
            legal[faults(shape, swapped) == []] += 1
    assert min(legal.values()) > 20, legal


BUFFERS = [
    pytest.param(name, one.id, id=f"{name}: {one.id}")
    for name in SHAPES
    for one in arena_buffers(shape_of(name).moved)
]


@pytest.mark.parametrize(("name", "buffer"), BUFFERS)
def test_a_buffer_is_put_on_each_other_one(name, buffer):
    """Caught exactly when the lives cross, those of copies in flight included."""
    moved, plan = shape_of(name).moved, roomy(shape_of(name).moved)
    lives = {one.id: one for one in arena_buffers(moved)}
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
        text = str(check(moved, broken))
        is_named = any(
            f"{one} and {two} share" in text
            for one, two in ((buffer, other.id), (other.id, buffer))
        )
        assert is_named == (mine.start < other.end and other.start < mine.end), (other, text)


@pytest.mark.parametrize(("name", "buffer"), BUFFERS)
@pytest.mark.parametrize("shift", [1, 256, -1])
def test_an_offset_is_not_aligned(name, buffer, shift):
    moved, plan = shape_of(name).moved, roomy(shape_of(name).moved)
    offset = plan.offsets[buffer] + shift
    broken = dataclasses.replace(plan, offsets={**plan.offsets, buffer: offset})
    expect(list(check(moved, broken).problems), f"{buffer} at {offset} is not aligned to 512 B")


@pytest.mark.parametrize(("name", "buffer"), BUFFERS)
def test_an_offset_is_outside_the_arena(name, buffer):
    moved, plan = shape_of(name).moved, plan_of(name)
    for offset in (plan.arena_bytes, plan.arena_bytes - 512, -512):
        size = next(one.size_bytes for one in arena_buffers(moved) if one.id == buffer)
        if offset == plan.arena_bytes - 512 and size <= 512:
            continue
        broken = dataclasses.replace(plan, offsets={**plan.offsets, buffer: offset})
        expect(list(check(moved, broken).problems), f"{buffer} at [{offset}, {offset + size}) is")


@pytest.mark.parametrize(("name", "buffer"), BUFFERS)
def test_an_offset_is_missing(name, buffer):
    moved, plan = shape_of(name).moved, plan_of(name)
    offsets = {key: value for key, value in plan.offsets.items() if key != buffer}
    broken = dataclasses.replace(plan, offsets=offsets)
    expect(list(check(moved, broken).problems), f"{buffer} has no offset")


def pairs_of(kind: CallKind) -> list:
    return [
        pytest.param(name, one, other, id=f"{name}: {calls[one].name} and {calls[other].name}")
        for name in SHAPES
        for calls in [shape_of(name).moved.calls]
        for one in range(len(calls))
        for other in range(len(calls))
        if one != other and calls[one].kind is kind and calls[other].kind is kind
    ]


@pytest.mark.parametrize(("name", "one", "other"), pairs_of(OFFLOAD))
def test_two_values_share_host_memory(name, one, other):
    """All values of these steps are on the host at one time, at the turn."""
    moved = shape_of(name).moved
    taken = moved.calls[other].copy.host_offset
    moved = _at_host(_at_host(moved, one, taken), _reload_of(moved, one), taken)
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


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("name", "index"), calls_of(OFFLOAD, RELOAD))
def test_a_copy_moves_other_bytes(name, index, change):
    """One end of the copy only, so that the two ends never fit."""
    shape = shape_of(name)
    copy = shape.moved.calls[index].copy
    start, end, host = CHANGES[change]
    numbers = (copy.start_bytes + start, copy.end_bytes + end, copy.host_offset + host)
    if min(numbers) < 0:
        assert copy.start_bytes == 0 or copy.host_offset == 0, "Copy itself refuses these"
        return
    names = ("start_bytes", "end_bytes", "host_offset")
    other = dataclasses.replace(copy, **dict(zip(names, numbers, strict=True)))
    moved = replaced(shape.moved, index, copy=other)
    expect(faults(shape, moved), *RANGE_PHRASES)


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
def test_a_reload_is_dropped(name, index):
    shape = shape_of(name)
    moved = dropped(shape.moved, index)
    call = shape.moved.calls[index]
    found = faults(shape, moved)
    expect(found, f"waits for {call.name}, but it was not issued before")
    expect(found, f"reads {call.outputs[0]} before it is made")


@pytest.mark.parametrize(("name", "index"), calls_of(OFFLOAD))
def test_an_offload_is_dropped(name, index):
    shape = shape_of(name)
    call = shape.moved.calls[index]
    found = faults(shape, dropped(shape.moved, index))
    expect(found, f"waits for {call.name}, but it was not issued before")
    expect(found, "which nothing has written")


@pytest.mark.parametrize(("name", "index"), calls_of(OFFLOAD))
def test_an_offload_and_its_wait_are_dropped(name, index):
    shape = shape_of(name)
    wait = named(shape.moved, f"wait.{shape.moved.calls[index].name}")
    moved = dropped(dropped(shape.moved, wait), index)
    expect(faults(shape, moved), "which nothing has written")
    assert not works(shape, moved)


@pytest.mark.parametrize(("name", "one", "other"), pairs_of(WAIT))
def test_a_wait_names_another_copy(name, one, other):
    shape = shape_of(name)
    calls = shape.moved.calls
    moved = replaced(shape.moved, one, waits_for=calls[other].waits_for)
    found = faults(shape, moved)
    expect(found, f"{calls[one].waits_for} is never waited for")
    expect(found, "it was waited for before", "it was not issued before")


@pytest.mark.parametrize(("name", "index"), calls_of(WAIT))
@pytest.mark.parametrize("nobody", ["F0", "nobody"])
def test_a_wait_names_no_copy(name, index, nobody):
    moved = replaced(shape_of(name).moved, index, waits_for=nobody)
    expect(faults(shape_of(name), moved), f"waits for {nobody}, but it was not issued before")


@pytest.mark.parametrize(("name", "one", "other"), pairs_of(WAIT))
def test_a_wait_holds_another_value(name, one, other):
    moved = shape_of(name).moved
    broken = replaced(moved, one, inputs=moved.calls[other].inputs)
    expect(faults(shape_of(name), broken), "waits for the copy of", "before it is made")


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
        fills = new in call.outputs or any(one.value == new for one in call.into)
        if fills or (call.kind is WAIT and new in call.inputs):
            continue
        inputs = tuple(old if value == new else value for value in call.inputs)
        calls.append(dataclasses.replace(call, inputs=inputs))
    return with_calls(moved, tuple(calls))


def test_most_offloaded_values_lose_their_bytes():
    """So that the test before this one is not about harmless cases only."""
    num_lost = 0
    for name in SHAPES:
        moved, plan = shape_of(name).moved, plan_of(name)
        for one in arena_buffers(moved):
            if any(call.kind is OFFLOAD and _owner(moved, call) == one.id for call in moved.calls):
                num_lost += _is_overwritten(moved, plan, one)
    assert num_lost >= 6


def _owner(moved: Problem, offload: StepCall) -> str:
    maker = next(call for call in moved.calls if offload.inputs[0] in call.outputs)
    region = moved.regions[maker.region]
    slot = region.outputs[maker.outputs.index(offload.inputs[0])]
    return f"{maker.name}/{region.buffers[slot.index].name}"


def _is_overwritten(moved: Problem, plan: Plan, one) -> bool:
    start, end = plan.offsets[one.id], plan.offsets[one.id] + one.size_bytes
    return any(
        other.start >= one.end
        and plan.offsets[other.id] < end
        and start < plan.offsets[other.id] + other.size_bytes
        for other in arena_buffers(moved)
    )


@pytest.mark.parametrize(("name", "index"), calls_of(RECOMPUTE))
def test_a_recomputation_is_dropped(name, index):
    shape = shape_of(name)
    call = shape.moved.calls[index]
    found = faults(shape, dropped(shape.moved, index))
    expect(found, "nothing fills bytes" if call.into else f"reads {call.outputs[0]} before it is")


@pytest.mark.parametrize(("name", "index"), calls_of(RECOMPUTE))
def test_a_recomputation_reads_another_value(name, index):
    """The right shapes, but of another layer: only what the call stands for tells."""
    shape = shape_of(name)
    call = shape.moved.calls[index]
    expected = shape.remakes[call.name].inputs[0]
    wrong = "y1" if expected == "y0" else "y0"
    moved = replaced(shape.moved, index, inputs=(wrong, *call.inputs[1:]))
    expect(faults(shape, moved), f"reads {wrong}, which is {wrong}, where it must read {expected}")
    assert not works(shape, moved)


def test_recomputed_outputs_change_places():
    shape = shape_of("recompute")
    index = named(shape.moved, "again0")
    moved = replaced(shape.moved, index, outputs=("again.a0", "again.s0"))
    expect(faults(shape, moved), "B0 reads again.a0, which is s0, where it must read a0")
    index = named(shape.moved, "B0")
    moved = replaced(shape.moved, index, inputs=("gy1", "y0", "again.a0", "again.s0"))
    expect(faults(shape, moved), "B0 reads again.s0, which is s0, where it must read a0")
    assert not works(shape, moved)


def test_recomputed_outputs_of_two_layers_change_places():
    """Equal regions, equal sizes: the values of layer 0 and of layer 1."""
    shape = shape_of("token mix")
    one, other = (named(shape.moved, f"B{i}") for i in range(2))
    for index, i in ((one, 1), (other, 0)):
        inputs = shape.moved.calls[index].inputs
        moved = replaced(shape.moved, index, inputs=(*inputs[:2], f"reloaded.s{i}", inputs[3]))
        expect(faults(shape, moved), f"reads reloaded.s{i}")
        assert not works(shape, moved)


def test_recomputed_rows_of_two_layers_change_places():
    shape = shape_of("token mix")
    into = [shape.moved.calls[named(shape.moved, f"again{i}")].into for i in range(2)]
    moved = replaced(shape.moved, named(shape.moved, "again0"), into=into[1])
    moved = replaced(moved, named(shape.moved, "again1"), into=into[0])
    expect(faults(shape, moved), "again1 writes into reloaded.s0 before it is made")


def test_what_recomputation_stands_for_must_be_known():
    shape = shape_of("recompute")
    found = check_moves(shape.original, shape.moved).problems
    expect(list(found), "B0 reads again.s0, which is again.s0, where it must read s0")
    swapped = {**shape.remakes, "again0": Remake(inputs=("y0",), outputs=("a0", "s0"))}
    found = check_moves(shape.original, shape.moved, swapped).problems
    expect(list(found), "B0 reads again.s0, which is a0, where it must read s0")
    short = {**shape.remakes, "again0": Remake(inputs=("y0",), outputs=("s0",))}
    found = check_moves(shape.original, shape.moved, short).problems
    expect(list(found), "again0: expected (inputs, outputs) (1, 1)")


@pytest.mark.parametrize(("name", "index"), calls_of(*CallKind))
def test_fewer_bytes_of_the_arena_stay(name, index):
    """Caught exactly when a buffer that lives in this call or later needs them."""
    moved, plan = shape_of(name).moved, plan_of(name)
    start = call_starts(moved)[index]
    ends = [
        plan.offsets[one.id] + one.size_bytes for one in arena_buffers(moved) if one.end > start
    ]
    resident = list(plan.resident_bytes)
    resident[index] -= 512
    broken = dataclasses.replace(plan, resident_bytes=tuple(resident))
    is_caught = not check(moved, broken).ok
    follows = index + 1 < len(resident) and resident[index + 1] > resident[index]
    assert is_caught == (resident[index] < max(ends, default=0) or follows)


@pytest.mark.parametrize("name", SHAPES)
def test_the_numbers_of_the_plan(name):
    moved, plan = shape_of(name).moved, plan_of(name)
    assert check(moved, dataclasses.replace(plan, budget_bytes=plan.peak_bytes)).ok

    def of(**changes) -> list[str]:
        return list(check(moved, dataclasses.replace(plan, **changes)).problems)

    expect(of(budget_bytes=plan.peak_bytes - 1), "> budget")
    below_slack = plan.peak_bytes - plan.peak_bytes // 50  # a plan for CPU has some to spare
    expect(of(peak_bytes=below_slack), "the peak says")
    expect(of(lower_bound_bytes=plan.arena_bytes + 1), "lower bound")
    expect(of(arena_bytes=plan.arena_bytes - 512), "outside the arena")
    expect(of(resident_bytes=plan.resident_bytes[1:]), "one number per call")
    expect(of(resident_bytes=(0,) * len(moved.calls)), "uses the arena up to")


@pytest.mark.parametrize("name", SHAPES)
def test_the_host_frame_is_too_small(name):
    moved = shape_of(name).moved
    small = dataclasses.replace(moved, host_bytes=moved.host_bytes - 1)
    expect(faults(shape_of(name), small), "uses host bytes")


INTO = [
    pytest.param(shape, index, at, shift, id=f"{shape}: {call.name} into {into.value} {shift:+}")
    for shape in SHAPES
    for index, call in enumerate(shape_of(shape).moved.calls)
    for at, into in enumerate(call.into)
    for shift in (512, -512)
]


@pytest.mark.parametrize(("name", "index", "at", "shift"), INTO)
def test_a_call_writes_into_other_bytes(name, index, at, shift):
    shape = shape_of(name)
    call = shape.moved.calls[index]
    into = list(call.into)
    into[at] = dataclasses.replace(into[at], offset_bytes=into[at].offset_bytes + shift)
    moved = replaced(shape.moved, index, into=tuple(into))
    phrases = ("write the same bytes of", "writes bytes", "writes into", "nothing fills")
    found = check(moved, roomy(moved)).problems
    expect(list(found), *phrases)


@pytest.mark.parametrize(("name", "index"), calls_of(RUN, shapes=("tiles",)))
def test_a_value_leaves_before_all_tiles_have_written_it(name, index):
    """The copy that comes back is older than the value."""
    shape = shape_of(name)
    calls = shape.moved.calls
    if not calls[index].name.startswith("tile"):
        assert calls[index].name in ("before", "after", "other", "use")
        return
    out = calls[named(shape.moved, "offload.s")]
    rest = tuple(call for call in calls if call is not out)
    found = faults(shape, with_calls(shape.moved, (*rest[:index], out, *rest[index:])))
    expect(found, "while offload.s copies it")
    expect(found, "reloads s as it was before a call wrote into it")


def test_a_tile_writes_what_was_read():
    shape = shape_of("tiles")
    calls = list(shape.moved.calls)
    after = calls.pop(named(shape.moved, "after"))
    calls.insert(named(shape.moved, "tile2"), after)
    found = faults(shape, with_calls(shape.moved, tuple(calls)))
    expect(found, "tile2 writes into s after after has read it")


def test_an_update_that_does_not_read_what_it_replaces():
    shape = shape_of("tiles")
    index = named(shape.moved, "tile1")
    moved = replaced(shape.moved, index, inputs=("y0", "y0"))
    expect(faults(shape, moved), "tile1 and tile0 write the same bytes of acc")


@pytest.mark.parametrize(("name", "index"), calls_of(*CallKind))
def test_two_calls_have_one_name(name, index):
    moved = shape_of(name).moved
    twin = moved.calls[index - 1].name
    expect(faults(shape_of(name), replaced(moved, index, name=twin)), f"two calls are named {twin}")


@pytest.mark.parametrize(("name", "index"), calls_of(RUN, RECOMPUTE, RELOAD))
def test_two_values_have_one_name(name, index):
    moved = shape_of(name).moved
    call = moved.calls[index]
    for taken in ("y0", moved.calls[0].outputs[0]):
        if taken in call.outputs:
            continue
        found = faults(shape_of(name), replaced(moved, index, outputs=(taken, *call.outputs[1:])))
        expect(
            found,
            f"{call.name} makes {taken}, which exists already",
            f"{call.name} makes y0 in the arena, but the step is given it",
            f"{moved.calls[0].name} reads y0 before it is made",
        )


def test_an_output_of_the_forward_is_handed_to_the_backward():
    """Autograd passes it as an argument: the step is given what it made, in ordinary memory."""
    shape = shape_of("offload only")
    inputs = (*shape.moved.inputs, "loss")
    assert check(dataclasses.replace(shape.moved, inputs=inputs), plan_of("offload only")).ok


@pytest.mark.parametrize(("name", "index"), calls_of(*CallKind))
def test_a_call_of_another_form(name, index):
    moved = shape_of(name).moved
    call = moved.calls[index]
    wrong = replaced(moved, index, waits_for=None if call.kind is WAIT else "F0")
    expect(faults(shape_of(name), wrong), f"{call.name}: expected (inputs, outputs, has a copy")
    wrong = replaced(moved, index, inputs=(*call.inputs, "y0"))
    expect(faults(shape_of(name), wrong), f"{call.name}: {call.region} has (inputs, outputs)")
    wrong = replaced(moved, index, region="nowhere")
    found = faults(shape_of(name), wrong, plan_of(name))
    expect(found, f"{call.name} runs nowhere, which is no region")


@pytest.mark.parametrize(("name", "index"), calls_of(RUN))
def test_a_region_of_the_step_is_left_out(name, index):
    shape = shape_of(name)
    call = shape.moved.calls[index]
    is_last = call.name == shape.original.calls[-1].name
    phrase = f"{call.name} is missing" if is_last else f"the step without moves runs {call.name}"
    expect(faults(shape, dropped(shape.moved, index)), phrase)


def test_a_region_runs_twice():
    shape = shape_of("offload only")
    again = dataclasses.replace(shape.moved.calls[-1], name="B0 again", outputs=("gy", "w"))
    moved = with_calls(shape.moved, (*shape.moved.calls, again))
    expect(faults(shape, moved), "B0 again runs where the step without moves runs nothing")


def test_another_frame_and_other_regions():
    shape = shape_of("offload only")
    fewer = dataclasses.replace(shape.moved, fixed=dataclasses.replace(shape.moved.fixed, inputs=1))
    expect(faults(shape, fewer), "the moved step has other fixed")
    wider = dataclasses.replace(shape.moved.regions["B"], num_lines=5)
    regions = {**shape.moved.regions, "B": wider}
    expect(
        faults(shape, dataclasses.replace(shape.moved, regions=regions)),
        "region B is not the same in the moved step",
    )


def test_the_gradient_of_one_layer_is_read_by_another():
    shape = shape_of("rotating")
    index = named(shape.moved, "B1")
    moved = replaced(shape.moved, index, inputs=("gy3", *shape.moved.calls[index].inputs[1:]))
    expect(faults(shape, moved), "B1 reads gy3, which is gy3, where it must read gy2")
    assert not works(shape, moved)


def test_a_copy_of_what_is_not_in_the_arena():
    shape = shape_of("offload only")
    moved = replaced(shape.moved, named(shape.moved, "offload.s0"), inputs=("y0",))
    expect(faults(shape, moved), "offload.s0 copies y0, which is not in the arena")


def test_a_reload_over_the_bytes_of_two_values():
    """``a0`` lies behind ``s0`` on the host; its place in the value is wrong as well."""
    shape = shape_of("offload only")
    index = named(shape.moved, "reload.s0")
    copy = dataclasses.replace(shape.moved.calls[index].copy, host_offset=512)
    found = faults(shape, replaced(shape.moved, index, copy=copy))
    expect(found, "reload.s0 mixes bytes of s0 and a0")


def test_a_recomputation_makes_too_few_rows():
    """The reader would find the rest of the value in what lies behind its bytes."""
    shape = shape_of("recompute")
    region = shape.moved.regions["again.a"]
    short = dataclasses.replace(region.buffers[0], size_bytes=region.buffers[0].size_bytes - 512)
    regions = {
        **shape.moved.regions,
        "again.a": dataclasses.replace(region, buffers=(short, *region.buffers[1:])),
    }
    original = dataclasses.replace(shape.original, regions=regions)
    moved = dataclasses.replace(shape.moved, regions=regions)
    found = check_moves(original, moved, shape.remakes).problems
    assert found == (
        "B1 reads again.a1 for a1: expected bytes [0, 2048) of F1/a, got [0, 1536) of F1/a",
    )


def test_the_step_without_moves_must_be_right_itself():
    shape = shape_of("offload only")
    calls = shape.original.calls
    wrong = with_calls(shape.original, (calls[1], calls[0], *calls[2:]))
    found = check_moves(wrong, wrong).problems
    expect(list(found), "unmoved: F1 reads y1 before it is made")
