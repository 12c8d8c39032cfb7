"""Copies between a device and the host while the device computes: two lanes, one each way.

On CUDA a lane is a stream and a wait is an event, so that the host never blocks. On CPU a lane is
a thread that copies in the order of issue. Tests choose schedules that copy as early or as late as
the step's waits allow; if the waits are right, the step computes the same under each.
"""

import atexit
import ctypes
import enum
import functools
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from memo_runtime.host_store import parts

log = logging.getLogger("memo")

_THROTTLED_PIECE_S = 0.02
"""Seconds that one piece of a throttled copy takes: well above the 5 ms for which another Python
thread may keep the interpreter's lock between two pieces."""


Throttle = float | tuple[float | None, float | None] | None
"""Most bytes per second of a copy: one speed, or one to the host and one back; None: no limit."""


class CopyError(RuntimeError):
    """A copy between device and host failed; the step that issued it is lost, the next is not."""


class Lane(enum.Enum):
    """Which way a copy goes. The copies of a lane run in the order of issue."""

    D2H = "d2h"
    H2D = "h2d"


class CopySchedule(enum.Enum):
    """When a copy runs between its issue and its wait."""

    NORMAL = "normal"
    """Beside the computation."""
    EARLY = "early"
    """Inside the issue."""
    LATE = "late"
    """Inside the wait."""
    SERIAL = "serial"
    """As NORMAL, but nothing else runs meanwhile: overlap is off."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One issued copy."""

    lane: Lane
    destination: torch.Tensor
    source: torch.Tensor
    pid: int = field(default_factory=os.getpid)
    stall_s: float = 0.0
    """Seconds for which the issue itself blocked."""
    error: BaseException | None = None
    started: bool = False
    finished: bool = False
    """The wait is over; what the copy wrote can be read."""
    copied: threading.Event = field(default_factory=threading.Event)
    """CPU: the copy has run, or failed."""
    issued_s: float = 0.0
    """When its lane was told of it."""
    event: torch.cuda.Event | None = None
    """CUDA: recorded behind the copy."""

    def __post_init__(self) -> None:
        to, source = self.destination.shape, self.source.shape
        if to != source or len(to) != 1:
            raise AssertionError(f"expected equal lengths, got {to}, {source}")

    @property
    def num_bytes(self) -> int:
        """How many bytes move."""
        return self.destination.numel()


class CopyEngine:
    """The two lanes of one device. Thread-safe; threads and streams are made at first use.

    Raises CopyError: ``bytes_per_s`` was asked of a CUDA device, whose copies cannot be slowed
    down.
    """

    def __init__(
        self,
        device: torch.device,
        schedule: CopySchedule = CopySchedule.NORMAL,
        bytes_per_s: Throttle = None,
        measure_stall: bool = False,
    ) -> None:
        speeds = bytes_per_s if isinstance(bytes_per_s, tuple) else (bytes_per_s, bytes_per_s)
        if device.type == "cuda" and speeds != (None, None):
            raise CopyError("memo: expected no throttle on a CUDA device; it is for the CPU only")
        self.schedule = schedule
        self._lanes: _CpuLanes | _CudaLanes = (
            _CudaLanes(device, measure_stall=measure_stall)
            if device.type == "cuda"
            else _CpuLanes(dict(zip(Lane, speeds, strict=True)))
        )

    def issue(self, lane: Lane, destination: torch.Tensor, source: torch.Tensor) -> Ticket:
        """Begins to copy ``source`` to ``destination``: uint8 tensors of one length.

        Neither may be written, nor the destination read, before :meth:`wait`.
        """
        ticket = Ticket(lane, destination, source)
        self.begin(ticket)
        return ticket

    def begin(self, ticket: Ticket) -> None:
        """Begins a copy whose ticket the caller holds already, so that no interrupt can lose it."""
        if self.schedule is not CopySchedule.LATE:
            self._start(ticket)
        if self.schedule in (CopySchedule.EARLY, CopySchedule.SERIAL):
            ticket.stall_s = self._lanes.finish(ticket)

    def wait(self, ticket: Ticket) -> float:
        """Waits until the copy has ended; returns the seconds for which issue and wait blocked.

        On CUDA the current stream waits, not the host, and the seconds are 0 unless measured.
        Raises CopyError: the copy failed, or another process issued it.
        """
        if ticket.finished:
            return 0.0
        if ticket.pid != os.getpid():
            raise CopyError("memo: a forked process cannot wait for a copy of its parent")
        self._start(ticket)
        stall_s = self._lanes.finish(ticket)
        ticket.finished = True
        if ticket.error is not None:
            raise CopyError(f"memo: a copy of {ticket.num_bytes} B failed: {ticket.error}") from (
                ticket.error
            )
        return ticket.stall_s + stall_s

    def wait_on_host(self, ticket: Ticket) -> None:
        """As ``wait``, for a copy whose bytes the host reads, or writes over, next."""
        self.wait(ticket)
        if ticket.event is not None:
            ticket.event.synchronize()

    def settle(self, ticket: Ticket) -> None:
        """Waits until nothing touches the copy's bytes any more, for a step that is given up.

        Blocks the host until all earlier copies of the lane have ended, because an interrupt may
        have come in the middle of the issue. A LATE copy is not made. Never raises for a copy that
        failed, because nobody reads its result.
        """
        if ticket.finished or ticket.pid != os.getpid():
            return
        self._lanes.settle(ticket)
        ticket.finished = True
        if ticket.error is not None:
            log.warning("memo: a copy of a dropped step failed: %s", ticket.error)

    def _start(self, ticket: Ticket) -> None:
        """Begins the copy on its lane, or makes it here, as the schedule says; once."""
        if not ticket.started:
            ticket.issued_s = time.perf_counter()
            if self.schedule in (CopySchedule.EARLY, CopySchedule.LATE):
                self._lanes.copy_now(ticket)
            else:
                self._lanes.start(ticket)
            ticket.started = True


