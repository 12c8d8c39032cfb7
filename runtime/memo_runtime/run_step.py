"""Runs the two halves of a planned step: the forward and, through the lease, the backward."""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memo_runtime.arena import FrameTable, Slab, arena_of
from memo_runtime.backward_run import BackwardRun
from memo_runtime.backward_run import StepError as StepError
from memo_runtime.collectives import CollectiveSchedule, CollectiveTimes, engine_for
from memo_runtime.copies import CopySchedule, Throttle, engine_of
from memo_runtime.cuda_graphs import GraphUse, graph_of
from memo_runtime.current import current
from memo_runtime.heap import HeapWatch
from memo_runtime.instructions import Instruction, Running
from memo_runtime.leases import Lease, StepCounters, lease_frame, lease_ordinary, leases


@dataclass(slots=True, kw_only=True)
class RunHalf:
    """One half of a step: registers of its arguments, instructions, registers of its results."""

    num_registers: int
    """Length of the environment, which holds the values of a half while it runs."""
    constants: tuple[tuple[int, Any], ...]
    arguments: tuple[int, ...]
    calls: tuple[Instruction, ...]
    results: tuple[int | None, ...]
    leased: tuple[int, ...]
    """FORWARD: registers to keep in the lease; BACKWARD: registers to fill from it."""
    checked: tuple[int, ...] = ()
    """FORWARD: registers of inputs behind what is leased, since the user may write into them."""
    read_later: tuple[int, ...] = ()
    """FORWARD: registers of inputs that autograd keeps, since the backward is given them too."""
    visible: tuple[int, ...] = ()
    """FORWARD: those of ``leased`` in the memory of results, which the user may write into too."""
    planned_bytes: int = 0
    """Bytes that the step holds as the half begins, in its frame and in ordinary memory."""
    resident_bytes: int | None = None
    """FORWARD: bytes of the frame, from its start, that the backward uses. The rest is given back:
    autograd makes gradients of the results in ordinary memory before the backward begins."""
    dropped: tuple[tuple[int, int], ...] = ()
    """Ranges of the frame that are given back when the half has ended: nothing reads them again."""
    is_paused: bool = False
    """User code that takes much memory runs after the half: the free heap is given back first."""
    ready: tuple[int, ...] = ()
    """BACKWARD: per result, the number of calls after which it is made and read no more. Empty
    where results are not the gradients of the forward's arguments, one by one."""
    read_until: tuple[int, ...] = ()
    """BACKWARD: per argument of the forward, the number of calls after which it is read no more."""
    guarded: tuple[tuple[int, int], ...] = ()
    """BACKWARD: (register, number of calls that read it) of tensors that the user may write."""
    checked_until: tuple[int, ...] = ()
    """BACKWARD: ``read_until`` of the forward's ``checked``."""
    written: tuple[int, ...] = ()
    """Registers of the arguments that it writes into."""
    barred: str = ""
    """Why it cannot be a CUDA graph, where its operators tell."""
    owners: tuple[int, ...] = ()
    """Per instruction the member of the group that it belongs to; 0 in a step by itself."""
    handle: int
    """FORWARD: the register to return the handle in; BACKWARD: the register it arrives in."""


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """A step that can run: both halves, its frames' sizes, and the views of each call."""

    key: int
    device: torch.device
    arena_bytes: int
    table: FrameTable
    forward: RunHalf
    backward: RunHalf
    max_inflight: int = 1
    poison: bool = False
    on_unplanned: Callable[[], None] = lambda: None
    host_bytes: int = 0
    """Bytes of the host frame; 0 for a step without copies."""
    host_store: str = "shm"
    """Kind of host memory: ``shm``, ``pinned`` or ``file:DIR``."""
    schedule: str = "normal"
    """When copies run between issue and wait; a ``copies.CopySchedule``."""
    throttle_bytes_per_s: Throttle = None
    """CPU: most bytes per second of a copy."""
    collective_schedule: str = "normal"
    """When collectives run between issue and wait; a ``collectives.CollectiveSchedule``."""
    comm_bytes_per_s: float | None = None
    """Most bytes per second between ranks."""
    comm_times: CollectiveTimes | None = None
    """Collectives are timed in steps that begin until all of these were."""
    measure_stall: bool = False
    """CUDA: ``stall_s`` is measured, for which the host must wait with the device."""
    on_step_end: Callable[[StepCounters], None] = lambda counted: None
    """Called after each backward that succeeded, with what the step did, its forward included."""
    graphs: GraphUse | None = None
    """CUDA: halves become CUDA graphs; None: they run call by call."""
    heap: HeapWatch | None = None
    """CPU: gives free heap back where memory is above the plan."""
    idle_bytes: int = 0
    """What of the arena may be used between the step and the next one, within the planned peak."""
    live: int = 0
    """How many steps in planned frames have their backward to come."""
    beyond: int = 0
    """How many more steps in ordinary memory have."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Re-entrant: the collector may end a lease while this thread holds it."""

    def reserve(self) -> None:
        """Allocates the frames of all live steps, so that a refusal comes now.

        Raises ArenaError, HostStoreError: a frame, or a host frame, was refused.
        """
        reserved = []
        arena_of(self.device).idle_after_step[self.key] = self.idle_bytes
        try:
            for _ in range(self.max_inflight):
                reserved.append(self._planned_lease(count=0))
                reserved[-1].slab.tables(self.key, self.table)  # marks the slab as needed
        finally:
            for lease in reserved:
                lease.release()

    def lease(self) -> Lease:
        """Returns frames for a forward, in ordinary memory if ``max_inflight`` steps are live."""
        engine = engine_of(
            arena_of(self.device).device,
            CopySchedule(self.schedule),
            self.throttle_bytes_per_s,
            self.measure_stall,
        )
        if self.live >= self.max_inflight:
            leases.end_refused()
        with self.lock:
            planned = self.live < self.max_inflight
            self.live += planned
        lease = self._planned_lease(count=1) if planned else self._ordinary_lease()
        lease.engine = engine
        schedule = CollectiveSchedule(self.collective_schedule)
        lease.ranks = engine_for(schedule, self.comm_bytes_per_s)
        if self.comm_times is not None:
            lease.comm_times = self.comm_times.for_step()
        if self.poison:
            self._poison(lease.slab)
            if lease.host is not None:
                if self.device.type == "cuda":  # the host fills it while copies may still read it
                    torch.cuda.current_stream(self.device).synchronize()
                lease.host.bytes(self.host_bytes).fill_(255)
        return lease

    def _ordinary_lease(self) -> Lease:
        """Returns frames in ordinary memory, which count as one step beyond the planned ones."""
        self.on_unplanned()
        lease = lease_ordinary(
            self.device, self.arena_bytes, host_bytes=self.host_bytes, host_kind=self.host_store
        )
        self._count(beyond=1)
        lease.at_end.callback(self._count, beyond=-1)
        return lease

    def _planned_lease(self, *, count: int) -> Lease:
        """Returns frames of the device's arena, which count as ``count`` live steps while held."""
        try:
            lease = lease_frame(
                arena_of(self.device),
                self.arena_bytes,
                host_bytes=self.host_bytes,
                host_kind=self.host_store,
                plan_key=self.key,
            )
        except BaseException:
            self._count(live=-count)
            raise
        if self.poison:
            lease.at_end.callback(self._poison, lease.slab)
        lease.at_end.callback(self._count, live=-count)
        return lease

    def _poison(self, slab: Slab) -> None:
        slab.bytes(self.arena_bytes).fill_(255)

    def _count(self, *, live: int = 0, beyond: int = 0) -> None:
        with self.lock:
            self.live += live
            self.beyond += beyond


