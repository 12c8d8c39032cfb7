"""The arena of a device: slabs of memory, each of which holds the frame of one live step at a time.

A frame is the memory that a plan takes in the arena. Steps that are never live together (of other
shapes, other models) use the same slab one after the other; steps that are live together (graph
breaks, two forwards before a backward) each lease one. A slab grows only while nothing is leased
from it: it takes a new storage, and its views are made anew. Whoever else looks at the old storage
(numpy, DLPack) keeps it alive. Host frames, into which steps offload, are shared in the same way.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memo_runtime.host_store import HostPool
from memo_runtime.pages import ask_for_large_pages, drop_pages, gives_pages_back
from memo_runtime.stream_order import StreamOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameView:
    """One buffer of a frame: where it starts, in bytes, and how it is read, in elements."""

    offset_bytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    in_frame: bool = True
    """False for a buffer that its call puts into a tensor of ordinary memory (``RunCall.into``)."""


FrameTable = Sequence[Sequence[FrameView]]
"""Per call of the step, the views of its buffers, in the region's order."""


class ArenaError(torch.OutOfMemoryError):
    """The device refused the memory for a frame: the plan is right, but there is no room for it."""


class Slab:
    """Device memory for one frame at a time. Raises ArenaError: ``size_bytes`` were refused."""

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        self.device = device
        self.leased = False
        self.order = StreamOrder(device)
        self.resident_bytes = 0
        """Bytes from its start that may be in physical memory, where pages are given back (CPU)."""
        self._tables: dict[int, list[list[torch.Tensor]] | None] = {}
        """Plan -> its views; None where the slab has grown since they were made."""
        self.graphs: dict[tuple[int, bool], Any] = {}
        """Plan and half (True: the backward) -> a ``cuda_graphs.HalfInSlab``."""
        self._allocate(size_bytes)

    @property
    def size_bytes(self) -> int:
        """The size of the slab now."""
        return self._storage.nbytes()

    def grow(self, size_bytes: int) -> None:
        """Makes the slab at least ``size_bytes`` large. Its content and its views are lost."""
        if self.leased:
            raise AssertionError("a leased slab must not move")
        if size_bytes > self.size_bytes:
            self._tables = dict.fromkeys(self._tables)
            self.graphs.clear()
            self._allocate(size_bytes)

    def _allocate(self, size_bytes: int) -> None:
        """Takes new memory in place of the old. Raises ArenaError: it was refused."""
        self._storage = torch.UntypedStorage(0, device=self.device)  # the old one goes first
        try:
            self._storage.resize_(size_bytes)
        except RuntimeError as error:
            raise ArenaError(
                f"memo: {self.device} refused {size_bytes} B for the arena of a step "
                f"({str(error).splitlines()[0]}). Lower memory_budget by what is missing, or free "
                "memory of this device"
            ) from error
        self.resident_bytes = 0
        if gives_pages_back(self.device):
            ask_for_large_pages(self._storage.data_ptr(), size_bytes)

    def bytes(self, num_bytes: int, offset_bytes: int = 0) -> torch.Tensor:
        """Returns ``num_bytes`` of the slab from ``offset_bytes`` as a uint8 tensor."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        return empty.set_(self._storage, offset_bytes, (num_bytes,), (1,))

    def drop_tail(self, start: int) -> None:
        """Gives the pages from ``start`` on back to the system; their content is lost.

        The next write brings them back, zeroed. Until the next frame begins they are small pages: a
        large page across ``start`` would bring some of them back with what lies before it.
        """
        if gives_pages_back(self.device):
            drop_pages(self._storage.data_ptr() + start, self.size_bytes - start)
            self.resident_bytes = start

    def drop(self, start: int, end: int) -> None:
        """Gives the whole pages inside ``[start, end)`` back, as ``drop_tail`` does."""
        if gives_pages_back(self.device):
            drop_pages(self._storage.data_ptr() + start, end - start)

    def occupy(self, num_bytes: int) -> int:
        """Begins a frame of ``num_bytes``; gives pages above it back.

        Returns how many bytes of it may be in physical memory already.
        """
        before = min(self.resident_bytes, num_bytes)
        if gives_pages_back(self.device):
            ask_for_large_pages(self._storage.data_ptr(), num_bytes)
            self.drop_tail(num_bytes)
        self.resident_bytes = num_bytes
        return before

    def tables(self, key: int, table: FrameTable) -> list[list[torch.Tensor]]:
        """Returns the views of plan ``key``, made once, and anew when the slab has grown."""
        views = self._tables.get(key)
        if views is None:
            views = [[self._view(view) for view in call] for call in table]
            self._tables[key] = views
        return views

    def _view(self, view: FrameView) -> torch.Tensor:
        """Returns the buffer as a tensor; one that lies elsewhere as its layout alone."""
        if not view.in_frame:
            return torch.empty_strided(view.size, view.stride, dtype=view.dtype, device="meta")
        if view.offset_bytes % view.dtype.itemsize:
            raise AssertionError(f"offset {view.offset_bytes} is not aligned for {view.dtype}")
        empty = torch.empty(0, dtype=view.dtype, device=self.device)
        start = view.offset_bytes // view.dtype.itemsize
        return empty.set_(self._storage, start, view.size, view.stride)


class DeviceArena:
    """All slabs of one device. Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host = HostPool(device=device)
        self.idle_after_step: dict[int, int] = {}
        """Plan -> bytes of the arena that may be used between its step and the next one."""
        self._slabs: list[Slab] = []
        self._lock = threading.RLock()  # the collector may end a lease while this thread holds it

    def acquire(self, size_bytes: int) -> Slab:
        """Leases a slab of at least ``size_bytes``: the smallest that fits, else one that grows."""
        with self._lock:
            free = [slab for slab in self._slabs if not slab.leased]
            fitting = [slab for slab in free if slab.size_bytes >= size_bytes]
            if fitting:
                slab = min(fitting, key=lambda slab: slab.size_bytes)
            elif free:
                slab = max(free, key=lambda slab: slab.size_bytes)
                slab.grow(size_bytes)
            else:
                slab = Slab(self.device, size_bytes)
                self._slabs.append(slab)
            slab.order.begin()
            slab.leased = True
            return slab

    def release(self, slab: Slab) -> None:
        """Ends the lease of ``slab``, which keeps its memory for the next frame."""
        with self._lock:
            try:
                slab.order.end(slab.bytes(slab.size_bytes))
            finally:
                slab.leased = False

    def release_pages(self) -> None:
        """Gives the pages of every free slab back; they return at the next write."""
        with self._lock:
            for slab in self._slabs:
                if not slab.leased:
                    slab.drop_tail(0)

    def give_back(self) -> int:
        """Frees slabs and host frames that no step holds; returns their bytes.

        The next step takes new ones: its plan stays, and its views are made anew.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        with self._lock:
            free = [slab for slab in self._slabs if not slab.leased]
            self._slabs = [slab for slab in self._slabs if slab.leased]
            size_bytes = sum(slab.size_bytes for slab in free) + self.host.give_back()
        del free
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return size_bytes

    def make_room(self, size_bytes: int) -> None:
        """Gives pages of free slabs back, so that ``size_bytes`` of other memory may be taken.

        What stays of each slab, and those bytes, are together at most ``idle_bytes``.
        """
        keep = max(0, self.idle_bytes() - size_bytes)
        with self._lock:
            for slab in self._slabs:
                if not slab.leased and slab.resident_bytes > keep:
                    slab.drop_tail(keep)

    def forget(self, key: int) -> None:
        """Drops the views of plan ``key``, and slabs and host frames that no plan uses any more."""
        with self._lock:
            for slab in self._slabs:
                slab._tables.pop(key, None)
                for is_backward in (False, True):
                    slab.graphs.pop((key, is_backward), None)
            self._slabs = [slab for slab in self._slabs if slab.leased or slab._tables]
            self.idle_after_step.pop(key, None)
        self.host.forget(key)

    def idle_bytes(self) -> int:
        """What may be borrowed of the arena now; 0 where a step holds a frame of it."""
        with self._lock:
            if any(slab.leased for slab in self._slabs):
                return 0
            return min(self.idle_after_step.values(), default=0)

    @property
    def size_bytes(self) -> int:
        """Bytes that all slabs hold together."""
        return sum(slab.size_bytes for slab in self._slabs)


_arenas: dict[torch.device, DeviceArena] = {}
_arenas_lock = threading.Lock()


def release() -> int:
    """Gives memo's memory back between phases of a program; returns how many bytes.

    That is the arena of every device, and the host memory of offloaded activations, where no
    forward waits for its backward. The next step takes them again, by the same plan. For a model
    that shares its device with another one, such as an inference engine between two updates:

        memo_compile.release()
        samples = engine.generate(prompts)

    Weights, gradients and optimizer state stay where they are. On CUDA it waits for the device, and
    lets torch give its free memory back too. Raises nothing: a later step that is refused the
    memory raises ArenaError or HostStoreError.
    """
    with _arenas_lock:
        arenas = list(_arenas.values())
    return sum(arena.give_back() for arena in arenas)


def arena_of(device: torch.device) -> DeviceArena:
    """Returns the one arena of ``device`` in this process."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with _arenas_lock:
        return _arenas.setdefault(device, DeviceArena(device))
