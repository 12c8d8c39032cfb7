"""Collectives while the device computes: begun by the step, and waited for where they are read.

A flight is one collective of one step. It is begun at its issue and its result may be read after
its wait; in between its input must not be written and its output not be touched. Tests choose
schedules that run it as early or as late as the step's waits allow, and a slower link; if the waits
are right, the step computes the same under each.

All ranks begin the collectives of a step in one order, that of the step's issues, under every
schedule: what a rank waits for first is its own affair.
"""

import enum
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from memo_runtime.current import poison


class CollectiveError(RuntimeError):
    """A collective failed, or cannot be waited for; the step that issued it is lost."""


class CollectiveKind(enum.Enum):
    """The collectives of ``torch.distributed`` with these names."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather_into_tensor"
    REDUCE_SCATTER = "reduce_scatter_tensor"
    ALL_TO_ALL = "all_to_all_single"


REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
"""Names of torch's functional collectives that are those of ``torch.distributed.ReduceOp``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective among the ranks of a process group."""

    kind: CollectiveKind
    group_name: str
    """The name that torch.distributed knows the group by."""
    reduce_op: str | None = None
    """``sum``, ``avg``, ``max`` ...; of reductions only."""
    output_splits: tuple[int, ...] = ()
    """ALL_TO_ALL: rows that come from each rank; empty: equally many."""
    input_splits: tuple[int, ...] = ()
    """ALL_TO_ALL: rows that go to each rank."""

    def __post_init__(self) -> None:
        reduces = self.kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)
        if reduces and self.reduce_op not in REDUCTIONS:
            raise CollectiveError(
                f"memo: expected a reduction of {REDUCTIONS}, got {self.reduce_op!r}"
            )

    def begin(self, destination: torch.Tensor, source: torch.Tensor) -> Any:
        """Begins it; returns the torch.distributed Work to wait for.

        Both tensors are contiguous. A reduction to all ranks may have one tensor as both.
        """
        dist, group = torch.distributed, _group_of(self.group_name)
        if self.kind is CollectiveKind.ALL_REDUCE:
            if destination.data_ptr() != source.data_ptr():
                destination.copy_(source)
            operation = _reduction(self.reduce_op)
            return dist.all_reduce(destination, op=operation, group=group, async_op=True)
        if self.kind is CollectiveKind.ALL_GATHER:
            gather = _operation("all_gather_single", "all_gather_into_tensor")
            return gather(destination, source, group=group, async_op=True)
        if self.kind is CollectiveKind.REDUCE_SCATTER:
            scatter = _operation("reduce_scatter_single", "reduce_scatter_tensor")
            operation = _reduction(self.reduce_op)
            return scatter(destination, source, op=operation, group=group, async_op=True)
        splits = list(self.output_splits) or None, list(self.input_splits) or None
        return dist.all_to_all_single(destination, source, *splits, group=group, async_op=True)


def _reduction(name: str | None) -> Any:
    return getattr(torch.distributed.ReduceOp, str(name).upper())


def _operation(name: str, older_name: str) -> Any:
    """Returns torch's function by its name in torch 2.13, or in 2.11."""
    return getattr(torch.distributed, name, None) or getattr(torch.distributed, older_name)


def _group_of(name: str) -> Any:
    names: Any = torch.distributed.distributed_c10d
    return names._resolve_process_group(name)  # torch 2.11 to 2.13; nothing public takes a name


class TimedCollective(NamedTuple):
    """Collectives that take equally long: they do the same in one group, on as many bytes."""

    collective: Collective
    dtype: str
    num_bytes: int
    """As ``CollectiveTicket.num_bytes``."""


LOOK_S = 2e-5
"""Seconds between two checks whether a collective has ended: less than the fastest takes."""

MAX_TIMED_STEPS = 4
"""A collective that did not run in so many steps may never run: nobody waits for its seconds."""


