"""The copy engine: what is copied when, who waits, what a failure does."""

import contextlib
import os
import threading
import time

import pytest
import torch
from memo_runtime import copies
from memo_runtime.copies import (
    CopyEngine,
    CopyError,
    CopySchedule,
    Lane,
    Ticket,
    _stop_threads,
    engine_of,
    move_bytes,
)

CPU = torch.device("cpu")
WAIT_S = 20.0


@pytest.fixture(params=list(CopySchedule), ids=lambda schedule: schedule.value)
def engine(request):
    engine = CopyEngine(CPU, request.param)
    yield engine
    _stop_threads()


@pytest.fixture
def normal():
    engine = CopyEngine(CPU)
    yield engine
    _stop_threads()


def ones(size: int = 4096) -> torch.Tensor:
    return torch.ones(size, dtype=torch.uint8)


def zeros(size: int = 4096) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


@pytest.mark.parametrize("lane", Lane)
def test_a_copy_is_there_after_its_wait(engine, lane):
    source, destination = torch.arange(251, dtype=torch.uint8), zeros(251)
    ticket = engine.issue(lane, destination, source)
    assert engine.wait(ticket) >= 0
    assert torch.equal(destination, source)
    assert ticket.num_bytes == 251


def test_a_second_wait_does_nothing(engine):
    source, destination = ones(), zeros()
    ticket = engine.issue(Lane.D2H, destination, source)
    engine.wait(ticket)
    destination.zero_()
    assert engine.wait(ticket) == 0.0
    assert not destination.any()


def test_early_copies_at_issue_and_late_at_wait():
    results = {}
    for schedule in (CopySchedule.EARLY, CopySchedule.LATE):
        engine, source, destination = CopyEngine(CPU, schedule), ones(), zeros()
        ticket = engine.issue(Lane.D2H, destination, source)
        source.fill_(7)
        engine.wait(ticket)
        results[schedule] = int(destination[0])
    assert results == {CopySchedule.EARLY: 1, CopySchedule.LATE: 7}


def test_serial_has_copied_when_issue_returns():
    engine = CopyEngine(CPU, CopySchedule.SERIAL)
    destination = zeros()
    ticket = engine.issue(Lane.H2D, destination, ones())
    assert bool(destination.all())
    assert engine.wait(ticket) >= ticket.stall_s > 0
    _stop_threads()


