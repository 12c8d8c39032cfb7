"""Who holds which frame: a forward takes a lease, its backward or autograd's graph gives it back.

What travels through autograd is a small CPU tensor, the handle. Its storage belongs to a Python
object with a finalizer, so that a lease also ends when autograd drops the step without a backward
(the loss died, an exception, an unused output).
"""

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from memo_runtime.arena import DeviceArena, Slab


class _Tag(bytearray):
    """Eight bytes that hold a lease's number, and can be watched by a finalizer."""


class Lease:
    """One live step's hold on a frame.

    ``saved`` are the tensors that the forward leaves for its backward; all lie in the frame.
    """

    def __init__(self, number: int, slab: Slab, size_bytes: int, give_back: Callable[[], None]):
        self.number = number
        self.slab = slab
        self.size_bytes = size_bytes
        self.saved: list[Any] = []
        self.active = True
        self._give_back = give_back

    def handle(self) -> torch.Tensor:
        """The tensor to hand to autograd; the lease ends at the latest when it is freed."""
        tag = _Tag(self.number.to_bytes(8, "little"))
        weakref.finalize(tag, self.release).atexit = False
        return torch.frombuffer(tag, dtype=torch.uint8)

    def release(self) -> None:
        """Give the frame back. A second call does nothing."""
        if self.active:
            self.active = False
            self.saved = []
            self._give_back()

    def snapshot(self) -> torch.Tensor:
        """A copy of the frame's bytes, in ordinary memory."""
        return self.slab.bytes(self.size_bytes).clone()

    def restore(self, snapshot: torch.Tensor) -> None:
        """Put the bytes of an earlier snapshot back."""
        self.slab.bytes(self.size_bytes).copy_(snapshot)


class LeaseTable:
    """All live leases of the process. Thread-safe."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._live: weakref.WeakValueDictionary[int, Lease] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def open(self, slab: Slab, size_bytes: int, give_back: Callable[[], None]) -> Lease:
        """A new lease on ``slab``; ``give_back`` runs once, when it ends."""
        lease = Lease(next(self._numbers), slab, size_bytes, give_back)
        with self._lock:
            self._live[lease.number] = lease
        return lease

    def find(self, handle: torch.Tensor) -> Lease | None:
        """The live lease behind ``handle``; None when its step has ended."""
        number = int.from_bytes(bytes(handle.cpu().tolist()), "little")
        with self._lock:
            lease = self._live.get(number)
        return lease if lease is not None and lease.active else None


leases = LeaseTable()


def lease_frame(arena: DeviceArena, size_bytes: int) -> Lease:
    """A frame of the device's arena for one step."""
    slab = arena.acquire(size_bytes)
    return leases.open(slab, size_bytes, lambda: arena.release(slab))


def lease_ordinary(device: torch.device, size_bytes: int) -> Lease:
    """A frame in ordinary memory that is freed with the lease: for a step that is not planned."""
    slab = Slab(device, size_bytes)
    slab.leased = True
    return leases.open(slab, size_bytes, lambda: None)