def run_forward(plan: StepPlan, args: list[Any], member: Lease | None = None) -> list[Any]:
    """Runs the forward; saved activations stay in the frame under the handle among the results.

    ``args`` is emptied, so that inputs can be freed while the step runs. ``member`` is the lease of
    a group's member on the group's frame; without it the step takes a frame of its own. Raises
    StepError: the current stream is being captured.
    """
    refuse_capture(plan.device)
    lease = plan.lease() if member is None else member
    lease.plan = plan
    try:
        if plan.heap is not None and member is None:
            plan.heap.begin(lease.slab.occupy(plan.arena_bytes))
        env = _environment(plan.forward, args)
        checked = [env[register] for register in plan.forward.checked]
        lease.note_read_later(env[register] for register in plan.forward.read_later)
        lease.counted, copies = _execute(plan, plan.forward, lease, env)
        env[plan.forward.handle] = lease.handle()
        results = [
            None if register is None else _no_view(copies.get(register, env[register]))
            for register in plan.forward.results
        ]
        for register in plan.forward.visible:
            # Autograd ties a result to the handle: a lease that held it would keep itself alive.
            env[register] = env[register].detach()
        checked += _in_same_memory(results, [env[register] for register in plan.forward.visible])
        lease.saved = [env[register] for register in plan.forward.leased]
        lease.checked = [(tensor, tensor._version) for tensor in checked]
        return results
    except BaseException:
        lease.release()
        raise


def refuse_capture(device: torch.device) -> None:
    """Raises StepError where the current stream of ``device`` is captured into a CUDA graph."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise StepError(
            "memo: a planned step cannot be captured into a CUDA graph: its frames are lent to one "
            "step after another, whose copies and streams wait for each other. Take it out of "
            "torch.cuda.graph and make_graphed_callables, or compile it without memo."
        )


def _no_view(result: Any) -> Any:
    """Returns a view as a tensor in the same memory that is no view.

    If a function returns a view, autograd gives it another version counter and forbids the user to
    write into it.
    """
    if not isinstance(result, torch.Tensor) or not result._is_view():
        return result
    if result.is_conj() or result.is_neg():  # which only a view can be
        return result
    empty = torch.empty(0, dtype=result.dtype, device=result.device)
    storage = result.untyped_storage()
    return empty.set_(storage, result.storage_offset(), result.size(), result.stride())


def _in_same_memory(results: Sequence[Any], leased: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors that share memory with one of the other list: writes show in either."""
    tensors = [result for result in results if leased and isinstance(result, torch.Tensor)]
    shared = {_memory(tensor) for tensor in leased} & {_memory(tensor) for tensor in tensors}
    return [tensor for tensor in leased if _memory(tensor) in shared] + [
        tensor.detach() for tensor in tensors if _memory(tensor) in shared
    ]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def ran_before(plan: StepPlan, args: list[Any]) -> bool:
    """True when the backward of the step whose handle is among ``args`` has run already."""
    lease = leases.find(args[plan.backward.arguments.index(plan.backward.handle)])
    return lease is not None and lease.ran


