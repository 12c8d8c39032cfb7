"""Leases of frames: a forward takes one, and its backward or autograd's graph gives it back.

What travels through autograd is a small CPU tensor, the handle (``memo_runtime.handle``), so that a
lease also ends when autograd drops the step without a backward (the loss died, an exception, an
unused output, a checkpoint that runs the forward again). Copies and collectives in flight use the
lease's memory, so it is given back when they have ended.
"""

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from memo_runtime.arena import DeviceArena, Slab
from memo_runtime.collectives import Collective, CollectiveEngine, CollectiveTicket, CollectiveTimes
from memo_runtime.copies import CopyEngine, Lane, Ticket, on_worker
from memo_runtime.handle import hooks_pack, make_handle, number_of
from memo_runtime.host_store import HostStore
from memo_runtime.operator_modes import hidden_from_modes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounters:
    """Counters of one step."""

    offloaded_bytes: int = 0
    recomputed_bytes: int = 0
    stall_s: float = 0.0
    """Seconds in which computation waited for copies (number 16 of docs/situations.md)."""
    comm_wait_s: float = 0.0
    """Seconds in which it waited for other ranks."""
    measured_s: float = 0.0
    """Seconds of both halves, without what the program does between them. 0: not measured, as on
    CUDA, where the host runs ahead of the device, unless ``measure_stall`` makes it wait."""

    def __add__(self, other: "StepCounters") -> "StepCounters":
        return StepCounters(
            offloaded_bytes=self.offloaded_bytes + other.offloaded_bytes,
            recomputed_bytes=self.recomputed_bytes + other.recomputed_bytes,
            stall_s=self.stall_s + other.stall_s,
            comm_wait_s=self.comm_wait_s + other.comm_wait_s,
            measured_s=self.measured_s + other.measured_s,
        )


