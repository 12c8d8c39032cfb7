"""The instructions of a half: region calls, copies and collectives that begin, and waits.

An instruction is bound to registers of the half's environment and to byte ranges of the step's
frame and host frame. Their order in ``RunHalf.calls`` is the schedule; each executes itself on a
:class:`Running` half.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memo_runtime.collectives import Collective
from memo_runtime.copies import Lane
from memo_runtime.current import current, poison
from memo_runtime.heap import HeapWatch
from memo_runtime.host_tensors import bytes_at_home
from memo_runtime.leases import Lease, StepCounters
from memo_runtime.operator_modes import shown_to_modes
from memo_runtime.pages import own_mapping, trim_heap


class EndedHalf(Protocol):
    """The part of a ``run_step.RunHalf`` that says what happens at its end."""

    resident_bytes: int | None
    dropped: tuple[tuple[int, int], ...]
    is_paused: bool


class TimedPlan(Protocol):
    """The part of a ``run_step.StepPlan`` that says how its step is timed."""

    device: torch.device
    measure_stall: bool


@dataclass(slots=True, kw_only=True)
class Running:
    """One half of a step while it runs."""

    lease: Lease
    env: list[Any]
    tables: Sequence[Sequence[torch.Tensor]]
    resident_bytes: int
    """Bytes of the frame, from its start, that have not been given back yet."""
    poison: bool
    counted: StepCounters
    heap: HeapWatch | None = None

    def count(self, **numbers: Any) -> None:
        """Adds to the step's counters."""
        self.counted += StepCounters(**numbers)

    @contextlib.contextmanager
    def timed(self, plan: TimedPlan) -> Iterator[None]:
        """Adds the block's seconds to the step's, where they are those of the device."""
        start = time.perf_counter()
        yield
        if plan.device.type != "cpu":
            if not plan.measure_stall:
                return
            torch.cuda.current_stream(plan.device).synchronize()
        self.count(measured_s=time.perf_counter() - start)

    def keep(self, resident_bytes: int) -> None:
        """Gives back all but the first ``resident_bytes`` of the frame."""
        if resident_bytes >= self.resident_bytes:
            return
        if self.poison:
            poison(self.lease.slab.bytes(self.resident_bytes - resident_bytes, resident_bytes))
        else:
            self.lease.slab.drop_tail(resident_bytes)
        self.resident_bytes = resident_bytes

    def leave(self, half: EndedHalf) -> None:
        """Gives back what the half does not keep of the frame, and before a pause the free heap."""
        if half.resident_bytes is not None:
            self.keep(half.resident_bytes)
        if half.is_paused and self.heap is not None:
            trim_heap()
        slab = self.lease.slab
        for start, end in half.dropped:
            if self.poison:
                poison(slab.bytes(end - start, start))
            else:
                slab.drop(start, end)

    def poison_ranges(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Poison mode: overwrites (offset, bytes) of the frame whose life has ended."""
        for offset, size_bytes in ranges if self.poison else ():
            self.lease.slab.bytes(size_bytes, offset).fill_(255)

    def reloaded(self, table: int, offload: int | None, buffer_start_bytes: int) -> torch.Tensor:
        """Returns the value of ``offload`` in its reload's buffer; None: a weight, all of it."""
        (buffer,) = self.tables[table]
        if offload is None:
            return buffer
        like, start_bytes = self.lease.shown[offload]
        return view_inside(buffer, like, buffer_start_bytes + start_bytes)


InputView = tuple[int, tuple[int, ...], tuple[int, ...], int]
"""(position, size, stride, offset); the offset is in elements, from where the value starts."""


@dataclass(slots=True, kw_only=True)
class RunCall:
    """One region call."""

    run: Callable[[list[Any]], Sequence[Any]]
    table: int
    """Index of the call in the frame's tables."""
    resident_bytes: int
    """Bytes of the frame, from its start, that this call and later ones use."""
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    views: tuple[InputView, ...]
    """The inputs that are read as another view of their storage."""
    drop: tuple[int, ...]
    """Input registers that nobody reads after this call."""
    unread: tuple[int, ...] = ()
    """Output registers that nobody reads at all."""
    copies: tuple[int, ...] = ()
    """Positions of outputs that the user keeps and that would alias the arena: they are copied."""
    dying: tuple[tuple[int, int, int], ...] = ()
    """Poison mode: (input, offset, bytes) of storages whose life ends in this call."""
    into: tuple[tuple[int, int, int], ...] = ()
    """(buffer, register, offset in bytes) of buffers that lie in the storage of a value in
    ordinary memory; for values in the arena the table has the place."""
    recomputed_bytes: int = 0
    """Bytes of saved activations that this call recomputes."""
    planned_bytes: int | None = None
    """CPU: bytes that the step holds after this call, in its frame and in ordinary memory; if more
    are in memory, the free heap goes back to the system."""

    def execute(self, running: Running) -> None:
        """Runs the region; puts outputs into the environment, drops inputs that nobody reads."""
        lease, env = running.lease, running.env
        running.keep(self.resident_bytes)
        views = running.tables[self.table]
        current.views = self._with_into(views, env) if self.into else views
        if running.poison:
            current.inputs = {
                position: lease.slab.bytes(size_bytes, offset)
                for position, offset, size_bytes in self.dying
            }
        inputs = [env[register] for register in self.inputs]
        for view in self.views:
            inputs[view[0]] = viewed(inputs[view[0]], view)
        for register in self.drop:
            env[register] = None  # so that the region can free it at its last use
        with shown_to_modes():
            results = self.run(inputs)
        for register, value in zip(self.outputs, results, strict=True):
            env[register] = value
        del results
        for position in self.copies:
            register = self.outputs[position]
            env[register] = env[register].clone()
        for register in self.unread:
            env[register] = None
        if running.heap is not None and self.planned_bytes is not None:
            running.heap.check(self.planned_bytes)
        if self.recomputed_bytes:
            running.count(recomputed_bytes=self.recomputed_bytes)

    def _with_into(self, views: Sequence[torch.Tensor], env: list[Any]) -> list[torch.Tensor]:
        """Returns ``views``, those of ``into`` in the storages of their values."""
        changed = list(views)
        for buffer, register, offset_bytes in self.into:
            changed[buffer] = view_inside(env[register], views[buffer], offset_bytes)
        return changed


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRange:
    """The bytes that a copy moves, of a value whose storage starts at ``frame_offset_bytes``."""

    number: int
    """The number of the copy in its step, which the wait names."""
    frame_offset_bytes: int
    start_bytes: int
    end_bytes: int
    host_offset_bytes: int

    @property
    def num_bytes(self) -> int:
        """How many bytes move."""
        return self.end_bytes - self.start_bytes

    def issue(self, lane: Lane, lease: Lease, weight: torch.Tensor | None = None) -> None:
        """Begins the copy: to or from the host frame, or from the memory of ``weight``."""
        frame = lease.slab.bytes(self.num_bytes, self.frame_offset_bytes + self.start_bytes)
        if weight is not None:
            host = bytes_at_home(weight)[self.host_offset_bytes :][: self.num_bytes]
        elif lease.host is not None:
            host = lease.host.bytes(self.num_bytes, self.host_offset_bytes)
        else:
            raise AssertionError("the plan moves bytes but has no host frame")
        lease.issue(self.number, lane, frame, host)


@dataclass(slots=True, kw_only=True)
class StartOffload:
    """Begins a copy from the frame to the host frame."""

    copy: CopyRange
    input: int
    """The value's register: a reload views the bytes as this value does now."""

    def execute(self, running: Running) -> None:
        """Begins the copy, and notes how the value views its buffer."""
        value = running.env[self.input]
        start_bytes = value.storage_offset() * value.element_size() - self.copy.frame_offset_bytes
        running.lease.shown[self.copy.number] = (value, start_bytes)
        self.copy.issue(Lane.D2H, running.lease)
        running.count(offloaded_bytes=self.copy.num_bytes)


@dataclass(slots=True, kw_only=True)
class ShowReloaded:
    """Puts a value that an earlier half reloads into the environment of the half that reads it."""

    table: int
    """Index of the reload in the frame's tables; the table's one view is the value's buffer."""
    output: int
    offload: int | None
    """The offload of this value, which may be a slice of its buffer, or transposed in it; None: it
    is a weight."""
    frame_offset_bytes: int
    """Where the value's buffer starts."""

    def execute(self, running: Running) -> None:
        """Puts the value there; its bytes are valid after the copy's wait."""
        running.env[self.output] = running.reloaded(
            self.table, self.offload, self.frame_offset_bytes
        )


@dataclass(slots=True, kw_only=True)
class StartReload:
    """Puts a value into the frame, and begins to copy its bytes, or a part, from the host frame."""

    copy: CopyRange
    table: int
    """Index of the call in the frame's tables."""
    output: int | None
    """None where a later half reads the value: ``ShowReloaded`` puts it there."""
    offload: int | None = None
    """The offload of this value; None: it is a weight."""
    weight: int | None = None
    """The register of the weight on the host that is brought."""

    def execute(self, running: Running) -> None:
        """Puts the value into the environment; its bytes are valid after the copy's wait."""
        if running.poison:
            poison(running.tables[self.table][0])
        if self.output is not None:
            start = self.copy.frame_offset_bytes
            running.env[self.output] = running.reloaded(self.table, self.offload, start)
        weight = None if self.weight is None else running.env[self.weight]
        self.copy.issue(Lane.H2D, running.lease, weight)


@dataclass(slots=True, kw_only=True)
class WaitCopy:
    """Waits until a copy of this step has ended, also one that the forward began."""

    number: int
    dying: tuple[tuple[int, int], ...] = ()
    """Poison mode: (offset, bytes) of the frame's ranges whose life ends here."""

    def execute(self, running: Running) -> None:
        """Waits until the copy has ended."""
        stall_s = running.lease.wait(self.number)
        if stall_s:
            running.count(stall_s=stall_s)
        running.poison_ranges(self.dying)


@dataclass(slots=True, kw_only=True)
class IssueCollective:
    """Begins a collective; its output is in the environment, to be read after the wait."""

    number: int
    """The number of the collective in its step, which the wait names."""
    collective: Collective
    table: int
    """Index of the call in the frame's tables; the table's one view is the output."""
    resident_bytes: int
    """As of RunCall."""
    input: int
    output: int
    view: InputView | None = None
    """The input as another view of its storage."""
    in_place: bool = False
    """The output takes the input's place."""
    external: tuple[torch.dtype, tuple[int, ...], tuple[int, ...]] | None = None
    """Type, size and stride of an output in ordinary memory, for the user."""
    is_mapped: bool = False
    """An external output gets pages of its own."""

    def execute(self, running: Running) -> None:
        """Begins it. The input stays in the environment until the wait."""
        running.keep(self.resident_bytes)
        value = running.env[self.input]
        source = value if self.view is None else viewed(value, self.view)
        if self.in_place:
            destination = source
        elif self.external is None:
            (destination,) = running.tables[self.table]
        else:
            dtype, size, stride = self.external
            if self.is_mapped:
                destination = own_mapping(size, stride, dtype)
            else:
                destination = torch.empty_strided(size, stride, dtype=dtype, device=source.device)
        running.env[self.output] = destination
        lease = running.lease
        blocked_s = lease.communicate(self.number, self.collective, destination, source)
        running.count(comm_wait_s=blocked_s)


@dataclass(slots=True, kw_only=True)
class WaitCollective:
    """Waits until a collective of this half has ended."""

    number: int
    resident_bytes: int
    """As of RunCall."""
    in_flight: int
    """The register of the output that the issue has put into the environment."""
    output: int
    """The register of the same tensor, now that its numbers are there."""
    drop: tuple[int, ...]
    """Registers that nobody reads after this call."""
    dying: tuple[tuple[int, int], ...] = ()
    """Poison mode: (offset, bytes) of the frame's ranges whose life ends here."""

    def execute(self, running: Running) -> None:
        """Waits until the collective has ended, and puts its output into its register."""
        blocked_s = running.lease.wait_for_ranks(self.number)
        running.count(comm_wait_s=blocked_s)
        running.keep(self.resident_bytes)
        env = running.env
        env[self.output] = env[self.in_flight]
        for register in self.drop:
            env[register] = None
        running.poison_ranges(self.dying)


Instruction = (
    RunCall
    | StartOffload
    | StartReload
    | ShowReloaded
    | WaitCopy
    | IssueCollective
    | WaitCollective
)


def viewed(value: torch.Tensor, view: InputView) -> torch.Tensor:
    """Returns ``value`` with the size, stride and offset of ``view``."""
    _, size, stride, offset = view
    return value.as_strided(size, stride, value.storage_offset() + offset)


def view_inside(value: torch.Tensor, like: torch.Tensor, offset_bytes: int) -> torch.Tensor:
    """Returns a view like ``like`` of the storage of ``value``, from byte ``offset_bytes`` on.

    It is conjugated or negated where ``like`` is.
    """
    storage, item = value.untyped_storage(), like.element_size()
    extent = sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True)) + 1
    end = offset_bytes + (extent * item if like.numel() else 0)
    if offset_bytes % item or end > storage.nbytes():  # set_ would enlarge the storage silently
        raise AssertionError(
            f"expected a range inside {storage.nbytes()} B, aligned to {item} B, "
            f"got [{offset_bytes}, {end})"
        )
    empty = torch.empty(0, dtype=like.dtype, device=value.device)
    view = empty.set_(storage, offset_bytes // item, like.shape, like.stride())
    view = torch.conj(view) if like.is_conj() else view
    return torch._neg_view(view) if like.is_neg() else view
