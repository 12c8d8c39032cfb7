"""Decisions that cannot be are refused; the others become the calls that were meant."""

import gc
import weakref
from collections.abc import Mapping
from dataclasses import replace

import pytest

from memo_compile.errors import InputError, InvalidPlan
from memo_compile.planners import move_rules
from memo_compile.planners.move_rules import (
    joined_parts,
    recomputable,
    recompute_closure,
    recompute_keys,
    recompute_seconds,
    require_valid_modes,
)
from memo_compile.planners.moves import apply_moves
from memo_compile.planners.place_step import place_step
from memo_compile.planners.policy.modes import apart
from memo_compile.step.movable import (
    Action,
    LayerClass,
    LayerOp,
    Mode,
    MovableStep,
    Moves,
    RecomputeKey,
    RegionInput,
    Schedule,
    Slot,
)
from memo_compile.step.problem import (
    CallKind,
    Into,
    Phase,
    Problem,
    RegionOutput,
    StepCall,
    Storage,
)
from tests.steps.movable import KIB, NUM_ROWS, SLOTS, movable_step, recomputer
from tests.steps.parts import call

SAVE, OFFLOAD, RECOMPUTE = Action.SAVE, Action.OFFLOAD, Action.RECOMPUTE
X, A, B, C, D = range(5)


def mode(rows: int | None = None, **actions: Action) -> Mode:
    """SAVE, but for what is named: ``mode(c=OFFLOAD)``."""
    return Mode(actions=tuple(actions.get(name, SAVE) for name in SLOTS), recompute_rows=rows)


def applied(step: MovableStep, *modes: Mode, schedule: Schedule | None = None) -> Problem:
    moves = Moves(modes=modes, schedule=schedule or Schedule())
    return apply_moves(step, moves, recomputer(step))


def named(problem: Problem) -> Mapping[str, StepCall]:
    return {call.name: call for call in problem.calls}


def order(problem: Problem, *names: str) -> list[int]:
    all_names = [call.name for call in problem.calls]
    return [all_names.index(name) for name in names]


def with_class(step: MovableStep, **changes: object) -> MovableStep:
    return replace(step, classes={"L": replace(step.classes["L"], **changes)})


def with_slot(step: MovableStep, slot: int, **changes: object) -> MovableStep:
    slots = list(step.classes["L"].slots)
    slots[slot] = replace(slots[slot], **changes)
    return with_class(step, slots=tuple(slots))


def with_op(step: MovableStep, op: int, **changes: object) -> MovableStep:
    ops = list(step.classes["L"].ops)
    ops[op] = replace(ops[op], **changes)
    return with_class(step, ops=tuple(ops))


def test_saving_everything_changes_nothing():
    step = movable_step(3)
    problem = apply_moves(step, step.save_all(), recomputer(step))
    assert problem.calls == step.problem.calls
    assert problem.host_bytes == 0


def test_what_is_known_of_a_step_goes_with_it():
    step = movable_step(2)
    facts = move_rules.facts_of(step)
    assert move_rules.facts_of(step) is facts
    assert move_rules.facts_of(replace(step)) is not facts
    gone = weakref.ref(step)
    del step
    gc.collect()
    assert gone() is None


def test_an_offloaded_value_goes_and_comes_back_under_another_name():
    step = movable_step(2, bytes_per_s=64 * KIB)
    problem = applied(step, mode(c=OFFLOAD), mode())
    calls = named(problem)
    assert calls["offload.c0"].inputs == ("c0",)
    assert calls["wait.offload.c0"].waits_for == "offload.c0"
    assert calls["reload.c0"].outputs == ("reloaded.c0",)
    assert calls["reload.c0"].copy == calls["offload.c0"].copy
    assert calls["Lb@0"].inputs == ("g1", "x0", "a0", "b0", "reloaded.c0", "d0")
    assert calls["Lb@1"].inputs == ("g2", "x1", "a1", "b1", "c1", "d1")
    assert (calls["offload.c0"].layer_class, calls["offload.c0"].instance) == ("L", 0)
    assert problem.host_bytes == 32 * KIB


