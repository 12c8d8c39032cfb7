"""Gives memory back to Linux page by page: a CPU's arena keeps only what the step still needs.

Two places hold pages that nobody needs: the tail of a slab, and the C allocator's free heap, where
last step's gradients were. Only Linux with glibc takes them back; elsewhere plans do not count on
it (``gives_pages_back``).
"""

import ctypes
import functools
import mmap
import sys
import threading
from collections.abc import Sequence

import torch

PAGE_BYTES = mmap.PAGESIZE

_MIN_LARGE_BYTES = 32 * 2**20
"""Smaller ranges get no huge pages: one of 2 MiB may be in memory for a single byte."""

MIN_OWN_MAPPING_BYTES = 2**20
"""Blocks of at least so many bytes get a mapping, for two system calls; others do not matter."""

_MIN_FREE_HEAP_BYTES = 2**20
"""Fewer free bytes are left in the heap: giving them back costs more than it is worth."""


class _MallocInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``; ``fordblks`` is the free heap in bytes."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def gives_pages_back(device: torch.device) -> bool:
    """True where single pages of a slab can be returned to the system while the slab stays."""
    return device.type == "cpu" and sys.platform == "linux" and _libc() is not None


@functools.cache
def _libc() -> ctypes.CDLL | None:
    """glibc, if this is the process's C library."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim") or not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = _MallocInfo
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    return libc


def ask_for_large_pages(address: int, num_bytes: int) -> None:
    """Asks Linux to back ``[address, address + num_bytes)`` with huge pages.

    Pages that are given back are faulted in again in every step. Huge pages make both faster (300
    MiB by two threads: 13 ms instead of 58 to fault in, 1 instead of 25 to give back).
    """
    if num_bytes >= _MIN_LARGE_BYTES:
        _advise(address, num_bytes, mmap.MADV_HUGEPAGE)


def drop_pages(address: int, num_bytes: int) -> None:
    """Gives ``[address, address + num_bytes)`` back; private pages read as zero afterwards.

    They come back as small pages. Where only a part of a huge page is in memory, Linux would bring
    back the rest whenever it likes (khugepaged, every ten seconds).
    """
    _advise(address, num_bytes, mmap.MADV_NOHUGEPAGE)
    _advise(address, num_bytes, mmap.MADV_DONTNEED)


def resident_bytes(address: int, num_bytes: int) -> int:
    """Returns how many bytes of ``[address, address + num_bytes)`` are in memory (whole pages)."""
    libc, first, last = _libc(), *_whole_pages(address, num_bytes)
    if libc is None or last <= first:
        return 0
    count = (last - first) // PAGE_BYTES
    pages = ctypes.create_string_buffer(count)
    if libc.mincore(first, last - first, pages):
        return 0
    ones = int.from_bytes(b"\1" * count, "little")  # the other bits mean nothing
    return PAGE_BYTES * (int.from_bytes(pages.raw, "little") & ones).bit_count()


def _advise(address: int, num_bytes: int, advice: int) -> None:
    """Calls madvise for the whole pages inside ``[address, address + num_bytes)``."""
    libc, first, last = _libc(), *_whole_pages(address, num_bytes)
    if libc is not None and last > first:
        libc.madvise(first, last - first, advice)


def _whole_pages(address: int, num_bytes: int) -> tuple[int, int]:
    """Returns where the first whole page begins, and where the last one ends."""
    end = address + num_bytes
    return -(-address // PAGE_BYTES) * PAGE_BYTES, end // PAGE_BYTES * PAGE_BYTES


def own_mapping(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns an uninitialised CPU tensor whose memory is returned to the system when it is freed.

    On the heap, a large result that the user drops (logits) might stay in memory while autograd
    makes its gradient. Small tensors, and all where pages cannot go back, come from the heap.
    """
    elements = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    num_bytes = elements * dtype.itemsize
    if not all(size) or num_bytes < MIN_OWN_MAPPING_BYTES or _libc() is None:
        return torch.empty_strided(size, stride, dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)
    ask_for_large_pages(memory.data_ptr(), num_bytes)
    empty = torch.empty(0, dtype=dtype)
    return empty.set_(memory.untyped_storage(), 0, tuple(size), tuple(stride))


def trim_heap() -> None:
    """Makes the C allocator return its free heap, if there is enough of it to matter."""
    libc = _libc()
    if libc is not None and libc.mallinfo2().fordblks >= _MIN_FREE_HEAP_BYTES:
        libc.malloc_trim(0)


_occupied: list[int] = []
"""Blocks that fill free places of the heap."""
_occupying = threading.Lock()

MOST_OCCUPIED_BYTES = 2**30
"""Most bytes of free places that are filled: the rest is left for small blocks."""


def occupy_free_places(min_bytes: int) -> None:
    """Fills every free place of ``min_bytes`` or more in this thread's heap, until the next call.

    glibc maps blocks from ``min_bytes`` on one by one, but puts one into a free place of the heap
    that can hold it, where its pages stay when it is freed. So free places are filled with blocks
    that nothing writes to, ``MOST_OCCUPIED_BYTES`` at most; they take address space only.
    """
    libc = _libc()
    if libc is None:
        return
    with _occupying:
        while _occupied:
            libc.free(_occupied.pop())
        libc.malloc_trim(0)  # what is in memory there would stay
        free_bytes = min(libc.mallinfo2().fordblks, MOST_OCCUPIED_BYTES)
        size = 1 << free_bytes.bit_length()
        while size >= min_bytes:
            block = _in_a_free_place(libc, size) if size <= free_bytes else None
            if block is None:
                size //= 2
            else:
                _occupied.append(block)
                free_bytes -= size


def _in_a_free_place(libc: ctypes.CDLL, size: int) -> int | None:
    """Allocates a block in a free place of the heap; None: it would lie elsewhere."""
    before_bytes = libc.mallinfo2().fordblks
    block: int | None = libc.malloc(size)
    if block is not None and before_bytes - libc.mallinfo2().fordblks >= size:
        return block
    libc.free(block)
    return None
