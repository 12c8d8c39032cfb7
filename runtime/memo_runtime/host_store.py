"""Host memory of exact size for the host frames of steps: what activations are offloaded to.

torch's pinned allocator rounds to powers of two (2.25 GiB becomes 4); here a frame takes what the
plan says, up to a page. All kinds are memory mappings, which the system frees when the last tensor
over them has gone: a view that is still in use can never dangle.
"""

import contextlib
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from memo_runtime import pinned_memory
from memo_runtime.pinned_memory import HostStoreError, PinnedMemory, borders
from memo_runtime.stream_order import StreamOrder

_CPU = torch.device("cpu")

ALIGNMENT = 512
"""Tensors that share a store begin at multiples of so many bytes, as those of an arena do."""

PREPARED = -1
"""In ``HostStore.plans``: pinned for a plan that is being made and has no key yet."""

FILE_PREFIX = "file:"
"""A kind ``file:DIR`` is a memory-mapped temporary file in DIR."""


_live: "weakref.WeakSet[HostStore]" = weakref.WeakSet()


def bytes_held(kind: str, training_state_bytes: int) -> int:
    """What stores of this process hold that a step has room in, in memory or files as ``kind``.

    That is all frames of steps, and as much of the other stores, which hold weights, gradients and
    optimizer state, as the step's ``training_state_bytes`` may be.
    """
    in_files = kind.startswith("file:")
    stores = [store for store in list(_live) if store.kind.startswith("file:") == in_files]
    frames = sum(store.size_bytes for store in stores if store.leased or store.plans)
    others = sum(store.size_bytes for store in stores) - frames
    return frames + min(others, training_state_bytes)


class HostStore:
    """``size_bytes`` of page-aligned host memory.

    ``kind`` is ``shm`` (anonymous shared memory, in /proc ``RssShmem``), ``pinned`` (private memory
    that is registered with CUDA, so that copies run beside kernels; it can be resized if it is made
    with 0 bytes) or ``file:DIR``. Raises HostStoreError: memory, disk space or registration was
    refused.
    """

    def __init__(self, kind: str, size_bytes: int, device: torch.device = _CPU) -> None:
        self.kind = kind
        self.order = StreamOrder(device)
        """Between the steps that use it one after another, on streams of ``device``."""
        self._size_bytes = size_bytes
        self.pid = os.getpid()
        self.leased = False
        self.plans: set[int] = set()
        """Keys of the plans that have used it."""
        self.pinned: PinnedMemory | None = None
        self._tensor: torch.Tensor | None = None
        with _refusals(kind, size_bytes):
            if kind == "pinned":
                self.pinned = PinnedMemory(size_bytes, device)
                self._tensor = self.pinned.tensor
            else:
                self._tensor = _mapped(kind, size_bytes)
        _live.add(self)
        self._unpin: weakref.finalize | None = None
        if self.pinned is not None:
            self._unpin = weakref.finalize(self, self.pinned.close)  # at the latest at exit
            self.pinned.resize(size_bytes)

    @property
    def size_bytes(self) -> int:
        """Its bytes; of pinned memory those that are pinned by now."""
        return self._size_bytes if self.pinned is None else self.pinned.pinned_bytes

    def bytes(self, num_bytes: int, offset_bytes: int = 0) -> torch.Tensor:
        """``num_bytes`` of the store from ``offset_bytes`` as a uint8 tensor, without a copy.

        Its storage offset is ``offset_bytes``; a copy of it is one for each of ``parts``.
        """
        if self._tensor is None:
            raise AssertionError("the host store is closed")
        if not 0 <= offset_bytes <= offset_bytes + num_bytes <= self.size_bytes:
            raise AssertionError(
                f"expected a range inside {self.size_bytes} B of host memory, "
                f"got [{offset_bytes}, {offset_bytes + num_bytes})"
            )
        return self._tensor.narrow(0, offset_bytes, num_bytes)

    def close(self) -> None:
        """Frees the memory once the last tensor over it has gone. A second call does nothing."""
        if self._unpin is not None:
            self._unpin()
        self._tensor = self.pinned = None
        _live.discard(self)


@contextlib.contextmanager
def _refusals(kind: str, size_bytes: int) -> Iterator[None]:
    """Turns an OSError of the block into a HostStoreError that names the options."""
    try:
        yield
    except OSError as error:
        raise HostStoreError(
            f"memo: host memory for offloaded activations was refused: {size_bytes} B as {kind} "
            f"({error}). Lower host_budget, or choose another host_store"
        ) from error


def _mapped(kind: str, size_bytes: int) -> torch.Tensor:
    """A tensor over new memory of ``kind``; the mapping goes with the tensor's storage."""
    if size_bytes <= 0:
        raise AssertionError(f"expected a size in bytes, got {size_bytes}")
    if kind.startswith(FILE_PREFIX):
        memory = _mapped_file(Path(kind.removeprefix(FILE_PREFIX)), size_bytes)
    elif kind == "shm":
        memory = mmap.mmap(-1, size_bytes)
    else:
        raise HostStoreError(
            f"memo: expected the host store to be shm, pinned or {FILE_PREFIX}DIR, got {kind}"
        )
    return torch.frombuffer(memory, dtype=torch.uint8)


