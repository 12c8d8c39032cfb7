"""Host memory of exact size for the host frames of steps: what activations are offloaded to.

torch's pinned allocator rounds to powers of two (2.25 GiB becomes 4); here a frame takes what the
plan says, up to a page. All kinds are memory mappings, which the system frees when the last tensor
over them has gone: a view that is still in use can never dangle.
"""

import contextlib
import logging
import mmap
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from memo_runtime.stream_order import StreamOrder

log = logging.getLogger("memo")

_CPU = torch.device("cpu")

ALIGNMENT = 512
"""Tensors that share a store begin at multiples of so many bytes, as those of an arena do."""

PART_BYTES = 2**30
"""Memory is registered with CUDA in parts of this size, a multiple of a page. One call for tens of
GB takes seconds in which nothing can be said and no interrupt ends it."""

SILENT_S = 2.0
"""Seconds of registering after which its progress is logged, and again after as many."""

FILE_PREFIX = "file:"
"""A kind ``file:DIR`` is a memory-mapped temporary file in DIR."""


class HostStoreError(MemoryError):
    """Host memory for offloaded activations was refused; the message says which option to change.

    The step itself is sound: with a smaller host budget, or another kind of store, it can run.
    """


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
    that is registered with CUDA, so that copies run beside kernels) or ``file:DIR``. Raises
    HostStoreError: the memory, the disk space or its registration was refused.
    """

    def __init__(self, kind: str, size_bytes: int, device: torch.device = _CPU) -> None:
        self.kind = kind
        self.order = StreamOrder(device)
        """Between the steps that use it one after another, on streams of ``device``."""
        self.size_bytes = size_bytes
        self.pid = os.getpid()
        self.leased = False
        self.plans: set[int] = set()
        """Keys of the plans that have used it."""
        self._tensor: torch.Tensor | None = _mapped(kind, size_bytes)
        _live.add(self)
        self._unpin: weakref.finalize | None = None
        if kind == "pinned":
            self._unpin = _pin(self, self._tensor)

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
        self._tensor = None
        _live.discard(self)


def _mapped(kind: str, size_bytes: int) -> torch.Tensor:
    """A tensor over new memory of ``kind``; the mapping goes with the tensor's storage."""
    if size_bytes <= 0:
        raise AssertionError(f"expected a size in bytes, got {size_bytes}")
    try:
        if kind.startswith(FILE_PREFIX):
            memory = _mapped_file(Path(kind.removeprefix(FILE_PREFIX)), size_bytes)
        elif kind == "pinned":
            memory = _mapped_to_pin(size_bytes)
        elif kind == "shm":
            memory = mmap.mmap(-1, size_bytes)
        else:
            raise HostStoreError(
                f"memo: expected the host store to be shm, pinned or {FILE_PREFIX}DIR, got {kind}"
            )
    except OSError as error:
        raise HostStoreError(
            f"memo: host memory for offloaded activations was refused: {size_bytes} B as {kind} "
            f"({error}). Lower host_budget, or choose another host_store"
        ) from error
    return torch.frombuffer(memory, dtype=torch.uint8)


def _mapped_to_pin(size_bytes: int) -> mmap.mmap:
    """Memory in huge pages, where the system has them: CUDA registers it twice as fast.

    A forked child does not get it: it cannot use CUDA, and no page may be copied away from under
    the device.
    """
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory.madvise(mmap.MADV_DONTFORK)
    return memory