@dataclass(eq=False)
class Lease:
    """One live step's hold on a frame and, where the step offloads, on a host frame."""

    number: int
    slab: Slab
    size_bytes: int
    at_end: contextlib.ExitStack
    """Gives the frames back, the last one first; runs once."""
    host: HostStore | None = None
    engine: CopyEngine | None = None
    plan: Any = None
    """The StepPlan of its forward, which its backward uses too, whatever was planned in between."""
    saved: list[Any] = field(default_factory=list)
    """What the forward leaves for its backward: tensors in the frame, and views of inputs or
    results, which lie in ordinary memory."""
    checked: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """The step's inputs and results behind ``saved``, and their versions when its forward ended."""
    read_later: list[tuple["weakref.ref[torch.Tensor]", int]] = field(default_factory=list)
    """The inputs that autograd keeps for the backward, and their versions at the forward."""
    group: Any = None
    """The GroupStep whose frame this is a member's hold on; None for a step by itself."""
    owner: Any = None
    """What runs its backward, where autograd does not keep that alive."""
    active: bool = True
    running: bool = False
    """Its backward has begun, and what it has read may be written."""
    ran: bool = False
    """Its backward has run, and may run again (retain_graph)."""
    tickets: dict[int, Ticket] = field(default_factory=dict)
    """Every copy of the step by its number; one issued in the forward may end later."""
    ranks: CollectiveEngine | None = None
    """Begins the step's collectives."""
    comm_times: CollectiveTimes | None = None
    """Where their seconds are noted, in a step that is measured."""
    flights: dict[int, CollectiveTicket] = field(default_factory=dict)
    """Every collective of the step by its number, until it has been waited for."""
    shown: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    """Offload -> the value as its region returned it, and the byte of its buffer at which it is."""
    counted: StepCounters = field(default_factory=StepCounters)
    """What its forward did."""

    def handle(self) -> torch.Tensor:
        """Returns the tensor for autograd; the lease ends at the latest when it is freed."""
        return make_handle(self.number, self.drop)

    def drop(self) -> None:
        """Gives the frame and its pages back, since no backward will come.

        Other code needs the pages between a forward that is dropped and the one that is run again
        for its backward (``torch.utils.checkpoint``).
        """
        if self.active and self.group is None:
            self.at_end.callback(self.slab.drop_tail, 0)
        self.release()

    def note_read_later(self, inputs: Iterable[Any]) -> None:
        """Notes the versions of ``inputs``, which the backward gets as well.

        Not under saved-tensor hooks: there it may get copies, which nobody writes.
        """
        if hooks_pack():
            return
        tensors = (value for value in inputs if isinstance(value, torch.Tensor))
        self.read_later = [(weakref.ref(tensor), tensor._version) for tensor in tensors]

    @property
    def is_refused(self) -> bool:
        """True where its backward cannot run any more: a tensor that it reads was written.

        Autograd or memo refuses it then. Its graph may still be held, for example by the name
        ``loss`` in a loop that skips a bad batch.
        """
        if self.running:
            return False
        inputs = ((reference(), version) for reference, version in self.read_later)
        alive = ((tensor, version) for tensor, version in inputs if tensor is not None)
        return any(tensor._version != version for tensor, version in (*alive, *self.checked))

    def issue(self, number: int, lane: Lane, frame: torch.Tensor, host: torch.Tensor) -> None:
        """Begins copy ``number`` of the step between bytes of its frame and of its host frame."""
        if self.engine is None:
            raise AssertionError("a lease without an engine cannot copy")
        destination, source = (host, frame) if lane is Lane.D2H else (frame, host)
        self.tickets[number] = ticket = Ticket(lane, destination, source)
        self.engine.begin(ticket)

    def wait(self, number: int) -> float:
        """Waits for copy ``number``; returns the seconds that blocked, 0 in a second call."""
        if self.engine is None or number not in self.tickets:
            raise AssertionError(f"copy {number} was never issued")
        return self.engine.wait(self.tickets[number])

    def communicate(
        self, number: int, collective: Collective, destination: torch.Tensor, source: torch.Tensor
    ) -> float:
        """Begins collective ``number`` of the step; returns the seconds that blocked."""
        if self.ranks is None:
            raise AssertionError("a lease without an engine cannot talk to other ranks")
        self.flights[number] = flight = CollectiveTicket(collective, destination, source)
        return self.ranks.issue(flight, self.comm_times)

    def wait_for_ranks(self, number: int) -> float:
        """Waits for collective ``number``; returns the seconds that blocked."""
        if self.ranks is None or number not in self.flights:
            raise AssertionError(f"collective {number} was never issued")
        blocked_s = self.ranks.wait(self.flights[number])
        del self.flights[number]  # it holds tensors
        return blocked_s

    def settle(self) -> None:
        """Waits until no copy and no collective of the step is in flight."""
        for ticket in self.tickets.values():
            if self.engine is not None:
                self.engine.settle(ticket)
        self.settle_ranks()

    def settle_ranks(self) -> None:
        """Waits until no collective of the step is in flight, where its own waits do not come."""
        for flight in self.flights.values():
            if self.ranks is not None:
                self.ranks.settle(flight)

    def release(self) -> None:
        """Gives the frames back, after the step's copies. A second call does nothing."""
        if self.active:
            self.active = False
            self.saved, self.checked, self.read_later, self.shown = [], [], [], {}
            # The collector may run on the thread that copies, which cannot wait for itself.
            if (self.tickets or self.flights) and on_worker():
                threading.Thread(target=self._end, daemon=True).start()
            else:
                self._end()

    def _end(self) -> None:
        """Waits for copies and ranks, also if interrupted; then closes ``at_end``."""
        try:
            self.settle()
        except KeyboardInterrupt:
            self.settle()
            raise
        finally:
            self.tickets.clear()
            self.flights.clear()
            _close(self.at_end)
            self._let_go()

    def _let_go(self) -> None:
        """Drops everything but the handle's number.

        A result that the user holds keeps the handle alive, and through it this lease; the memory
        of its plan must be freed all the same.
        """
        self.plan = self.host = self.engine = self.ranks = self.group = self.owner = None
        del self.slab

    def snapshot(self) -> torch.Tensor:
        """A copy of the frame's bytes, in ordinary memory."""
        return self.slab.bytes(self.size_bytes).clone()

    def restore(self, snapshot: torch.Tensor) -> None:
        """Puts the bytes of an earlier snapshot back."""
        self.slab.bytes(self.size_bytes).copy_(snapshot)
        self.slab.resident_bytes = max(self.slab.resident_bytes, self.size_bytes)