@dataclass(slots=True, kw_only=True)
class CollectiveTimes:
    """The fewest seconds of each collective of a plan, measured one by one in its first step.

    A rank that comes late only adds seconds. The first collective of a group is not counted: before
    it ranks connect, and a step's data may have come later on one of them. Where it is the only one
    of its kind, the next step is measured too.
    """

    wanted: frozenset[TimedCollective]
    patience_s: float | None = None
    """A collective that has not ended after so many seconds ends the measurement of its step.
    None: its end is waited for, however long that takes."""
    least_s: dict[TimedCollective, float] = field(default_factory=dict)
    is_stopped: bool = False
    """True where nothing more is measured in this step."""
    _num_steps: int = 0
    _connected: set[str] = field(default_factory=set)
    """Groups whose first collective has run."""

    @property
    def is_over(self) -> bool:
        """True when the next step need not be measured."""
        return self._num_steps >= MAX_TIMED_STEPS or self.wanted <= self.least_s.keys()

    def for_step(self) -> "CollectiveTimes | None":
        """Returns itself for a step that begins and is to be measured, else None."""
        if self.is_over:
            return None
        self._num_steps += 1
        self.is_stopped = False
        return self

    def note(self, flight: "CollectiveTicket", seconds: float) -> None:
        """Notes how long ``flight`` took alone."""
        timed = flight.timed
        if timed.collective.group_name not in self._connected:
            self._connected.add(timed.collective.group_name)
            return
        self.least_s[timed] = min(seconds, self.least_s.get(timed, seconds))


class CollectiveSchedule(enum.Enum):
    """When a collective runs between its issue and its wait."""

    NORMAL = "normal"
    """Beside the computation."""
    EARLY = "early"
    """Inside the issue."""
    LATE = "late"
    """Inside the wait; until then the output holds NaN."""


@dataclass(slots=True, eq=False)
class CollectiveTicket:
    """One issued collective."""

    collective: Collective
    destination: torch.Tensor
    source: torch.Tensor
    pid: int = field(default_factory=os.getpid)
    work: Any = None
    kept: torch.Tensor | None = None
    """LATE: what lay in the source where the output takes its place."""
    begun: bool = False
    finished: bool = False
    """The wait is over, or the step was given up."""
    carried_s: float = 0.0
    """The time at which the throttled link has carried its bytes."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the larger of its two tensors: what a link has to carry of it, roughly."""
        return max(self.destination.nbytes, self.source.nbytes)

    @property
    def timed(self) -> TimedCollective:
        """The key of its seconds."""
        dtype = str(self.source.dtype).removeprefix("torch.")
        return TimedCollective(self.collective, dtype, self.num_bytes)


