"""Steps that move bytes while they compute: right numbers, and nothing held, whatever happens."""

import contextlib
import dataclasses
import os
import threading
import time
from typing import get_args

import pytest
import torch
from memo_runtime import copies, instructions
from memo_runtime.arena import FrameView, arena_of
from memo_runtime.copies import CopyError, Lane
from memo_runtime.current import current
from memo_runtime.host_store import HostStoreError
from memo_runtime.instructions import Instruction, StartOffload, StartReload, WaitCopy
from memo_runtime.leases import StepCounters, leases
from memo_runtime.run_step import StepError, StepPlan, run_backward

from tests.steps.moving import (
    BACKWARD,
    BACKWARD_OVER_B,
    CPU,
    DOUBLE,
    FORWARD,
    NUM,
    NUM_BYTES,
    RELOAD,
    SCHEDULES,
    SHIFT,
    START_OFFLOAD,
    START_RELOAD,
    TIMES_A,
    TIMES_B,
    TOTAL,
    WAIT_OFFLOAD,
    WAIT_RELOAD,
    backward,
    call,
    forward,
    gradient_of,
    is_right,
    moved,
    multiply,
    nothing_is_held,
    shift,
    step,
    values,
    with_run,
)

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def _frames_go_back():
    yield
    assert not any(slab.leased for slab in arena_of(CPU)._slabs)
    assert not any(store.leased for store in arena_of(CPU).host.stores)


def waited_in_backward(**options) -> StepPlan:
    """The step whose offload ends in the backward; ``a`` keeps its bytes until then."""
    keep_a = dataclasses.replace(TOTAL, table=4)
    return step(
        (DOUBLE, START_OFFLOAD, SHIFT, keep_a),
        (dataclasses.replace(WAIT_OFFLOAD, dying=()), *BACKWARD),
        **options,
    )


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("make", [step, waited_in_backward])
def test_what_went_to_the_host_comes_back(make, schedule, poison):
    plan = make(schedule=schedule, poison=poison)
    for seed in range(3):
        assert is_right(plan, seed)
        assert nothing_is_held(plan)


def test_what_the_backward_does_not_use_goes_back_before_it_begins(monkeypatch):
    """Autograd makes gradients of the results between the two halves."""
    dropped = []

    def noted(tail):
        dropped.append((tail.storage_offset(), tail.numel()))

    monkeypatch.setattr(instructions, "poison", noted)
    plan = step((DOUBLE, SHIFT, TOTAL), (TIMES_B,), host_bytes=0, poison=True)
    plan.forward.resident_bytes = 2 * NUM_BYTES
    forward(plan, values(0))
    assert dropped == [(2 * NUM_BYTES, 2 * NUM_BYTES)]


def test_a_reserved_frame_stays_while_other_plans_go():
    plan = step()
    plan.reserve()
    arena = arena_of(CPU)
    (slab,) = (slab for slab in arena._slabs if plan.key in slab._tables)
    arena.forget(step().key)
    assert slab in arena._slabs
    arena.forget(plan.key)
    assert plan.key not in slab._tables


def test_a_throttled_step_stalls_and_is_right():
    counted: list[StepCounters] = []
    assert is_right(step(throttle_bytes_per_s=20_000.0, on_step_end=counted.append))
    assert counted[0].stall_s > NUM_BYTES / 20_000.0
    assert is_right(step(schedule="late", throttle_bytes_per_s=1e6))


@pytest.mark.parametrize("wait", [WAIT_OFFLOAD, WAIT_RELOAD])
def test_a_missing_wait_shows_under_the_late_schedule(wait):
    """The schedule must be able to fail: without a wait the numbers are wrong."""
    plan = step(
        tuple(call for call in FORWARD if call is not wait),
        tuple(call for call in BACKWARD if call is not wait),
        schedule="late",
        poison=True,
    )
    x, g = values(0), values(1)
    _, handle = forward(plan, x)
    assert bool(backward(plan, handle, g).isnan().all())