def test_several_readers_share_one_reload():
    step = movable_step(2)
    calls = [
        replace(call, inputs=("a0", *call.inputs[1:])) if call.name == "Hb" else call
        for call in step.problem.calls
    ]
    step = replace(step, problem=replace(step.problem, calls=tuple(calls)))
    problem = applied(step, mode(a=OFFLOAD), mode())
    assert [call.name for call in problem.calls if call.kind is CallKind.RELOAD] == ["reload.a0"]
    calls_by_name = named(problem)
    assert calls_by_name["Hb"].inputs[0] == "reloaded.a0"
    assert "reloaded.a0" in calls_by_name["Lb@0"].inputs
    reload_at, wait_at, first = order(problem, "reload.a0", "wait.reload.a0", "Hb")
    assert reload_at < wait_at == first - 1


def test_what_the_backward_does_not_read_is_not_moved():
    step = movable_step(2)
    calls = [
        replace(call, inputs=tuple("tangent" if v == "a0" else v for v in call.inputs))
        for call in step.problem.calls
    ]
    step = replace(step, problem=replace(step.problem, calls=tuple(calls)))
    problem = applied(step, mode(a=OFFLOAD), mode())
    assert [call.name for call in problem.calls] == [call.name for call in calls]
    assert problem.host_bytes == 0


def test_nothing_is_recomputed_that_the_backward_does_not_read():
    step = movable_step(1)
    calls = [
        replace(call, inputs=tuple("tangent" if v == "d0" else v for v in call.inputs))
        for call in step.problem.calls
    ]
    step = replace(step, problem=replace(step.problem, calls=tuple(calls)))
    assert applied(step, mode(d=RECOMPUTE)).calls == tuple(calls)


def test_a_recomputation_alone_keeps_its_input_on_the_move():
    """Only the recomputation reads x; it is reloaded for it all the same."""
    step = movable_step(1)
    calls = [
        replace(call, inputs=tuple("tangent" if v == "x0" else v for v in call.inputs))
        if call.name == "Lb@0"
        else call
        for call in step.problem.calls
    ]
    step = replace(step, problem=replace(step.problem, calls=tuple(calls)))
    problem = applied(step, mode(x=OFFLOAD, b=RECOMPUTE))
    assert named(problem)["recompute.L@0"].inputs == ("reloaded.x0",)
    wait, again = order(problem, "wait.reload.x0", "recompute.L@0")
    assert wait == again - 1


def test_an_input_leaves_right_after_the_call_that_made_it():
    step = movable_step(2)
    problem = applied(step, mode(x=OFFLOAD), mode(x=OFFLOAD))
    first, second = order(problem, "P", "offload.x0")
    assert second == first + 1
    first, second = order(problem, "L@0", "offload.x1")
    assert second == first + 1


def test_the_largest_copy_goes_first():
    step = movable_step(1)
    problem = applied(step, mode(a=OFFLOAD, b=OFFLOAD, c=OFFLOAD, d=OFFLOAD))
    copies = [call.name for call in problem.calls if call.kind is CallKind.OFFLOAD]
    assert copies == ["offload.c0", "offload.d0", "offload.a0", "offload.b0"]