def _mapped_file(folder: Path, size_bytes: int) -> mmap.mmap:
    """A mapping of an unlinked file whose blocks exist: a full disk fails here, not in a copy."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
        return mmap.mmap(file.fileno(), size_bytes)


def parts(host: torch.Tensor) -> Iterator[tuple[int, int]]:
    """``[start, end)`` of the pieces of ``host``, bytes of a store, each within one part.

    CUDA refuses a copy that begins in one registered part and ends in another.
    """
    first, size = host.storage_offset(), host.numel()
    borders = range((first // PART_BYTES + 1) * PART_BYTES - first, size, PART_BYTES)
    yield from zip((0, *borders), (*borders, size), strict=True)


def end_to_end(sizes_bytes: Sequence[int]) -> tuple[list[int], int]:
    """Returns where tensors of these sizes lie in one store, in bytes, and the bytes of all.

    None but one that is larger than a part lies in two parts: a program may copy it as a whole.
    """
    offsets, end = [], 0
    for size_bytes in sizes_bytes:
        if size_bytes <= PART_BYTES and end % PART_BYTES + size_bytes > PART_BYTES:
            end += -end % PART_BYTES
        offsets.append(end)
        end += -(-size_bytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _pin(store: HostStore, memory: torch.Tensor) -> weakref.finalize:
    """Registers ``memory`` with CUDA; the finalizer undoes it, at the latest when Python exits."""
    if not torch.cuda.is_available():
        raise HostStoreError("memo: expected a CUDA device to pin memory for; set host_store='shm'")
    registered: list[int] = []
    unpin = weakref.finalize(store, _unpin, memory, store.pid, registered)
    said_s = time.monotonic()
    try:
        for start, end in parts(memory):
            _register(memory.data_ptr() + start, end - start, store.size_bytes)
            registered.append(memory.data_ptr() + start)
            if time.monotonic() - said_s >= SILENT_S:
                said_s = time.monotonic()
                log.info("memo: %d of %d B of host memory are pinned", end, store.size_bytes)
    except BaseException:
        unpin()
        raise
    return unpin


def _register(address: int, num_bytes: int, all_bytes: int) -> None:
    """Registers one part with CUDA. Raises HostStoreError, which names the bytes of all parts."""
    code = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)
    if int(code) != 0:
        reason = torch.cuda.cudart().cudaGetErrorString(code)
        _clear_cuda_error()
        raise HostStoreError(
            f"memo: CUDA refused to pin {all_bytes} B of host memory ({reason}). Raise the "
            "limit of locked memory (ulimit -l), lower host_budget, or set host_store='shm' "
            "for pageable memory, which copies more slowly"
        )


def _unpin(memory: torch.Tensor, pid: int, registered: list[int]) -> None:
    if pid == os.getpid() and registered:  # a forked child has no CUDA context to ask
        torch.cuda.synchronize()
        for address in registered:
            torch.cuda.cudart().cudaHostUnregister(address)


def _clear_cuda_error() -> None:
    """Make CUDA forget the refusal: the next launch check reports and resets it, so provoke one."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


@dataclass(slots=True, kw_only=True)
class HostPool:
    """The host frames of one device, one for each step that is live. Thread-safe."""

    device: torch.device = _CPU
    """What copies to and from the frames."""
    stores: list[HostStore] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Re-entrant: the collector may end a lease while this thread holds it."""

    def acquire(self, kind: str, size_bytes: int, plan_key: int) -> HostStore:
        """The smallest free store that fits; else a new one, which replaces a free one too small.

        Raises HostStoreError: new memory was refused.
        """
        with self.lock:
            # What a parent process made is shared with it: a forked child starts afresh.
            self.stores = [store for store in self.stores if store.pid == os.getpid()]
            free = [store for store in self.stores if not store.leased and store.kind == kind]
            fitting = [store for store in free if store.size_bytes >= size_bytes]
            if fitting:
                store = min(fitting, key=lambda store: store.size_bytes)
            else:
                store = self._replacement(free, kind, size_bytes)
            store.order.begin()
            store.leased = True
            store.plans.add(plan_key)
            return store

    def _replacement(self, free: list[HostStore], kind: str, size_bytes: int) -> HostStore:
        """Returns a new store; the largest of the ``free`` ones, too small, goes first if any."""
        plans: set[int] = set()
        if free:
            small = max(free, key=lambda store: store.size_bytes)
            plans = small.plans
            self.stores.remove(small)
            small.close()
        store = HostStore(kind, size_bytes, self.device)
        store.plans |= plans
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
            for store in free:
                store.close()
            return sum(store.size_bytes for store in free)

    def _drop_unneeded(self) -> None:
        for store in list(self.stores):
            if not store.leased and not store.plans:
                self.stores.remove(store)
                store.close()
