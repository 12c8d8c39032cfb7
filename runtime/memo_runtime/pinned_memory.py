"""Host memory that is pinned (registered with CUDA), so that copies run beside kernels.

Pinning takes 0.2 to 0.4 s for each GiB, nearly all of it for pages that are touched first. Threads
do it part by part, beside the caller where ``begin`` comes before ``resize``. What is pinned grows
and shrinks where it lies.
"""

import contextlib
import ctypes
import logging
import mmap
import os
import resource
import threading
import time
from collections.abc import Iterable, Iterator

import torch

log = logging.getLogger("memo")

PART_BYTES = 2**30
"""Memory is registered in parts of this size, a multiple of a page. One call for tens of GB takes
seconds in which nothing can be said and no interrupt ends it."""

NUM_THREADS = 4
"""Each touches and registers one part after another."""

SILENT_S = 2.0
"""Seconds of waiting after which its progress is logged, and again after as many."""

_POPULATE_WRITE = 23
"""Linux 5.14's MADV_POPULATE_WRITE. An older kernel refuses it; then CUDA touches the pages."""
_NORESERVE = 0x4000
"""Linux's MAP_NORESERVE: addresses may be for more than there is memory."""


class HostStoreError(MemoryError):
    """Host memory for offloaded activations was refused; the message says which option to change.

    The step itself is sound: with a smaller host budget, or another kind of store, it can run.
    """


def borders(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yields ``[start, end)`` in pieces that each lie within one part of a memory."""
    inner = range((start // PART_BYTES + 1) * PART_BYTES, end, PART_BYTES)
    yield from zip((start, *inner), (*inner, end), strict=True)


class PinnedMemory:
    """A range of addresses, of which the first bytes are pinned, and only those take memory.

    The range has ``size_bytes``, or with 0 as many as the host has, so that the pinned part can
    grow where it lies. One thread at a time calls it. Raises OSError: the system does not grant
    the range (``ulimit -v``).
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise HostStoreError(
                "memo: expected a CUDA device to pin memory for; set host_store='shm'"
            )
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self.room_bytes = size_bytes or os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, self.room_bytes, flags=flags)
        with contextlib.suppress(OSError):  # a kernel without huge pages, which pin twice as fast
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        # A forked child cannot use CUDA, and no page may be copied away from under the device.
        self._memory.madvise(mmap.MADV_DONTFORK)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        on_device = device.type == "cuda" and device.index is not None
        self._device = device.index if on_device else torch.cuda.current_device()
        self._pid = os.getpid()
        self._wanted: dict[int, int] = {}
        """Start of a part -> its bytes; of those that are or will be pinned."""
        self._pinned: dict[int, int] = {}
        self._threads: list[threading.Thread] = []
        self._refusal = ""

    @property
    def pinned_bytes(self) -> int:
        """How many bytes are pinned by now."""
        return sum(list(self._pinned.values()))

    def begin(self, size_bytes: int) -> None:
        """Unpins all but the first ``size_bytes``, and begins to pin what is missing of them."""
        parts = {start: end - start for start, end in borders(0, size_bytes) if end > start}
        self._wanted = {at: size for at, size in self._wanted.items() if parts.get(at) == size}
        self.wait()  # for parts that both want
        self._wanted, self._refusal = parts, ""
        self._unpin(at for at, size in list(self._pinned.items()) if parts.get(at) != size)
        first_free = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if first_free < self.room_bytes:
            self._memory.madvise(mmap.MADV_DONTNEED, first_free)
        missing = sorted(parts.keys() - self._pinned.keys())
        starts = iter(missing)
        for _ in range(min(NUM_THREADS, len(missing))):
            self._threads.append(threading.Thread(target=self._pin, args=(starts,), daemon=True))
            self._threads[-1].start()

    def resize(self, size_bytes: int) -> None:
        """Pins the first ``size_bytes`` and no more. Raises HostStoreError: nothing is pinned."""
        try:
            self.begin(size_bytes)
            self.wait()
            if self._refusal:
                raise HostStoreError(self._refusal)
        except BaseException:
            self.close()
            raise

    def wait(self) -> None:
        """Waits for what has begun. The log says how far it is, where that takes long."""
        said_s = time.monotonic()
        while self._threads:
            self._threads[-1].join(timeout=SILENT_S)
            if not self._threads[-1].is_alive():
                self._threads.pop()
            if time.monotonic() - said_s >= SILENT_S:
                said_s, wanted = time.monotonic(), sum(self._wanted.values())
                log.info("memo: %d of %d B of host memory are pinned", self.pinned_bytes, wanted)

    def close(self) -> None:
        """Unpins everything, and ends what has begun; memory goes with the last tensor over it."""
        if self._pid == os.getpid():  # a forked child has no CUDA context to ask
            self._wanted = {}
            self.wait()
            self._unpin(list(self._pinned))

    def _pin(self, starts: Iterator[int]) -> None:
        """Touches and registers the parts at ``starts`` that are wanted, in a thread."""
        for start in starts:
            size_bytes = 0 if self._refusal else self._wanted.get(start, 0)
            if not size_bytes:
                continue
            address = self.tensor.data_ptr() + start
            # By ctypes: mmap's own madvise would keep all other threads waiting.
            madvise = ctypes.CDLL(None).madvise
            madvise(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), _POPULATE_WRITE)
            try:
                self._register(address, size_bytes)
                self._pinned[start] = size_bytes
            except Exception as error:  # as text: with its frames it would keep memory
                self._refusal = str(error)

    def _unpin(self, starts: Iterable[int]) -> None:
        """Unregisters the parts at ``starts``, once the device has ended what it does."""
        for number, start in enumerate(starts):
            if number == 0:
                torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr() + start)
            del self._pinned[start]

    def _register(self, address: int, num_bytes: int) -> None:
        """Registers one part with CUDA. Raises HostStoreError, which names the bytes of all."""
        with torch.cuda.device(self._device):  # a new thread's is the first of all
            code = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)
            if int(code) == 0:
                return
            reason = torch.cuda.cudart().cudaGetErrorString(code)
            _clear_cuda_error()
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        locked = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} B"
        raise HostStoreError(
            f"memo: CUDA refused to pin {sum(self._wanted.values())} B of host memory ({reason}; "
            f"locked memory, ulimit -l: {locked}). Raise that limit, lower host_budget, or set "
            "host_store='shm' for pageable memory, which copies more slowly"
        )


def _clear_cuda_error() -> None:
    """Makes CUDA forget a refusal: the next launch check reports and resets it, so provoke one."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