class _CpuLanes:
    """A thread for each lane. ``start`` copies there, ``copy_now`` here; ``finish`` waits."""

    def __init__(self, bytes_per_s: dict[Lane, float | None]) -> None:
        self.bytes_per_s = bytes_per_s
        self.free_s = dict.fromkeys(Lane, 0.0)
        """The time at which the throttled link has carried all earlier copies of a lane."""
        self.workers = {lane: _Worker(f"memo-{lane.value}") for lane in Lane}

    def start(self, ticket: Ticket) -> None:
        self.workers[ticket.lane].put(functools.partial(self.copy_now, ticket))

    def copy_now(self, ticket: Ticket) -> None:
        """Copies as fast as the lane's link, and notes that it has, or the error."""
        lane = ticket.lane
        # The link's time, not the thread's, which waits for the interpreter's lock as well.
        begin_s, speed = max(ticket.issued_s, self.free_s[lane]), self.bytes_per_s[lane]
        if speed is not None:
            self.free_s[lane] = begin_s + ticket.num_bytes / speed
        try:
            move_bytes(ticket.destination, ticket.source, speed, begin_s)
        except Exception as error:  # raised again where the copy is waited for
            ticket.error = error
        finally:
            ticket.copied.set()

    def finish(self, ticket: Ticket) -> float:
        start_s = time.perf_counter()
        ticket.copied.wait()
        return time.perf_counter() - start_s

    def settle(self, ticket: Ticket) -> None:
        self.workers[ticket.lane].drain()


