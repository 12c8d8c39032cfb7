"""Runs the two halves of a planned step: the forward and, through the lease, the backward."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memo_runtime.arena import FrameTable, arena_of
from memo_runtime.current import current
from memo_runtime.leases import Lease, lease_frame, lease_ordinary, leases
from memo_runtime.pages import gives_pages_back, trim_heap

log = logging.getLogger("memo")


class StepError(RuntimeError):
    """A backward was called that its forward's plan does not cover."""


@dataclass(slots=True, kw_only=True)
class RunCall:
    """One region call, compiled to slots of the half's environment."""

    run: Callable[[list[Any]], Sequence[Any]]
    table: int
    """Index of the call in the frame's tables."""
    resident_bytes: int
    """Bytes of the frame, from its start, that this call and later ones use."""
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    views: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    """(position, size, stride) of the inputs that are read as another view of their storage."""
    drop: tuple[int, ...]
    """Input slots that nobody reads after this call."""
    unread: tuple[int, ...] = ()
    """Output slots that nobody reads at all."""
    copies: tuple[int, ...] = ()
    """Positions among the outputs that would alias the arena although the user keeps them."""
    dying: tuple[tuple[int, int, int], ...] = ()
    """Poison mode: (input, offset, bytes) of storages whose life ends in this call."""


@dataclass(slots=True, kw_only=True)
class RunHalf:
    """One half of a step: where arguments go, which calls run, what is returned."""

    num_slots: int
    constants: tuple[tuple[int, Any], ...]
    arguments: tuple[int, ...]
    calls: tuple[RunCall, ...]
    results: tuple[int | None, ...]
    leased: tuple[int, ...]
    """FORWARD: slots to keep in the lease; BACKWARD: slots to fill from it."""
    handle: int
    """FORWARD: the slot to return the handle in; BACKWARD: the slot it arrives in."""


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """A step that can run: both halves, the frame's size, and the views of each call."""

    key: int
    device: torch.device
    arena_bytes: int
    table: FrameTable
    forward: RunHalf
    backward: RunHalf
    max_inflight: int = 1
    poison: bool = False
    on_unplanned: Callable[[], None] = lambda: None
    live: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def lease(self) -> Lease:
        """A frame for one more forward; beyond ``max_inflight`` in ordinary memory."""
        with self.lock:
            planned = self.live < self.max_inflight
            self.live += planned
        if not planned:
            self.on_unplanned()
            lease = lease_ordinary(self.device, self.arena_bytes)
        else:
            lease = self._planned_lease()
        if self.poison:
            lease.slab.bytes(self.arena_bytes).fill_(255)
        return lease

    def _planned_lease(self) -> Lease:
        try:
            lease = lease_frame(arena_of(self.device), self.arena_bytes)
        except BaseException:
            self._count_down()
            raise
        give_back = lease._give_back

        def end() -> None:
            self._count_down()
            if self.poison:
                lease.slab.bytes(self.arena_bytes).fill_(255)
            give_back()

        lease._give_back = end
        return lease

    def _count_down(self) -> None:
        with self.lock:
            self.live -= 1


def run_forward(plan: StepPlan, args: list[Any]) -> list[Any]:
    """The forward's results; saved activations stay in the frame under the returned handle.

    ``args`` is emptied, so that inputs can be freed while the step runs.
    """
    if gives_pages_back(plan.device):
        trim_heap()  # where last step's gradients were
    lease = plan.lease()
    try:
        env = _environment(plan.forward, args)
        _run_calls(plan, plan.forward, lease, env)
        lease.saved = [env[slot] for slot in plan.forward.leased]
        env[plan.forward.handle] = lease.handle()
        return [None if slot is None else env[slot] for slot in plan.forward.results]
    except BaseException:
        lease.release()
        raise


def run_backward(plan: StepPlan, args: list[Any], *, keep_graph: bool) -> list[Any]:
    """The gradients of the step whose handle is among ``args``.

    With ``keep_graph`` the frame is as before afterwards, so that the backward can run again.

    Raises:
        StepError: the step's frame is gone; nothing has been overwritten.
    """
    half = plan.backward
    env = _environment(half, args)
    lease = leases.find(env[half.handle])
    if lease is None:
        raise StepError(
            "memo: the saved activations of this step are gone: its backward ran before without "
            "retain_graph=True, or another tool copied the handle (saved_tensors_hooks). Call "
            "backward(retain_graph=True) if it must run twice, and switch other offloaders off."
        )
    snapshot = lease.snapshot() if keep_graph else None
    for slot, value in zip(half.leased, lease.saved, strict=True):
        env[slot] = value
    try:
        _run_calls(plan, half, lease, env)
        results = [None if slot is None else env[slot] for slot in half.results]
    finally:
        if snapshot is None:
            lease.release()
        else:
            lease.restore(snapshot)
    return results


def _environment(half: RunHalf, args: list[Any]) -> list[Any]:
    env: list[Any] = [None] * half.num_slots
    for slot, value in half.constants:
        env[slot] = value
    for slot, value in zip(half.arguments, args, strict=True):
        env[slot] = value
    args.clear()
    return env


def _run_calls(plan: StepPlan, half: RunHalf, lease: Lease, env: list[Any]) -> None:
    tables = lease.slab.tables(plan.key, plan.table)
    resident = plan.arena_bytes
    try:
        for call in half.calls:
            if call.resident_bytes < resident:
                lease.slab.drop_tail(call.resident_bytes, resident, poison=plan.poison)
                resident = call.resident_bytes
            current.views = tables[call.table]
            if plan.poison:
                _prepare_poison(call, lease)
            inputs = [env[slot] for slot in call.inputs]
            for position, size, stride in call.views:
                inputs[position] = inputs[position].as_strided(size, stride)
            for slot in call.drop:
                env[slot] = None  # the region frees an input of ordinary memory at its last use
            results = call.run(inputs)
            for slot, value in zip(call.outputs, results, strict=True):
                env[slot] = value
            del results
            for position in call.copies:
                slot = call.outputs[position]
                env[slot] = env[slot].clone()
            for slot in call.unread:
                env[slot] = None
    finally:
        current.views = ()
        current.inputs = {}


def _prepare_poison(call: RunCall, lease: Lease) -> None:
    current.inputs = {
        position: lease.slab.bytes(size_bytes, offset)
        for position, offset, size_bytes in call.dying
    }
