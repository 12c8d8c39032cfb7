"""Injected bugs, continued: recomputation, numbers of the plan, tiles, other forms of a step."""

import dataclasses

import pytest

from memo_compile.check.check_moves import Recomputation, check_moves
from memo_compile.check.check_plan import check
from memo_compile.driver.donation import wrongly_taken
from memo_compile.step.problem import (
    CallKind,
    Half,
    Into,
    OutsideBuffer,
    Phase,
    Problem,
    RegionBuffer,
    RegionOutput,
    RegionProfile,
    StepCall,
    Storage,
    arena_buffers,
    call_starts,
)
from tests.steps.bugs import (
    RECOMPUTE,
    RELOAD,
    RUN,
    WAIT,
    calls_of,
    dropped,
    expect,
    faults,
    named,
    plan_of,
    replaced,
    shape_of,
    with_calls,
    works,
)
from tests.steps.byte_machine import roomy
from tests.steps.movable import movable_step
from tests.steps.moved import BACKWARD, SHAPES, tiles
from tests.steps.parts import call as run_call


@pytest.mark.parametrize(("name", "index"), calls_of(RECOMPUTE))
def test_a_recomputation_reads_another_value(name, index):
    """The right shapes, but of another layer: only what the call stands for tells."""
    shape = shape_of(name)
    call = shape.moved.calls[index]
    expected = shape.recomputations[call.name].inputs[0]
    wrong = "y1" if expected == "y0" else "y0"
    moved = replaced(shape.moved, index, inputs=(wrong, *call.inputs[1:]))
    expect(faults(shape, moved), f"reads {wrong}, which is {wrong}, where it must read {expected}")
    assert not works(shape, moved)


def test_recomputed_outputs_change_places():
    shape = shape_of("recompute")
    index = named(shape.moved, "recompute0")
    moved = replaced(shape.moved, index, outputs=("recomputed.a0", "recomputed.s0"))
    expect(faults(shape, moved), "B0 reads recomputed.a0, which is s0, where it must read a0")
    index = named(shape.moved, "B0")
    moved = replaced(shape.moved, index, inputs=("gy1", "y0", "recomputed.a0", "recomputed.s0"))
    expect(faults(shape, moved), "B0 reads recomputed.s0, which is s0, where it must read a0")
    assert not works(shape, moved)


def test_what_recomputation_stands_for_must_be_known():
    shape = shape_of("recompute")
    found = check_moves(shape.original, shape.moved).problems
    expect(list(found), "B0 reads recomputed.s0, which is recomputed.s0, where it must read s0")
    swapped = {
        **shape.recomputations,
        "recompute0": Recomputation(makers=("F0",), inputs=("y0",), outputs=("a0", "s0")),
    }
    found = check_moves(shape.original, shape.moved, swapped).problems
    expect(list(found), "B0 reads recomputed.s0, which is a0, where it must read s0")
    short = {
        **shape.recomputations,
        "recompute0": Recomputation(makers=("F0",), inputs=("y0",), outputs=("s0",)),
    }
    found = check_moves(shape.original, shape.moved, short).problems
    expect(list(found), "recompute0: expected (inputs, outputs) (1, 1)")


@pytest.mark.parametrize(("name", "index"), calls_of(*CallKind))
def test_fewer_bytes_of_the_arena_stay(name, index):
    """Caught exactly when a buffer that lives in this call or later needs them."""
    moved, plan = shape_of(name).moved, plan_of(name)
    start = call_starts(moved)[index]
    ends = [
        plan.offsets[buffer.id] + buffer.size_bytes
        for buffer in arena_buffers(moved)
        if buffer.end > start
    ]
    resident = list(plan.resident_bytes)
    resident[index] -= 512
    broken = dataclasses.replace(plan, resident_bytes=tuple(resident))
    is_caught = not check(moved, broken).ok
    follows = index + 1 < len(resident) and resident[index + 1] > resident[index]
    assert is_caught == (resident[index] < max(ends, default=0) or follows)


@pytest.mark.parametrize("name", SHAPES)
def test_the_host_frame_is_too_small(name):
    moved = shape_of(name).moved
    small = dataclasses.replace(moved, host_bytes=moved.host_bytes - 1)
    expect(faults(shape_of(name), small), "uses host bytes")