def test_missing_bytes_show_as_nan_in_poison_mode():
    """Half of the value was offloaded and reloaded; the other half must not look like numbers."""
    half = NUM_BYTES // 2
    plan = step(
        (DOUBLE, StartOffload(copy=moved(0, 0, 0, half), input=1), SHIFT, WAIT_OFFLOAD, TOTAL),
        (
            TIMES_B,
            StartReload(copy=moved(RELOAD, NUM_BYTES, 0, half), table=1, output=3, offload=0),
            WAIT_RELOAD,
            TIMES_A,
        ),
        poison=True,
    )
    x, g = values(0), values(1)
    _, handle = forward(plan, x)
    gradient = backward(plan, handle, g)
    assert torch.equal(gradient[: NUM // 2], gradient_of(x, g)[: NUM // 2])
    assert bool(gradient[NUM // 2 :].isnan().all())


def test_a_wait_poisons_what_dies_there():
    seen = []

    def look(args):
        seen.append(current.views[0].isnan().all().item())
        current.views[0].copy_(args[0])
        return [current.views[0].sum()]

    assert is_right(step((*FORWARD[:-1], with_run(TOTAL, look)), poison=True))
    assert seen == [True]


def recomputed_in_part(**options) -> StepPlan:
    """The first rows of ``a`` are made again into the reloaded buffer, the rest comes back."""
    split = NUM // 4

    def again(args):
        torch.mul(args[0][:split], 2, out=current.views[0])
        return [current.views[0]]

    part = FrameView(offset_bytes=2 * NUM_BYTES, dtype=torch.float32, size=(split,), stride=(1,))
    plan = step(
        (
            DOUBLE,
            StartOffload(copy=moved(0, 0, 4 * split), input=1),
            SHIFT,
            WAIT_OFFLOAD,
            TOTAL,
        ),
        (
            StartReload(
                copy=moved(RELOAD, 2 * NUM_BYTES, 4 * split),
                table=3,
                output=3,
                offload=0,
            ),
            call(again, 6, (6,), (7,), unread=(7,), recomputed_bytes=4 * split),
            TIMES_B,
            WAIT_RELOAD,
            TIMES_A,
        ),
        **options,
    )
    plan.table = [*plan.table, [part]]
    plan.backward.num_registers = 8
    plan.backward.arguments = (0, 1, 6)
    return plan


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rows_are_recomputed_into_a_value_that_is_being_reloaded(schedule):
    counted: list[StepCounters] = []
    plan = recomputed_in_part(schedule=schedule, poison=True, on_step_end=counted.append)
    x, g = values(0), values(1)
    _, handle = forward(plan, x)
    (gradient,) = run_backward(plan, [handle, g, x], keep_graph=False)
    assert torch.equal(gradient, gradient_of(x, g))
    assert counted[0].recomputed_bytes == NUM_BYTES // 4
    assert counted[0].offloaded_bytes == NUM_BYTES * 3 // 4


def test_counters_are_of_the_whole_step_and_reach_the_callback():
    counted: list[StepCounters] = []
    assert is_right(step(on_step_end=counted.append, schedule="serial"))
    (last,) = counted
    assert last.offloaded_bytes == NUM_BYTES
    assert last.recomputed_bytes == 0
    assert last.stall_s > 0


def test_copies_run_while_a_region_runs(monkeypatch):
    """The copy cannot end before the region has begun, nor the region before the copy ended."""
    events, begun, copied = [], threading.Event(), threading.Event()
    original = copies.move_bytes

    def move(destination, source, *link):
        assert begun.wait(WAIT_S)
        original(destination, source, *link)
        events.append("copied")
        copied.set()

    def slow(run):
        def inside(args):
            events.append("region begins")
            begun.set()
            assert copied.wait(WAIT_S)
            events.append("region ends")
            begun.clear()
            copied.clear()
            return run(args)

        return inside

    monkeypatch.setattr(copies, "move_bytes", move)
    plan = step(
        (DOUBLE, START_OFFLOAD, with_run(SHIFT, slow(shift)), WAIT_OFFLOAD, TOTAL),
        (START_RELOAD, with_run(TIMES_B, slow(multiply)), WAIT_RELOAD, TIMES_A),
        throttle_bytes_per_s=1e6,
    )
    assert is_right(plan)
    assert events == ["region begins", "copied", "region ends"] * 2


def test_serial_copies_end_before_the_next_region(monkeypatch):
    events = []
    original = copies.move_bytes

    def move(destination, source, *link):
        original(destination, source, *link)
        events.append("copied")

    def seen(run):
        def inside(args):
            events.append("region")
            return run(args)

        return inside

    monkeypatch.setattr(copies, "move_bytes", move)
    plan = step(
        (DOUBLE, START_OFFLOAD, with_run(SHIFT, seen(shift)), WAIT_OFFLOAD, TOTAL),
        (START_RELOAD, with_run(TIMES_B, seen(multiply)), WAIT_RELOAD, TIMES_A),
        schedule="serial",
        throttle_bytes_per_s=100_000.0,
    )
    assert is_right(plan)
    assert events == ["copied", "region"] * 2


def fails_at(monkeypatch, number: int, error: type[BaseException]) -> None:
    """Instruction ``number`` of the next step raises ``error`` when it has been executed."""
    count = 0

    def failing(execute):
        def inside(instruction, running):
            nonlocal count
            count += 1
            execute(instruction, running)
            if count == number + 1:
                raise error(f"injected after instruction {number}")

        return inside

    for kind in get_args(Instruction):
        monkeypatch.setattr(kind, "execute", failing(kind.execute))


@pytest.mark.parametrize("keep_graph", [False, True])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("number", range(len(FORWARD) + len(BACKWARD)))
def test_the_step_after_an_exception_at_any_instruction_is_right(
    number, error, keep_graph, monkeypatch
):
    plan = step(throttle_bytes_per_s=1e6, poison=True)
    with monkeypatch.context() as patched:
        fails_at(patched, number, error)
        with pytest.raises(error, match=f"injected after instruction {number}"):  # noqa: PT012
            _, handle = forward(plan, values(0))
            backward(plan, handle, values(1), keep_graph=keep_graph)
    if keep_graph and number >= len(FORWARD):
        assert torch.equal(backward(plan, handle, values(1)), gradient_of(values(0), values(1)))
    assert nothing_is_held(plan)
    assert current.views == ()
    assert is_right(plan, 5)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("fails", ["d2h", "h2d"])
def test_the_step_after_a_failed_copy_is_right(fails, schedule, monkeypatch):
    plan = step(schedule=schedule)
    host = arena_of(CPU).host

    def fail(destination, source, *link):
        to_host = destination.data_ptr() == host.stores[-1].bytes(1).data_ptr()
        if to_host == (fails == "d2h"):
            raise OSError("the link is down")
        original(destination, source, *link)

    original = copies.move_bytes
    host.stores.clear()
    plan.reserve()
    with monkeypatch.context() as patched:
        patched.setattr(copies, "move_bytes", fail)
        with pytest.raises(CopyError, match="the link is down"):
            is_right(plan)
    assert nothing_is_held(plan)
    assert is_right(plan)


def test_an_interrupt_while_a_copy_is_issued_leaves_nothing_in_flight(monkeypatch):
    """The ticket is on the lease before the copy begins, so that the release waits for it."""
    plan = step()
    ended = threading.Event()
    original = copies.CopyEngine.begin

    def slow_move(destination, source, *link):
        ended.wait(0.1)
        ended.set()

    def begin(self, ticket):
        original(self, ticket)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(copies, "move_bytes", slow_move)
        patched.setattr(copies.CopyEngine, "begin", begin)
        with pytest.raises(KeyboardInterrupt):
            forward(plan, values(0))
        assert ended.is_set()
    assert nothing_is_held(plan)
    assert is_right(plan)


def test_a_dropped_forward_gives_its_frames_back_after_its_copies(monkeypatch):
    gate, waiting = threading.Event(), threading.Event()
    original = copies.move_bytes

    def held(destination, source, *link):
        waiting.set()
        assert gate.wait(WAIT_S)
        original(destination, source, *link)

    monkeypatch.setattr(copies, "move_bytes", held)
    plan = waited_in_backward()
    results = list(forward(plan, values(0)))
    lease = leases.find(results[1])
    assert lease is not None
    assert waiting.wait(WAIT_S)
    thread = threading.Thread(target=results.clear)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    assert lease.host.leased
    assert lease.slab.leased
    gate.set()
    thread.join(WAIT_S)
    assert nothing_is_held(plan)
    assert is_right(plan)


def test_a_forward_dropped_on_a_copying_thread_does_not_wait_for_itself(monkeypatch):
    """The collector runs on any thread, also on the one that makes the copy."""
    plan = waited_in_backward()
    results, ended = [], threading.Event()
    ready = threading.Event()
    original = copies.move_bytes

    def move(destination, source, *link):
        original(destination, source, *link)
        assert ready.wait(WAIT_S)
        results.clear()

    monkeypatch.setattr(copies, "move_bytes", move)
    results += forward(plan, values(0))
    lease = leases.find(results[1])
    assert lease is not None
    at_end = contextlib.ExitStack()
    at_end.callback(ended.set)  # runs last
    at_end.push(lease.at_end)
    lease.at_end = at_end
    ready.set()
    assert ended.wait(WAIT_S)
    assert nothing_is_held(plan)
    monkeypatch.undo()
    assert is_right(plan)


@pytest.mark.parametrize("max_inflight", [1, 2])
@pytest.mark.parametrize("first", [0, 1])
def test_two_live_forwards_have_host_frames_of_their_own(max_inflight, first):
    warned = []
    plan = step(max_inflight=max_inflight, on_unplanned=lambda: warned.append(1), poison=True)
    xs, gs = [values(0), values(1)], [values(2), values(3)]
    handles = [forward(plan, x)[1] for x in xs]
    hosts = [leases.find(handle).host for handle in handles]
    assert hosts[0] is not hosts[1]
    assert len(warned) == 2 - max_inflight
    for at in (first, 1 - first):
        assert torch.equal(backward(plan, handles[at], gs[at]), gradient_of(xs[at], gs[at]))
    assert nothing_is_held(plan)


def test_the_host_frame_of_an_unplanned_step_goes_with_it():
    plan = step(max_inflight=0)
    _, handle = forward(plan, values(0))
    host = leases.find(handle).host
    assert host not in arena_of(CPU).host.stores
    del handle
    with pytest.raises(AssertionError, match="closed"):
        host.bytes(1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("make", [step, waited_in_backward])
def test_a_retained_graph_runs_again(make, schedule):
    plan = make(schedule=schedule)
    x, g = values(0), values(1)
    _, handle = forward(plan, x)
    for more in (g, 2 * g):
        assert torch.equal(backward(plan, handle, more, keep_graph=True), gradient_of(x, more))
    assert torch.equal(backward(plan, handle, g), gradient_of(x, g))
    with pytest.raises(StepError, match="backward ran before without"):
        backward(plan, handle, g)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_retained_graph_gets_its_saved_values_back(schedule):
    plan = step(backward=BACKWARD_OVER_B, schedule=schedule, poison=True)
    x, g = values(0), values(1)
    _, handle = forward(plan, x)
    for keep_graph in (True, True, False):
        assert torch.equal(backward(plan, handle, g, keep_graph=keep_graph), gradient_of(x, g))


def test_saved_values_come_back_after_the_copies_of_a_failed_backward(monkeypatch):
    """A reload that is still in flight must not land on what has been restored."""
    original = copies.move_bytes

    def slow(destination, source, *link):
        time.sleep(0.05)
        original(destination, source, *link)

    monkeypatch.setattr(copies, "move_bytes", slow)
    plan = step(backward=BACKWARD_OVER_B)
    x, g = values(0), values(1)
    _, handle = forward(plan, x)
    with monkeypatch.context() as patched:
        fails_at(patched, 1, ValueError)
        with pytest.raises(ValueError, match="injected after instruction 1"):
            backward(plan, handle, g, keep_graph=True)
    leases.find(handle).settle()
    assert torch.equal(backward(plan, handle, g), gradient_of(x, g))


def test_threads_step_beside_each_other():
    plan = step(max_inflight=2, on_unplanned=lambda: None, poison=True)
    wrong: list[int] = []

    def train(number: int) -> None:
        wrong.extend(
            seed for seed in range(10 * number, 10 * number + 8) if not is_right(plan, seed)
        )

    threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert wrong == []
    assert nothing_is_held(plan)


def in_child(run) -> int:
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            run()
            os._exit(0)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_parent_and_forked_child_both_step():
    plan = step()
    assert is_right(plan)

    def run() -> None:
        assert all(is_right(plan, seed) for seed in range(5))

    x, g = values(7), values(8)
    _, handle = forward(plan, x)
    assert in_child(run) == 0
    assert torch.equal(backward(plan, handle, g), gradient_of(x, g))


def test_a_forked_child_cannot_run_its_parents_backward():
    plan = step()
    _, handle = forward(plan, values(0))

    def run() -> None:
        with pytest.raises(StepError, match="forked process cannot run the backward"):
            backward(plan, handle, values(1))

    assert in_child(run) == 0


def test_a_file_holds_the_host_frame(tmp_path):
    plan = step(host_store=f"file:{tmp_path}")
    assert is_right(plan)
    assert any(store.kind == f"file:{tmp_path}" for store in arena_of(CPU).host.stores)


def test_reserving_reports_a_refusal_before_the_first_step():
    with pytest.raises(HostStoreError, match="Lower host_budget"):
        step(host_bytes=1 << 47).reserve()
    plan = step()
    plan.reserve()
    assert nothing_is_held(plan)


@pytest.mark.parametrize("max_inflight", [0, 1])
def test_a_refused_host_frame_leaves_nothing_held(max_inflight):
    plan = step(host_bytes=1 << 47, max_inflight=max_inflight)
    with pytest.raises(HostStoreError):
        forward(plan, values(0))
    assert nothing_is_held(plan)


def test_retiring_a_plan_frees_its_host_frame():
    plan = step(host_bytes=123 * NUM_BYTES)
    assert is_right(plan)
    assert any(plan.key in store.plans for store in arena_of(CPU).host.stores)
    arena_of(CPU).forget(plan.key)
    assert not any(plan.key in store.plans for store in arena_of(CPU).host.stores)


def test_a_plan_that_moves_without_a_host_frame_is_an_error():
    with pytest.raises(AssertionError, match="no host frame"):
        forward(step(host_bytes=0), values(0))


def test_waiting_for_a_copy_that_was_never_issued_is_an_error():
    plan = step((DOUBLE, WaitCopy(number=9), SHIFT, TOTAL))
    with pytest.raises(AssertionError, match="copy 9 was never issued"):
        forward(plan, values(0))


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="'eager' is not a valid CopySchedule"):
        forward(step(schedule="eager"), values(0))


def test_lanes_of_a_step_go_the_right_way(monkeypatch):
    lanes = []
    original = copies.CopyEngine.begin

    def begin(self, ticket):
        lanes.append(ticket.lane)
        original(self, ticket)

    monkeypatch.setattr(copies.CopyEngine, "begin", begin)
    assert is_right(step())
    assert lanes == [Lane.D2H, Lane.H2D]