def test_normal_returns_while_the_copy_is_held_up(normal, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(copies, "move_bytes", held_by(gate))
    destination = zeros()
    ticket = normal.issue(Lane.D2H, destination, ones())
    assert not destination.any()
    assert not ticket.copied.is_set()
    gate.set()
    normal.wait(ticket)
    assert bool(destination.all())


def test_a_lane_is_first_in_first_out_and_lanes_are_independent(normal, monkeypatch):
    gate = threading.Event()
    original = copies.move_bytes

    def held(destination, source, *link):
        if destination.numel() == 8:
            assert gate.wait(WAIT_S)
        original(destination, source, *link)

    monkeypatch.setattr(copies, "move_bytes", held)
    first = normal.issue(Lane.D2H, zeros(8), ones(8))
    second = normal.issue(Lane.D2H, zeros(16), ones(16))
    other = normal.issue(Lane.H2D, zeros(16), ones(16))
    normal.wait(other)
    assert not first.copied.is_set()
    assert not second.copied.is_set()
    gate.set()
    normal.wait(second)
    assert first.copied.is_set()


def held_by(gate: threading.Event):
    original = move_bytes

    def held(destination, source, *link):
        assert gate.wait(WAIT_S)
        original(destination, source, *link)

    return held


def test_the_wait_returns_how_long_it_blocked(normal, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(copies, "move_bytes", held_by(gate))
    ticket = normal.issue(Lane.D2H, zeros(), ones())
    threading.Timer(0.3, gate.set).start()
    assert 0.02 < normal.wait(ticket) < WAIT_S


@pytest.mark.parametrize("schedule", CopySchedule)
def test_a_throttled_copy_is_no_faster_and_whole(schedule):
    engine = CopyEngine(CPU, schedule, bytes_per_s=20e6)
    source, destination = ones(1_000_003), zeros(1_000_003)
    start_s = time.perf_counter()
    engine.wait(engine.issue(Lane.H2D, destination, source))
    assert time.perf_counter() - start_s >= 1_000_003 / 20e6
    assert torch.equal(source, destination)
    _stop_threads()


def test_each_direction_has_its_own_throttle():
    engine = CopyEngine(CPU, bytes_per_s=(10e6, None))
    seconds = {}
    for lane in Lane:
        start_s = time.perf_counter()
        engine.wait(engine.issue(lane, zeros(3_000_000), ones(3_000_000)))
        seconds[lane] = time.perf_counter() - start_s
    assert seconds[Lane.D2H] >= 0.3
    assert seconds[Lane.H2D] < seconds[Lane.D2H]
    _stop_threads()


def test_a_throttled_lane_that_comes_late_catches_up(monkeypatch):
    engine = CopyEngine(CPU, bytes_per_s=10e6)
    gate = threading.Event()
    engine.issue(Lane.D2H, zeros(1), ones(1))
    engine._lanes.workers[Lane.D2H].put(gate.wait)  # the thread is held, the link is not
    start_s = time.perf_counter()
    tickets = [engine.issue(Lane.D2H, zeros(3_000_000), ones(3_000_000)) for _ in range(3)]
    time.sleep(0.8)
    gate.set()
    for ticket in tickets:
        engine.wait(ticket)
    assert 0.9 <= time.perf_counter() - start_s < 0.8 + 0.9
    _stop_threads()


def test_a_throttle_below_a_byte_a_piece_still_moves():
    source, destination = ones(3), zeros(3)
    move_bytes(destination, source, 30.0)
    assert torch.equal(source, destination)


def fail(destination, source, *link):
    raise ValueError("the link is down")


def test_a_failed_copy_is_raised_at_the_wait_and_only_there(engine, monkeypatch):
    monkeypatch.setattr(copies, "move_bytes", fail)
    ticket = engine.issue(Lane.D2H, zeros(), ones())
    with pytest.raises(CopyError, match="a copy of 4096 B failed: the link is down") as caught:
        engine.wait(ticket)
    assert isinstance(caught.value.__cause__, ValueError)
    monkeypatch.undo()
    destination = zeros()
    engine.wait(engine.issue(Lane.D2H, destination, ones()))
    assert bool(destination.all())


def test_settling_a_failed_copy_warns(normal, monkeypatch, caplog):
    monkeypatch.setattr(copies, "move_bytes", fail)
    normal.settle(normal.issue(Lane.D2H, zeros(), ones()))
    assert "a copy of a dropped step failed: the link is down" in caplog.text


def test_settling_waits_for_a_copy_but_begins_none(normal, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(copies, "move_bytes", held_by(gate))
    destination = zeros()
    ticket = normal.issue(Lane.D2H, destination, ones())
    threading.Timer(0.05, gate.set).start()
    normal.settle(ticket)
    assert bool(destination.all())
    late, untouched = CopyEngine(CPU, CopySchedule.LATE), zeros()
    late.settle(late.issue(Lane.D2H, untouched, ones()))
    assert not untouched.any()


def test_settling_a_ticket_that_never_got_to_the_lane(normal):
    """An interrupt came between the ticket and its issue."""
    ticket = Ticket(Lane.D2H, zeros(), ones())
    normal.settle(ticket)
    assert not ticket.destination.any()


def test_an_interrupt_in_the_callers_thread_passes(monkeypatch):
    def interrupt(destination, source, *link):
        raise KeyboardInterrupt

    monkeypatch.setattr(copies, "move_bytes", interrupt)
    with pytest.raises(KeyboardInterrupt):
        CopyEngine(CPU, CopySchedule.EARLY).issue(Lane.D2H, zeros(), ones())


def test_lengths_must_be_equal(normal):
    with pytest.raises(AssertionError, match="expected equal lengths"):
        normal.issue(Lane.D2H, zeros(8), ones(9))


def test_cuda_cannot_be_throttled():
    with pytest.raises(CopyError, match="expected no throttle on a CUDA device"):
        CopyEngine(torch.device("cuda"), bytes_per_s=1e9)


def test_an_engine_copies_again_after_its_threads_were_stopped(normal):
    normal.wait(normal.issue(Lane.D2H, zeros(), ones()))
    names = {thread.name for thread in threading.enumerate()}
    assert "memo-d2h" in names
    _stop_threads()
    destination = zeros()
    normal.wait(normal.issue(Lane.D2H, destination, ones()))
    assert bool(destination.all())


def test_threads_start_at_the_first_copy_and_are_daemons():
    before = set(threading.enumerate())
    engine = CopyEngine(CPU)
    assert set(threading.enumerate()) == before
    engine.wait(engine.issue(Lane.D2H, zeros(), ones()))
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    _stop_threads()
    assert not thread.is_alive()


def test_one_engine_for_one_kind():
    assert engine_of(CPU) is engine_of(CPU)
    assert engine_of(CPU, CopySchedule.LATE) is not engine_of(CPU)


def in_child(run) -> int:
    """The exit code of a forked child that runs ``run``."""
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            run()
            os._exit(0)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_has_lanes_of_its_own(normal):
    normal.wait(normal.issue(Lane.D2H, zeros(), ones()))

    def run() -> None:
        destination = zeros()
        normal.wait(normal.issue(Lane.D2H, destination, ones()))
        assert bool(destination.all())

    assert in_child(run) == 0


def test_a_forked_child_cannot_wait_for_its_parents_copy(normal, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(copies, "move_bytes", held_by(gate))
    ticket = normal.issue(Lane.D2H, zeros(), ones())

    def run() -> None:
        normal.settle(ticket)  # does not block
        with pytest.raises(CopyError, match="forked process cannot wait"):
            normal.wait(ticket)

    assert in_child(run) == 0
    gate.set()
    normal.wait(ticket)


class FakeStream:
    """Writes down what a stream is asked to do."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log

    def record_event(self, event: object = None) -> "FakeEvent":
        self.log.append(f"{self.name} records")
        return FakeEvent(self.name, self.log)

    def wait_event(self, event: "FakeEvent") -> None:
        self.log.append(f"{self.name} waits for {event.of}")

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")


class FakeEvent:
    def __init__(self, of: str, log: list[str]) -> None:
        self.of = of
        self.log = log

    def synchronize(self) -> None:
        self.log.append(f"host waits for event of {self.of}")

    def elapsed_time(self, other: "FakeEvent") -> float:
        return 1500.0


@pytest.fixture
def cuda_log(monkeypatch):
    """CUDA's streams as a list of what they were asked; the current one is called ``compute``."""
    log: list[str] = []
    lanes = iter(("lane1", "lane2"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream("compute", log))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(next(lanes), log))
    monkeypatch.setattr(torch.cuda, "stream", lambda lane: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: None)
    return log


def test_a_cuda_copy_waits_for_the_current_stream_and_back(cuda_log):
    engine = CopyEngine(torch.device("cuda"))
    ticket = engine.issue(Lane.D2H, zeros(), ones())
    assert cuda_log == ["compute records", "lane1 waits for compute", "lane1 records"]
    cuda_log.clear()
    assert engine.wait(ticket) == 0.0
    assert cuda_log == ["compute waits for lane1"]
    engine.issue(Lane.H2D, zeros(), ones())
    assert "lane2 waits for compute" in cuda_log
    assert not any("host" in line for line in cuda_log)


def test_a_dropped_cuda_copy_blocks_the_host(cuda_log):
    engine = CopyEngine(torch.device("cuda"))
    engine.settle(engine.issue(Lane.D2H, zeros(), ones()))
    assert "host waits for lane1" in cuda_log


def test_a_late_cuda_copy_runs_on_the_current_stream_at_its_wait(cuda_log):
    engine = CopyEngine(torch.device("cuda"), CopySchedule.LATE)
    ticket = engine.issue(Lane.D2H, zeros(), ones())
    assert cuda_log == []
    engine.wait(ticket)
    assert cuda_log == ["compute records", "compute waits for compute"]


def test_a_serial_cuda_copy_is_waited_for_at_once(cuda_log):
    CopyEngine(torch.device("cuda"), CopySchedule.SERIAL).issue(Lane.D2H, zeros(), ones())
    assert cuda_log[-1] == "compute waits for lane1"


def test_the_stall_of_a_cuda_wait_is_measured_when_asked(cuda_log):
    engine = CopyEngine(torch.device("cuda"), measure_stall=True)
    assert engine.wait(engine.issue(Lane.D2H, zeros(), ones())) == 1.5