@pytest.mark.parametrize(("name", "index"), calls_of(RUN, shapes=("tiles",)))
def test_a_value_leaves_before_all_tiles_have_written_it(name, index):
    """The copy that comes back is older than the value."""
    shape = shape_of(name)
    calls = shape.moved.calls
    if not calls[index].name.startswith("tile"):
        assert calls[index].name.rstrip("012") in ("before", "sum", "after", "other", "use")
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
    index = named(shape.moved, "sum1")
    moved = replaced(shape.moved, index, inputs=("y0", "t1"))
    expect(faults(shape, moved), "sum1 and sum0 write the same bytes of acc")


def test_a_region_of_several_operations_writes_over_what_it_reads():
    """The first operation's result would lie over what the second one adds."""
    shape = shape_of("tiles")
    total = shape.moved.regions["sum"]
    partial = dataclasses.replace(total.buffers[0], name="partial")
    for changed in (
        dataclasses.replace(total, buffers=(*total.buffers, partial)),
        dataclasses.replace(
            total, outside=(OutsideBuffer(kind="k", size_bytes=8, start=0, end=1),)
        ),
    ):
        regions = {**shape.moved.regions, "sum": changed}
        moved = dataclasses.replace(shape.moved, regions=regions)
        expect(faults(shape, moved), "sum0 writes over acc, which it reads")


def test_what_others_wrote_into_a_value_is_not_made_again():
    """A recomputed ``before`` makes the zeros that the tiles fill, not what they hold then."""
    shape = shape_of("tiles")
    kept = [
        call for call in shape.moved.calls if call.copy is None and call.kind is not CallKind.WAIT
    ]
    again = run_call(
        "again", "before", BACKWARD, ("y0",), ("recomputed.s", "recomputed.acc"), kind=RECOMPUTE
    )
    use = dataclasses.replace(kept[-1], inputs=("g", "recomputed.s", "recomputed.acc"))
    moved = with_calls(shape.moved, (*kept[:-1], again, use))
    recomputation = Recomputation(makers=("before",), inputs=("y0",), outputs=("s", "acc"))
    found = check_moves(shape.original, moved, {"again": recomputation}).problems
    expect(list(found), "use reads recomputed.s for s: expected bytes")


def test_only_what_rounding_up_added_may_be_missing():
    """Tiles of 1,920 B take 2,048; behind the last one lies what ``before`` left of 6 KiB."""
    shape = tiles(1920)
    assert check_moves(shape.original, shape.moved).ok
    use = "use reads reloaded.s for s: expected bytes"
    short = with_calls(shape.moved, tuple(_copying_to(5632, call) for call in shape.moved.calls))
    expect(list(check_moves(shape.original, short).problems), use)
    steps = [_with_rows_at_the_end(step) for step in (shape.original, shape.moved)]
    expect(list(check_moves(*steps).problems), use)


def _copying_to(end: int, call: StepCall) -> StepCall:
    """``call``; copies of ``s`` end early."""
    if call.copy is None or not call.name.endswith(".s"):
        return call
    return dataclasses.replace(call, copy=dataclasses.replace(call.copy, end_bytes=end))


def _with_rows_at_the_end(step: Problem) -> Problem:
    """One more tile writes the last 384 B of ``s``, which the copies leave out."""
    region = RegionProfile(
        name="last",
        num_lines=1,
        buffers=(RegionBuffer(name="rows", size_bytes=512, start=0, end=1),),
        input_ends=(),
        outputs=(RegionOutput(storage=Storage.ARENA, index=0),),
    )
    into = (Into(buffer=0, value="s", offset_bytes=5760),)
    last = run_call("last", "last", Phase.FORWARD, (), ("rows",), into=into)
    at = named(step, "sum2") + 1
    step = dataclasses.replace(step, regions={**step.regions, "last": region})
    return with_calls(step, (*step.calls[:at], last, *step.calls[at:]))


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


def test_a_region_of_the_step_is_left_out():
    shape = shape_of("offload only")
    calls = shape.moved.calls
    first = next(at for at, call in enumerate(calls) if call.kind is RUN)
    expect(faults(shape, dropped(shape.moved, first)), "the step without moves runs F0")
    last = named(shape.moved, shape.original.calls[-1].name)
    expect(faults(shape, dropped(shape.moved, last)), f"{calls[last].name} is missing")


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
    region = shape.moved.regions["recompute.a"]
    short = dataclasses.replace(region.buffers[0], size_bytes=region.buffers[0].size_bytes - 512)
    regions = {
        **shape.moved.regions,
        "recompute.a": dataclasses.replace(region, buffers=(short, *region.buffers[1:])),
    }
    original = dataclasses.replace(shape.original, regions=regions)
    moved = dataclasses.replace(shape.moved, regions=regions)
    found = check_moves(original, moved, shape.recomputations).problems
    assert found == (
        "B1 reads recomputed.a1 for a1: expected bytes [0, 2048) of F1/a, got [0, 1536) of F1/a",
    )