def _give_back_if_idle(
    at_end: contextlib.ExitStack, tickets: dict[int, Ticket], flights: dict[int, CollectiveTicket]
) -> None:
    """Finalizer of a lease that nobody ended: gives its frames back.

    If a copy or a collective may still write there, the frames stay taken.
    """
    finished = [ticket.finished for ticket in tickets.values()]
    if all(finished + [flight.finished for flight in flights.values()]):
        _close(at_end)


def _close(at_end: contextlib.ExitStack) -> None:
    """Ends a step, untraced: the collector may end it while torch traces some other code."""
    with hidden_from_modes():
        at_end.close()


class LeaseTable:
    """All live leases of the process. Thread-safe."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._live: weakref.WeakValueDictionary[int, Lease] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()  # the collector may end a lease while this thread holds it

    def open(
        self, slab: Slab, size_bytes: int, host: HostStore | None, at_end: contextlib.ExitStack
    ) -> Lease:
        """Returns a new lease on ``slab`` and ``host``; ``at_end`` is closed once, when it ends.

        Also if nobody ends the lease: an interrupt (Ctrl-C) may come before a step has begun, or
        while its release runs.
        """
        lease = Lease(next(self._numbers), slab, size_bytes, at_end, host)
        final = weakref.finalize(lease, _give_back_if_idle, at_end, lease.tickets, lease.flights)
        final.atexit = False
        with self._lock:
            self._live[lease.number] = lease
        return lease

    def any_live(self) -> bool:
        """True while the backward of some step of this process is still to come."""
        return self.num_live() > 0

    def num_live(self) -> int:
        """How many steps of this process have their backward still to come."""
        with self._lock:
            return sum(lease.active for lease in list(self._live.values()))

    def is_live(self, number: int) -> bool:
        """True while the backward of the step with lease ``number`` is still to come."""
        return self._active(number) is not None

    def end_refused(self) -> None:
        """Gives back the frames of steps whose backward can run no more."""
        with self._lock:
            live = [lease for lease in list(self._live.values()) if lease.active]
        for lease in live:
            if lease.is_refused:
                lease.release()

    def find(self, handle: torch.Tensor) -> Lease | None:
        """Returns the live lease behind ``handle``; None when its step has ended."""
        return self._active(number_of(handle))

    def _active(self, number: int) -> Lease | None:
        with self._lock:
            lease = self._live.get(number)
        return lease if lease is not None and lease.active else None


leases = LeaseTable()


def lease_frame(
    arena: DeviceArena,
    size_bytes: int,
    *,
    host_bytes: int = 0,
    host_kind: str = "shm",
    plan_key: int = 0,
) -> Lease:
    """Leases a frame of the device's arena for one step, and a host frame of ``host_bytes`` if any.

    Raises ArenaError, HostStoreError: one of them was refused; nothing is held.
    """
    with contextlib.ExitStack() as at_end:
        slab, host = arena.acquire(size_bytes), None
        at_end.callback(arena.release, slab)
        if host_bytes:
            host = arena.host.acquire(host_kind, host_bytes, plan_key)
            at_end.callback(arena.host.release, host)
        return leases.open(slab, size_bytes, host, at_end.pop_all())


def lease_ordinary(
    device: torch.device, size_bytes: int, *, host_bytes: int = 0, host_kind: str = "shm"
) -> Lease:
    """Leases frames in ordinary memory, freed with the lease, for a step beyond the planned."""
    slab, host, at_end = Slab(device, size_bytes), None, contextlib.ExitStack()
    slab.leased = True
    if host_bytes:
        host = HostStore(host_kind, host_bytes)
        at_end.callback(host.close)
    return leases.open(slab, size_bytes, host, at_end)