class CollectiveEngine:
    """Begins collectives and waits for them. Thread-safe.

    ``bytes_per_s`` slows the link down: a wait ends no earlier than when so fast a link has carried
    all that was issued before, one after the other.
    """

    def __init__(
        self,
        schedule: CollectiveSchedule = CollectiveSchedule.NORMAL,
        bytes_per_s: float | None = None,
    ) -> None:
        self.schedule = schedule
        self.bytes_per_s = bytes_per_s
        self._free_s = 0.0
        """The time at which the throttled link has carried all that was issued."""
        self._waiting: deque[CollectiveTicket] = deque()
        """LATE: what was issued and not begun, in order."""
        self._lock = threading.RLock()  # the collector may end a step while this thread holds it

    def issue(self, flight: CollectiveTicket, times: CollectiveTimes | None = None) -> float:
        """Begins ``flight``, which the caller holds already, so that no interrupt can lose it.

        With ``times`` it ends here as well, as if EARLY, and its seconds are noted, where their
        patience lasts; LATE measures nothing. Returns the seconds for which that blocked the host.
        Raises CollectiveError: it ended here, and failed.
        """
        times = None if times is None or times.is_stopped else times
        if times is not None:
            _finish_stream(flight)  # the seconds of what makes the input do not count
        start_s = time.perf_counter()
        with self._lock:
            if self.bytes_per_s is not None:  # it starts when the link has carried those before
                start_s = max(self._free_s, time.perf_counter())
                self._free_s = flight.carried_s = start_s + flight.num_bytes / self.bytes_per_s
            if self.schedule is CollectiveSchedule.LATE:
                self._hide(flight)
                return 0.0
            self._begin(flight)
        if times is not None and not _ends_in_time(flight, times.patience_s):
            times.is_stopped = True
            return time.perf_counter() - start_s
        if times is None and self.schedule is CollectiveSchedule.NORMAL:
            return 0.0
        self._end(flight)
        if times is not None:
            _finish_stream(flight)
            _sleep_until(flight.carried_s)
            times.note(flight, time.perf_counter() - start_s)
        return time.perf_counter() - start_s

    def wait(self, flight: CollectiveTicket) -> float:
        """Waits until the output can be read; returns the seconds that this blocked the host.

        On CUDA the current stream waits, not the host. Raises CollectiveError: the collective
        failed, or another process issued it.
        """
        if flight.finished:
            return 0.0
        if flight.pid != os.getpid():
            raise CollectiveError("memo: a forked process cannot wait for a parent's collective")
        start_s = time.perf_counter()
        self._begin_up_to(flight)
        self._end(flight)
        _sleep_until(flight.carried_s)
        flight.finished = True
        return time.perf_counter() - start_s

    def settle(self, flight: CollectiveTicket) -> None:
        """Waits until nobody touches the flight's memory, for a step that is given up.

        What was issued is made, also where its schedule is LATE: other ranks may wait for it. Never
        raises for a collective that failed, because nobody reads its result.
        """
        if flight.finished or flight.pid != os.getpid():
            return
        try:
            self._begin_up_to(flight)
            self._end(flight)
            _finish_stream(flight)
        except RuntimeError:
            pass
        finally:
            flight.finished = True

    def _hide(self, flight: CollectiveTicket) -> None:
        """Leaves ``flight`` to its wait, until which its output holds what must not be read."""
        if flight.destination.data_ptr() == flight.source.data_ptr():
            flight.kept = flight.source.clone()
        poison(flight.destination)
        self._waiting.append(flight)

    def _begin_up_to(self, flight: CollectiveTicket) -> None:
        """Begins ``flight``, and before it all that was issued before and has not begun."""
        with self._lock:
            while not flight.begun and self._waiting:
                self._begin(self._waiting.popleft())

    def _begin(self, flight: CollectiveTicket) -> None:
        if flight.kept is not None:
            flight.destination.copy_(flight.kept)
            flight.kept = None
        flight.begun = True
        flight.work = flight.collective.begin(flight.destination, flight.source)

    def _end(self, flight: CollectiveTicket) -> None:
        """Waits for what has begun. Raises CollectiveError: it failed."""
        work, flight.work = flight.work, None
        if work is None:
            return
        try:
            work.wait()
        except RuntimeError as error:
            flight.finished = True
            kind = flight.collective.kind.value
            raise CollectiveError(f"memo: {kind} of a step failed: {error}") from error


def _ends_in_time(flight: CollectiveTicket, patience_s: float | None) -> bool:
    """False for a collective that has not ended after so many seconds; it goes on."""
    if patience_s is None or flight.work is None:
        return True
    deadline_s = time.perf_counter() + patience_s
    while not flight.work.is_completed():
        if time.perf_counter() > deadline_s:
            return False
        time.sleep(LOOK_S)
    return True


def _finish_stream(flight: CollectiveTicket) -> None:
    """CUDA: the host waits for all that the current stream has been given, waits for ranks too."""
    if flight.destination.device.type == "cuda":
        torch.cuda.current_stream(flight.destination.device).synchronize()


def _sleep_until(end_s: float) -> None:
    left_s = end_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)


engine_for: Callable[[CollectiveSchedule, float | None], CollectiveEngine] = functools.cache(
    CollectiveEngine
)
"""The one engine with these properties in this process."""