def test_the_step_without_moves_must_be_right_itself():
    shape = shape_of("offload only")
    calls = shape.original.calls
    wrong = with_calls(shape.original, (calls[1], calls[0], *calls[2:]))
    found = check_moves(wrong, wrong).problems
    expect(list(found), "unmoved: F1 reads y1 before it is made")


def test_a_write_into_a_view_of_what_nothing_made():
    view = RegionProfile(
        name="view",
        num_lines=1,
        buffers=(),
        input_ends=(1,),
        outputs=(RegionOutput(storage=Storage.INPUT, index=0),),
    )
    write = RegionProfile(
        name="write",
        num_lines=1,
        buffers=(RegionBuffer(name="b", size_bytes=512, start=0, end=1),),
        input_ends=(),
        outputs=(RegionOutput(storage=Storage.ARENA, index=0),),
    )
    first = StepCall(
        name="F0", region="view", phase=Phase.FORWARD, inputs=("ghost",), outputs=("v",)
    )
    into = (Into(buffer=0, value="v", offset_bytes=0),)
    second = StepCall(
        name="F1", region="write", phase=Phase.FORWARD, inputs=(), outputs=("w",), into=into
    )
    step = Problem(regions={"view": view, "write": write}, calls=(first, second))
    found = check_moves(step, step).problems
    expect(list(found), "F1 writes into v before it is made")


@pytest.mark.parametrize(
    ("region", "position", "returned", "problem"),
    [
        ("Lb", 5, (), None),  # d is read for the last time
        ("L", 0, (), "Lb@0 reads x0, which L@0 overwrites"),
        ("P", 0, (), "P writes over in, which is not in the arena"),
        ("Lb", 0, ("g1",), "Lb@0 writes over g1, which the step returns"),
        ("H", 0, (), "Hb reads x2, which H overwrites"),
    ],
)
def test_a_region_writes_over_its_input(region, position, returned, problem):
    step = movable_step(2).problem
    regions = dict(step.regions)
    regions[region] = dataclasses.replace(regions[region], overwrites=(position,))
    half = Half(
        phase=Phase.BACKWARD,
        constants=(),
        arguments=("tangent",),
        results=returned,
        handle="",
        layouts=(None,),
    )
    forward = dataclasses.replace(half, phase=Phase.FORWARD, arguments=("in",), results=())
    step = dataclasses.replace(step, regions=regions, halves=(forward, half))
    found = check(step, roomy(step)).problems
    assert found == () if problem is None else problem in found
    assert returned or wrongly_taken(step) == (frozenset() if problem is None else {region})


@pytest.mark.parametrize("read_later", ["other", "unrelated"])
def test_what_shares_a_buffer_with_a_later_read_is_not_written_over(read_later):
    """``other`` shows the buffer of ``value``, as a compiler may return one result twice."""
    buffer = RegionBuffer(name="b", size_bytes=512, start=0, end=1)
    both = RegionProfile(
        name="make",
        num_lines=1,
        buffers=(buffer, buffer),
        input_ends=(),
        outputs=(
            RegionOutput(storage=Storage.ARENA, index=0),
            RegionOutput(storage=Storage.ARENA, index=0, same_as=0),
            RegionOutput(storage=Storage.ARENA, index=1),
        ),
    )
    read = RegionProfile(name="read", num_lines=1, buffers=(), input_ends=(1,), outputs=())
    taking = dataclasses.replace(read, name="take", overwrites=(0,))

    def called(region, inputs=(), outputs=()):
        return StepCall(
            name=region, region=region, phase=Phase.BACKWARD, inputs=inputs, outputs=outputs
        )

    calls = (
        called("make", outputs=("value", "other", "unrelated")),
        called("take", ("value",)),
        called("read", (read_later,)),
    )
    step = Problem(regions={"make": both, "take": taking, "read": read}, calls=calls)
    assert wrongly_taken(step) == ({"take"} if read_later == "other" else frozenset())