class _CudaLanes:
    """A stream for each lane, with the methods of ``_CpuLanes``.

    Slabs and host stores live as long as the leases that copies belong to, and a lease settles its
    copies before it ends. So no memory can be freed under a copy, and nothing needs
    ``record_stream``.
    """

    def __init__(self, device: torch.device, *, measure_stall: bool) -> None:
        self.device = device
        self.measure_stall = measure_stall
        self.streams: dict[Lane, torch.cuda.Stream] = {}

    def start(self, ticket: Ticket) -> None:
        """Issues the copy behind all work of the current stream."""
        if ticket.lane not in self.streams:
            self.streams.setdefault(ticket.lane, torch.cuda.Stream(self.device))
        lane = self.streams[ticket.lane]
        # The current stream is read at each use: a cached one would race with the user's own.
        lane.wait_event(torch.cuda.current_stream(self.device).record_event())
        with torch.cuda.stream(lane):
            self._copy(ticket)
            ticket.event = lane.record_event()

    def copy_now(self, ticket: Ticket) -> None:
        self._copy(ticket)
        ticket.event = torch.cuda.current_stream(self.device).record_event()

    def _copy(self, ticket: Ticket) -> None:
        """Issues the copy to the current stream, a piece for each part of the host's memory."""
        to, source = ticket.destination, ticket.source
        for start, end in parts(source if to.is_cuda else to):
            to[start:end].copy_(source[start:end], non_blocking=True)

    def finish(self, ticket: Ticket) -> float:
        """Lets the current stream wait; returns for how long, if stalls are measured."""
        assert ticket.event is not None
        stream = torch.cuda.current_stream(self.device)
        if not self.measure_stall:
            stream.wait_event(ticket.event)
            return 0.0
        before = stream.record_event(torch.cuda.Event(enable_timing=True))
        stream.wait_event(ticket.event)
        after = stream.record_event(torch.cuda.Event(enable_timing=True))
        after.synchronize()
        return before.elapsed_time(after) / 1e3

    def settle(self, ticket: Ticket) -> None:
        if ticket.lane in self.streams:  # also a copy whose event an interrupt left out
            self.streams[ticket.lane].synchronize()
        elif ticket.event is not None:  # EARLY and LATE have no streams of their own
            ticket.event.synchronize()


class _Worker:
    """One daemon thread that runs what it is given in order. A forked child gets its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._threads: dict[
            int, tuple[queue.SimpleQueue[Callable[[], None] | None], threading.Thread]
        ] = {}

    def put(self, job: Callable[[], None]) -> None:
        """``job`` runs after everything that was put before."""
        pid = os.getpid()
        if pid not in self._threads:
            fresh: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            thread = threading.Thread(target=_serve, args=(fresh,), name=self.name, daemon=True)
            if self._threads.setdefault(pid, (fresh, thread))[1] is thread:
                thread.start()
                _working.add(self)
        self._threads[pid][0].put(job)

    def drain(self) -> None:
        """Waits until everything that was put has run."""
        if os.getpid() in self._threads:
            done = threading.Event()
            self.put(done.set)
            done.wait()

    def close(self) -> None:
        """Ends the thread after everything that was put. The next ``put`` starts another."""
        jobs, thread = self._threads.pop(os.getpid(), (None, None))
        if jobs is not None and thread is not None:
            jobs.put(None)
            thread.join()


_working: "weakref.WeakSet[_Worker]" = weakref.WeakSet()
_on_worker = threading.local()


def _serve(jobs: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    _on_worker.here = True
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds tensors


def on_worker() -> bool:
    """True on a thread that copies: it must never wait for a copy."""
    return getattr(_on_worker, "here", False)


def move_bytes(
    destination: torch.Tensor,
    source: torch.Tensor,
    bytes_per_s: float | None = None,
    begin_s: float | None = None,
) -> None:
    """Copies ``source`` to ``destination``, no faster than ``bytes_per_s``; both are CPU memory.

    A throttled copy counts from ``begin_s`` of ``time.perf_counter`` (by default now), and catches
    up if the caller comes later.

    It is one memmove with the interpreter's lock released. In pieces of 4 MiB, beside a busy Python
    thread, the same copy ran at 0.8 instead of 12 GB/s: each piece waits for the lock.
    """
    size = destination.numel()
    piece = size if bytes_per_s is None else max(1, int(bytes_per_s * _THROTTLED_PIECE_S))
    to_address, from_address = destination.data_ptr(), source.data_ptr()
    start_s = time.perf_counter() if begin_s is None else begin_s
    for at in range(0, size, max(1, piece)):
        end = min(at + piece, size)
        ctypes.memmove(to_address + at, from_address + at, end - at)
        if bytes_per_s is not None:
            early_s = start_s + end / bytes_per_s - time.perf_counter()
            if early_s > 0:
                time.sleep(early_s)


engine_of = functools.cache(CopyEngine)
"""The one engine of a device with these properties in this process."""


@atexit.register
def _stop_threads() -> None:
    """Ends the threads, so that none copies while the interpreter frees memory."""
    for worker in list(_working):
        worker.close()