def test_host_ranges_are_aligned_and_apart():
    step = movable_step(3)
    both = mode(rows=3, x=OFFLOAD, a=OFFLOAD, b=RECOMPUTE, c=RECOMPUTE, d=RECOMPUTE)
    problem = applied(step, both, both, both)
    copies = [call.copy for call in problem.calls if call.kind is CallKind.OFFLOAD]
    end = 0
    for copy in copies:
        assert copy is not None
        assert copy.host_offset == end
        assert copy.host_offset % 512 == 0
        end = -(-(copy.host_offset + copy.num_bytes) // 512) * 512
    assert problem.host_bytes == end


def test_a_mix_recomputes_the_first_rows_into_the_reloaded_buffer():
    step = movable_step(1)
    problem = applied(step, mode(rows=2, b=RECOMPUTE, c=RECOMPUTE))
    calls = named(problem)
    copy = calls["offload.c0"].copy
    assert copy is not None
    assert (copy.start_bytes, copy.end_bytes) == (2 * 4 * KIB, NUM_ROWS * 4 * KIB)
    again = calls["recompute.L@0"]
    assert again.region == "L.recompute.2.3.rows2"
    assert again.outputs == ("recomputed.b0", "recomputed.c0")
    assert again.into == (
        Into(buffer=1, value="reloaded.b0", offset_bytes=0),
        Into(buffer=2, value="reloaded.c0", offset_bytes=0),
    )
    assert calls["Lb@0"].inputs == ("g1", "x0", "a0", "reloaded.b0", "reloaded.c0", "d0")
    reload_at, again_at, wait = order(problem, "reload.c0", "recompute.L@0", "wait.reload.c0")
    assert reload_at < again_at < wait


def test_a_mix_of_all_rows_copies_nothing():
    step = movable_step(1, token_granule=3)
    problem = applied(step, mode(rows=NUM_ROWS, b=RECOMPUTE))
    assert problem == applied(step, mode(b=RECOMPUTE))


def test_a_mix_needs_results_in_buffers_of_their_own():
    step = movable_step(1)
    recompute = recomputer(step)

    def shared(key: RecomputeKey):
        region = recompute(key)
        outputs = (RegionOutput(storage=Storage.ARENA, index=1),) * len(key.slots)
        return replace(region, profile=replace(region.profile, outputs=outputs))

    moves = Moves(modes=(mode(rows=2, b=RECOMPUTE, c=RECOMPUTE),))
    with pytest.raises(InvalidPlan, match=r"c0 in an arena buffer of its own.*Recompute all rows"):
        apply_moves(step, moves, shared)


def test_a_copy_lasts_for_so_many_layers():
    step = movable_step(4)
    modes = (mode(c=OFFLOAD),) * 4
    for layers, before, after in ((1, "L@2", "Lb@2"), (2, "L@3", "Lb@3"), (3, "Hb", "Hb")):
        problem = applied(step, *modes, schedule=Schedule(layers=layers))
        (wait,) = order(problem, "wait.offload.c0")
        runs = (call.name for call in problem.calls[wait:] if call.kind is CallKind.RUN)
        assert next(runs) == before
        begin, backward, reads = order(problem, "reload.c0", after, "Lb@0")
        assert begin < reads
        assert begin < backward if after == "Hb" else begin > backward


def test_nothing_runs_beside_a_copy_that_lasts_for_no_layer():
    problem = applied(movable_step(2), *(mode(c=OFFLOAD),) * 2, schedule=Schedule(layers=0))
    for kind in ("offload", "reload"):
        begin, wait = order(problem, f"{kind}.c0", f"wait.{kind}.c0")
        assert wait == begin + 1


def test_writes_in_the_forward_are_copied_too():
    """A later call writes into the value: it leaves after that call."""
    step = movable_step(2)
    calls = list(step.problem.calls)
    at = [call.name for call in calls].index("L@1")
    calls[at] = replace(calls[at], into=(Into(buffer=0, value="a0", offset_bytes=0),))
    step = replace(step, problem=replace(step.problem, calls=tuple(calls)))
    problem = applied(step, mode(a=OFFLOAD), mode())
    first, second = order(problem, "L@1", "offload.a0")
    assert first < second


def test_writes_in_the_backward_go_to_the_reloaded_value():
    step = movable_step(2)
    calls = list(step.problem.calls)
    at = [call.name for call in calls].index("Hb")
    calls[at] = replace(calls[at], into=(Into(buffer=0, value="a0", offset_bytes=0),))
    step = replace(step, problem=replace(step.problem, calls=tuple(calls)))
    problem = applied(step, mode(a=OFFLOAD), mode())
    assert named(problem)["Hb"].into[0].value == "reloaded.a0"
    wait, backward = order(problem, "wait.reload.a0", "Hb")
    assert wait < backward


CANNOT = {
    "too few modes": (
        lambda s: s,
        (),
        "expected a mode for each of 1 layers, got 0",
    ),
    "too few actions": (
        lambda s: s,
        (Mode(actions=(SAVE,)),),
        "expected an action for each of 5 slots, got 1",
    ),
    "offload": (
        lambda s: with_slot(s, A, can_offload=False),
        (mode(a=OFFLOAD),),
        r"slot 1 \(a0\) cannot be offloaded",
    ),
    "recompute": (lambda s: s, (mode(a=RECOMPUTE),), r"slot 1 \(a0\) cannot be recomputed"),
    "no operator": (
        lambda s: with_op(s, D, slot=None),
        (mode(d=RECOMPUTE),),
        r"no operator recomputes slot 4 \(d0\)",
    ),
    "closure": (
        lambda s: with_op(with_op(s, C, slot=None, can_recompute=False), C, name="dropout"),
        (mode(d=RECOMPUTE),),
        "recomputing d0 runs dropout, which cannot be recomputed",
    ),
    "rows of nothing": (lambda s: s, (mode(rows=4),), "no slot is to RECOMPUTE"),
    "one row": (
        lambda s: with_slot(s, B, num_rows=1),
        (mode(rows=4, b=RECOMPUTE, c=RECOMPUTE),),
        r"number of rows above 1, got \[1, 8\] of b0, c0",
    ),
    "granule": (
        lambda s: replace(s, token_granule=4),
        (mode(rows=2, b=RECOMPUTE),),
        "expected recompute_rows in multiples of 4 up to 8, got 2",
    ),
    "too many rows": (
        lambda s: s,
        (mode(rows=9, b=RECOMPUTE),),
        "expected recompute_rows in multiples of 1 up to 8, got 9",
    ),
    "no rows": (lambda s: s, (mode(rows=0, b=RECOMPUTE),), "up to 8, got 0"),
    "rows that stay": (
        lambda s: with_slot(s, B, can_offload=False),
        (mode(rows=4, b=RECOMPUTE),),
        "cannot be offloaded in part",
    ),
    "rows that mix": (
        lambda s: with_op(s, C, row_wise=False),
        (mode(rows=4, c=RECOMPUTE),),
        "for 4 rows runs op_c, which mixes rows",
    ),
}


@pytest.mark.parametrize("what", CANNOT)
def test_modes_that_cannot_be(what):
    change, modes, message = CANNOT[what]
    step = change(movable_step(1))
    with pytest.raises(InvalidPlan, match=message):
        require_valid_modes(step, Moves(modes=modes))
    with pytest.raises(InvalidPlan, match=message):
        applied(step, *modes)


def test_an_early_reader_forbids_recomputation():
    step = movable_step(2)
    calls = [
        replace(call, inputs=("d0", *call.inputs[1:])) if call.name == "Hb" else call
        for call in step.problem.calls
    ]
    step = replace(step, problem=replace(step.problem, calls=tuple(calls)))
    first, second = step.layers
    assert not recomputable(step, first, D)
    assert recomputable(step, first, C)
    assert recomputable(step, second, D)
    assert not recomputable(step, second, A)
    with pytest.raises(InvalidPlan, match=r"d0 cannot be recomputed before Lb@0, since Hb reads"):
        applied(step, mode(d=RECOMPUTE), mode())


def test_every_region_needs_seconds():
    step = movable_step(1)
    step = replace(step, costs=replace(step.costs, region_s={"P": 1.0}))
    with pytest.raises(InputError, match="region L of L@0 has no seconds; add it to region_s"):
        applied(step, mode(c=OFFLOAD))


def test_two_layers_do_not_move_one_value():
    step = movable_step(2)
    first, second = step.layers
    step = replace(step, layers=(first, replace(second, values=("x1", "a0", "b1", "c1", "d1"))))
    with pytest.raises(InvalidPlan, match="L@1 and L@0 both move a0; SAVE it in one of them"):
        applied(step, mode(a=OFFLOAD), mode(a=OFFLOAD))


def test_what_is_not_in_the_arena_is_not_copied():
    step = movable_step(1)
    region = step.problem.regions["P"]
    outside = replace(region, outputs=(RegionOutput(storage=Storage.OUTSIDE, size_bytes=8 * KIB),))
    step = replace(
        step,
        problem=replace(step.problem, regions={**step.problem.regions, "P": outside}),
    )
    with pytest.raises(InvalidPlan, match="x0 cannot be copied, since no call of the forward"):
        applied(step, mode(x=OFFLOAD))


def test_a_recomputation_reads_nothing_that_is_made_after_it():
    step = movable_step(2)
    recompute = recomputer(step)

    def from_own_result(key: RecomputeKey):
        return replace(recompute(key), inputs=(RegionInput(slot=B),))

    with pytest.raises(
        InvalidPlan, match="L@0 is recomputed from b0, which is not recomputed before"
    ):
        apply_moves(step, Moves(modes=(mode(b=RECOMPUTE), mode())), from_own_result)


def test_closures_end_where_a_slot_is_at_hand():
    cls = movable_step(1).classes["L"]
    assert recompute_closure(cls, (D,), (X, A, B, C)) == (D,)
    assert recompute_closure(cls, (D,), (X, A, B)) == (C, D)
    assert recompute_closure(cls, (D,), (X,)) == (B, C, D)
    assert recompute_closure(cls, (C, D), (X, A, B, C)) == (C, D)
    assert recompute_closure(cls, (D,), ()) == (X, B, C, D)
    assert recompute_closure(cls, (), (X,)) == ()


def test_a_long_closure_runs_shared_operators_once():
    ops = [LayerOp(name="x", seconds=0.0, slot=0, can_recompute=False)]
    for at in range(1, 3000):
        ops.append(LayerOp(name=f"o{at}", seconds=1.0, inputs=(at - 1, 0)))
    ops[-1] = replace(ops[-1], slot=1)
    cls = replace(movable_step(1).classes["L"], ops=tuple(ops))
    assert recompute_closure(cls, (1,), (0,)) == tuple(range(1, 3000))


def test_seconds_of_recomputing_are_those_of_the_closure():
    step = movable_step(1)

    def key(*slots: int, rows: int | None = None) -> RecomputeKey:
        return RecomputeKey(class_key="L", slots=slots, rows=rows)

    assert recompute_seconds(step, key(D)) == pytest.approx(0.05)
    assert recompute_seconds(step, key(B, C, D)) == pytest.approx(0.4)
    assert recompute_seconds(step, key(B, C, D, rows=2)) == pytest.approx(0.1)
    assert recompute_seconds(step, key()) == 0


@pytest.mark.parametrize("actions", [{"c": OFFLOAD}, {"x": OFFLOAD, "c": RECOMPUTE}])
def test_moved_steps_need_less_and_pass_the_checker(actions):
    step = movable_step(4, bytes_per_s=64 * KIB)
    problem = applied(step, *(mode(**actions),) * 4)
    assert place_step(problem).peak_bytes < place_step(step.problem).peak_bytes


def test_a_step_without_a_backward_moves_nothing():
    step = movable_step(1)
    forward = tuple(call for call in step.problem.calls if call.phase is Phase.FORWARD)
    backward = call("Lb@0", "Pb", Phase.BACKWARD, ("tangent",), ("dw",))
    step = replace(step, problem=replace(step.problem, calls=(*forward, backward)))
    assert applied(step, mode(c=OFFLOAD, b=RECOMPUTE)).calls == (*forward, backward)


def test_slots_that_are_read_by_different_calls_are_recomputed_apart():
    """In the order of their readers; together where one is made from another: x -> b -> c -> d."""
    cls = movable_step(1).classes["L"]
    reads = {"x0": 2, "a0": 0, "b0": 2, "c0": 1, "d0": 0}
    assert [slot.name for slot in cls.slots] == list(reads)
    slots = tuple(replace(slot, first_read=reads[slot.name]) for slot in cls.slots)
    later = replace(cls, slots=slots, parts={})

    def parts(**actions: Action) -> list[tuple[int, ...]]:
        return [key.slots for key in recompute_keys(later, mode(**actions))]

    assert parts(b=RECOMPUTE, d=RECOMPUTE) == [(4,), (2,)]
    assert parts(a=RECOMPUTE, b=RECOMPUTE, d=RECOMPUTE) == [(1, 4), (2,)]
    assert parts(b=RECOMPUTE, c=RECOMPUTE) == [(2, 3)]
    assert parts(b=RECOMPUTE, c=RECOMPUTE, d=RECOMPUTE) == [(2, 3, 4)]
    assert parts(x=SAVE) == []


def test_only_what_shares_an_operator_is_made_before_it_is_read():
    """Of b and a, which are read later, a is made from nothing that c and d are made from."""
    cls = movable_step(1).classes["L"]
    reads = (3, 2, 2, 0, 0)
    slots = tuple(
        replace(slot, first_read=first) for slot, first in zip(cls.slots, reads, strict=True)
    )
    later = replace(cls, slots=slots, parts={})
    everything = mode(a=RECOMPUTE, b=RECOMPUTE, c=RECOMPUTE, d=RECOMPUTE)
    assert [key.slots for key in recompute_keys(later, everything)] == [(2, 3, 4), (1,)]


def test_what_takes_no_time_is_made_twice_and_need_not_exist_in_between():
    """x -> b -> c: b is read last and takes no time, c is read first."""
    cls = movable_step(1).classes["L"]
    reads = {"x0": 2, "a0": 0, "b0": 2, "c0": 0, "d0": 0}
    slots = tuple(replace(slot, first_read=reads[slot.name]) for slot in cls.slots)

    def keys(b_s: float, x_read: int = 2) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        ops = tuple(replace(op, seconds=b_s) if op.name == "op_b" else op for op in cls.ops)
        first = (replace(slots[0], first_read=x_read), *slots[1:])
        own = replace(cls, slots=first, ops=ops, parts={})
        found = recompute_keys(own, mode(b=RECOMPUTE, c=RECOMPUTE))
        return [(key.slots, key.passing) for key in found]

    assert keys(0.001) == [((3,), (2,)), ((2,), ())]
    assert keys(0.5) == [((2, 3), ())]
    assert keys(0.001, x_read=0) == [((2, 3), ())], "x would have to stay for b, and is as large"


def test_what_takes_time_is_made_once_and_what_is_made_from_it_again():
    """x -> b -> c -> d: d is read first, b takes time, and c takes none, from b."""
    cls = movable_step(1).classes["L"]
    reads = {"x0": 2, "a0": 0, "b0": 2, "c0": 2, "d0": 0}
    slots = tuple(replace(slot, first_read=reads[slot.name]) for slot in cls.slots)

    def keys(**seconds: float) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        ops = tuple(replace(op, seconds=seconds.get(op.name, op.seconds)) for op in cls.ops)
        own = replace(cls, slots=slots, ops=ops, parts={})
        found = recompute_keys(own, mode(b=RECOMPUTE, c=RECOMPUTE, d=RECOMPUTE))
        return [(key.slots, key.passing) for key in found]

    assert keys(op_b=0.5, op_c=0.001) == [((2, 4), (3,)), ((3,), ())]
    assert keys(op_b=0.5, op_c=0.5) == [((2, 3, 4), ())]
    assert keys(op_b=0.001, op_c=0.001) == [((4,), (2, 3)), ((2, 3), ())]


def test_what_a_region_reads_is_made_before_it_though_its_parts_are_joined_later():
    """e, read last, joins d and g, which are read first and later: g was to be made from b."""
    read = {"x": 0, "b": 4, "c": 3, "e": 7, "g": 4, "d": 0}
    slots = tuple(
        Slot(
            name=name,
            size_bytes=4096 if name == "g" else 1024,
            first_read=first,
            can_recompute=name != "x",
            is_input=name == "x",
        )
        for name, first in read.items()
    )
    ops = (
        LayerOp(name="x", seconds=0.0, slot=0, can_recompute=False),
        LayerOp(name="f", seconds=0.0, inputs=(0,)),
        LayerOp(name="b", seconds=1.0, inputs=(0,), slot=1),
        LayerOp(name="c", seconds=0.0, inputs=(2,), slot=2),
        LayerOp(name="e", seconds=0.0, inputs=(1,), slot=3),
        LayerOp(name="g", seconds=0.0, inputs=(1, 3), slot=4),
        LayerOp(name="d", seconds=1.0, inputs=(4,), slot=5),
    )
    cls = LayerClass(key="L", slots=slots, ops=ops)
    actions = (Action.SAVE, *[Action.RECOMPUTE] * 5)
    (key,) = recompute_keys(cls, Mode(actions=actions))
    assert key.slots == (1, 2, 3, 4, 5)


def test_a_copy_of_what_joins_slots_is_offered_though_they_could_be_made_from_it():
    """As above; c is large, and neither it nor b would stay if b were copied."""
    cls = movable_step(1).classes["L"]
    reads, seconds = (2, 0, 2, 2, 0), {"op_b": 0.5, "op_c": 0.001}
    slots = [
        replace(
            slot, first_read=first, size_bytes=slot.size_bytes * (2 if slot.name == "c0" else 1)
        )
        for slot, first in zip(cls.slots, reads, strict=True)
    ]
    ops = tuple(replace(op, seconds=seconds.get(op.name, op.seconds)) for op in cls.ops)
    own = replace(cls, slots=tuple(slots), ops=ops, parts={})
    assert [*joined_parts(own, (2, 3, 4))] == [(2, 3, 4)]
    assert apart(own, frozenset((2, 3, 4)), hideable=slots[2].size_bytes) == {3, 4}