def _mapped_file(folder: Path, size_bytes: int) -> mmap.mmap:
    """A mapping of an unlinked file whose blocks exist: a full disk fails here, not in a copy."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
        return mmap.mmap(file.fileno(), size_bytes)


def parts(host: torch.Tensor) -> Iterator[tuple[int, int]]:
    """``[start, end)`` of the pieces of ``host``, bytes of a store, each within one part.

    CUDA refuses a copy that begins in one registered part and ends in another.
    """
    first = int(host.storage_offset())
    for start, end in borders(first, first + host.numel()):
        yield start - first, end - first


def end_to_end(sizes_bytes: Sequence[int]) -> tuple[list[int], int]:
    """Returns where tensors of these sizes lie in one store, in bytes, and the bytes of all.

    None but one that is larger than a part lies in two parts: a program may copy it as a whole.
    """
    offsets, end = [], 0
    for size_bytes in sizes_bytes:
        part_bytes = pinned_memory.PART_BYTES
        if size_bytes <= part_bytes and end % part_bytes + size_bytes > part_bytes:
            end += -end % part_bytes
        offsets.append(end)
        end += -(-size_bytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


@dataclass(slots=True, kw_only=True)
class HostPool:
    """The host frames of one device, one for each step that is live. Thread-safe."""

    device: torch.device = _CPU
    """What copies to and from the frames."""
    stores: list[HostStore] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Re-entrant: the collector may end a lease while this thread holds it."""

    def prepare(self, size_bytes: int) -> None:
        """Begins to pin memory for the plan that is being made, beside the caller.

        ``acquire`` takes it and makes it as large as it must be; ``forget(PREPARED)`` frees it.
        """
        with self.lock, contextlib.suppress(HostStoreError):  # ``acquire`` will say it
            if not any(store.kind == "pinned" and not store.leased for store in self.stores):
                store = HostStore("pinned", 0, self.device)
                store.plans.add(PREPARED)
                self.stores.append(store)
                assert store.pinned is not None, "it was asked for"
                store.pinned.begin(min(size_bytes, store.pinned.room_bytes))

    def wait(self) -> None:
        """Waits until nothing is being pinned: it would be in the way of copies that are timed."""
        with self.lock:
            for store in self.stores:
                if store.pinned is not None:
                    store.pinned.wait()

    def acquire(self, kind: str, size_bytes: int, plan_key: int) -> HostStore:
        """Leases the smallest free store that fits.

        Where none fits, it leases the prepared one, resized, or else a new one, for which the
        largest free one is closed. Raises HostStoreError: new memory was refused.
        """
        with self.lock:
            # What a parent process made is shared with it: a forked child starts afresh.
            self.stores = [store for store in self.stores if store.pid == os.getpid()]
            free = [store for store in self.stores if not store.leased and store.kind == kind]
            fitting = [store for store in free if store.size_bytes >= size_bytes]
            fitting = [store for store in fitting if PREPARED not in store.plans]
            if fitting:
                store = min(fitting, key=lambda store: store.size_bytes)
            else:
                store = self._replaced(free, kind, size_bytes)
            store.order.begin()
            store.leased = True
            store.plans.add(plan_key)
            return store

    def _replaced(self, free: list[HostStore], kind: str, size_bytes: int) -> HostStore:
        """Returns the prepared store in this size; else a new one, for which a ``free`` one goes.

        One that a plan has used is not resized: CUDA graphs may hold its addresses.
        """
        plan_keys: set[int] = set()
        if free:
            old_store = max(free, key=lambda store: (PREPARED in store.plans, store.size_bytes))
            plan_keys, pinned = old_store.plans - {PREPARED}, old_store.pinned
            self.stores.remove(old_store)
            if pinned is not None and size_bytes <= pinned.room_bytes and not plan_keys:
                pinned.resize(size_bytes)
                old_store.plans = plan_keys
                self.stores.append(old_store)
                return old_store
            old_store.close()
        store = HostStore(kind, size_bytes, self.device)
        store.plans |= plan_keys
        self.stores.append(store)
        return store

    def release(self, store: HostStore) -> None:
        """Gives ``store`` back; it keeps its memory for the next step, if a plan still needs it."""
        with self.lock:
            try:
                store.order.end()
            finally:
                store.leased = False
            self._drop_unneeded()

    def forget(self, plan_key: int) -> None:
        """Frees every store that only plan ``plan_key`` has used, once no step holds it."""
        with self.lock:
            for store in self.stores:
                store.plans.discard(plan_key)
            self._drop_unneeded()

    def give_back(self) -> int:
        """Frees every store that no step holds; returns their bytes. A later step takes new ones.

        On CUDA copies must have ended.
        """
        with self.lock:
            free = [store for store in self.stores if not store.leased]
            self.stores = [store for store in self.stores if store.leased]
            freed_bytes = sum(store.size_bytes for store in free)
            for store in free:
                store.close()
            return freed_bytes

    def _drop_unneeded(self) -> None:
        for store in list(self.stores):
            if not store.leased and not store.plans:
                self.stores.remove(store)
                store.close()