def run_backward(plan: StepPlan, args: list[Any], *, keep_graph: bool) -> list[Any]:
    """Runs the backward of the step with a handle among ``args``; raises as ``begin_backward``."""
    run = begin_backward(plan, args, keep_graph=keep_graph)
    if not keep_graph:
        run.lease.checked = []  # which is for parts, between which the user may write
    return run.rest(range(len(run.plan.backward.results)))


def begin_backward(plan: StepPlan, args: list[Any], *, keep_graph: bool) -> BackwardRun:
    """Returns the backward of the step whose handle is among ``args``, before its first call.

    It runs by the plan of its forward, which may be older than ``plan``; both take the same
    ``args``. With ``keep_graph`` the frame is restored afterwards, so that the backward can run
    again. Raises StepError: the step's frame is gone, or the current stream is being captured;
    nothing has been overwritten.
    """
    lease = leases.find(args[plan.backward.arguments.index(plan.backward.handle)])
    if lease is None:
        raise StepError(
            "memo: the saved activations of this step are gone: its backward ran before without "
            "retain_graph=True, or saved_tensors_hooks gave back other numbers than they were "
            "given for an integer tensor. Call backward(retain_graph=True) if it must run twice, "
            "and pack floating-point tensors only."
        )
    if lease.host is not None and lease.host.pid != os.getpid():
        raise StepError(
            "memo: a forked process cannot run the backward of its parent's forward: the offloaded "
            "activations belong to the parent. Run forward and backward in one process."
        )
    plan = lease.plan
    refuse_capture(plan.device)
    half = plan.backward
    env = _environment(half, args)
    if any(tensor._version != version for tensor, version in lease.checked):
        raise StepError(
            "memo: an input or a result of the step was written in place between its forward and "
            "its backward, which reads it again. Write into it after the backward, or into a clone."
        )
    if lease.group is not None:
        lease.group.begin_backward(lease, keep_graph=keep_graph)
    if plan.heap is not None:
        plan.heap.begin_backward(half.planned_bytes)
    for register, value in zip(half.leased, lease.saved, strict=True):
        env[register] = value
    lease.running = True
    if not keep_graph:
        lease.saved = []  # so that the last call that reads a tensor frees it
    running = _running(plan, lease, env)
    return BackwardRun(
        plan=plan,
        lease=lease,
        running=running,
        graph=graph_of(plan, half, running, is_member=lease.group is not None),
        calls=_calls(half, lease),
        keeps_graph=keep_graph,
        snapshot=lease.snapshot() if keep_graph and lease.group is None else None,
    )


def _environment(half: RunHalf, args: list[Any]) -> list[Any]:
    """Returns the half's registers with constants and ``args``, which is emptied."""
    env: list[Any] = [None] * half.num_registers
    for register, value in half.constants:
        env[register] = value
    for register, value in zip(half.arguments, args, strict=True):
        env[register] = value
    args.clear()
    return env


def _calls(half: RunHalf, lease: Lease) -> tuple[Instruction, ...]:
    """Returns the half's instructions; in a group without copies of members that never began."""
    return half.calls if lease.group is None else tuple(lease.group.instructions(half))


def _running(plan: StepPlan, lease: Lease, env: list[Any]) -> Running:
    """Returns what a half's instructions run on; in a group that is the group's frame."""
    if lease.group is not None:
        lease = lease.group.frame
    return Running(
        lease=lease,
        env=env,
        tables=lease.slab.tables(plan.key, plan.table),
        resident_bytes=plan.arena_bytes,
        poison=plan.poison,
        counted=StepCounters(),
        heap=plan.heap,
    )


def _execute(
    plan: StepPlan, half: RunHalf, lease: Lease, env: list[Any]
) -> tuple[StepCounters, dict[int, Any]]:
    """Runs a half; returns what it counted, and of a replay copies of its results by register."""
    running, copies = _running(plan, lease, env), {}
    graph = graph_of(plan, half, running, is_member=lease.group is not None)
    try:
        with running.timed(plan):
            if graph is not None:
                copies = graph.replay(running)
            else:
                for call in _calls(half, lease):
                    call.execute(running)
        running.leave(half)
    except BaseException:
        running.lease.settle_ranks()  # a group's frame may go on to serve other members
        raise
    finally:
        current.views = ()
        current.inputs = {}
    return running.counted, copies
