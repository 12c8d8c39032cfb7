"""Measure the physical memory of this process, so that a planned peak can be held against a fact.

On CPU: anonymous resident memory (``RssAnon``), sampled by a thread. So that the C allocator's
slack does not count, freed heap goes back to the kernel before the baseline is read, and every
large block is mapped by itself. On CUDA, ``torch.cuda.max_memory_allocated`` measures.
"""

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memo_compile.errors import RuntimeMisuse

SAMPLE_PERIOD_S = 0.001
"""Seconds between two samples. A sample costs 20 us; a layer of any real model lasts longer."""
_SWITCH_INTERVAL_S = 0.0005
"""Seconds after which threads switch; Python's 5 ms would let other work hide several samples."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's numbers of the two settings, from malloc.h."""
_WATCHED_THRESHOLD_BYTES = 128 * 1024
"""glibc's first value of both; it would rise to the largest freed block, and holes would stay."""
_USUAL_THRESHOLD_BYTES = 32 * 2**20
"""The most that glibc would rise to; set after a watch, because setting a value ends the rise."""
MIN_OWN_BLOCK_BYTES = 2**20
"""Under a budget, blocks of at least this size get mappings of their own; others do not matter."""
_STATUS = Path("/proc/self/status")
_ROLLUP = Path("/proc/self/smaps_rollup")


@dataclass(slots=True, kw_only=True)
class MemoryWatch:
    """Anonymous resident memory of the process while ``watch_memory`` ran, in bytes."""

    baseline_bytes: int
    peak_bytes: int
    peak_with_shared_bytes: int
    """The most of anonymous and shared memory at one time: host stores lie in shared memory."""

    @property
    def growth_bytes(self) -> int:
        """The rise of memory above the baseline."""
        return self.peak_bytes - self.baseline_bytes

    @property
    def growth_with_shared_bytes(self) -> int:
        """The same, and all shared memory, also what was there before."""
        return self.peak_with_shared_bytes - self.baseline_bytes


def resident_bytes() -> int:
    """Returns this process's ``RssAnon``. Raises RuntimeMisuse: not Linux, or older than 4.5."""
    return _fields_bytes(_STATUS, "RssAnon:")[0]


def hand_back_freed_memory() -> None:
    """Makes the C allocator return free memory to the kernel; without glibc nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _set_thresholds(num_bytes: int) -> None:
    """Makes glibc map blocks from ``num_bytes`` on one by one, and trim twice that much heap."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, num_bytes)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * num_bytes)


_thresholds = [_USUAL_THRESHOLD_BYTES]
"""The last one holds outside of watches."""


def keep_large_blocks_apart() -> None:
    """Makes glibc give large blocks mappings of their own, unless they fit into a hole of the heap.

    A mapping is returned to the system when its block is freed. By default a freed block raises the
    size from which blocks are mapped, up to 32 MiB. Gradients and work space then come from the
    heap and leave holes of random size: 3 to 7 MiB in steps of 180 MiB.
    """
    if MIN_OWN_BLOCK_BYTES not in _thresholds:
        _thresholds.append(MIN_OWN_BLOCK_BYTES)
        _set_thresholds(MIN_OWN_BLOCK_BYTES)


@contextlib.contextmanager
def watch_memory() -> Iterator[MemoryWatch]:
    """Follows the process's anonymous resident memory while the block runs.

    The block runs slower than usual: its large allocations go to the kernel, whose counter behind
    ``RssAnon`` lags by up to 128 KiB per core. The baseline is read exactly. Raises RuntimeMisuse:
    as ``resident_bytes``.
    """
    _set_thresholds(_WATCHED_THRESHOLD_BYTES)
    hand_back_freed_memory()
    exact = _fields_bytes(_ROLLUP, "Anonymous:")[0] if _ROLLUP.exists() else None
    baseline = resident_bytes() if exact is None else exact
    watch = MemoryWatch(
        baseline_bytes=baseline, peak_bytes=baseline, peak_with_shared_bytes=baseline
    )
    stop = threading.Event()
    sampler = threading.Thread(target=_sample, args=(watch, stop), daemon=True)
    usual_interval_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    sampler.start()
    try:
        yield watch
    finally:
        stop.set()
        sampler.join()
        sys.setswitchinterval(usual_interval_s)
        _set_thresholds(_thresholds[-1])


def _sample(watch: MemoryWatch, stop: threading.Event) -> None:
    """Raises the peaks of ``watch`` until ``stop`` is set, and once more then."""
    is_last = False
    while not is_last:
        is_last = stop.wait(SAMPLE_PERIOD_S)
        anonymous, shared = _fields_bytes(_STATUS, "RssAnon:", "RssShmem:")
        watch.peak_bytes = max(watch.peak_bytes, anonymous)
        watch.peak_with_shared_bytes = max(watch.peak_with_shared_bytes, anonymous + shared)


def _fields_bytes(path: Path, *names: str) -> tuple[int, ...]:
    """Returns the values of ``Name:  123 kB`` lines of a file of /proc, in bytes."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise RuntimeMisuse(f"cannot measure memory: {error}; this needs Linux's /proc") from error
    values = {line.split()[0]: line.split()[1] for line in lines if line.startswith(names)}
    for name in names:
        if name not in values:
            raise RuntimeMisuse(
                f"cannot measure memory: {path} has no {name} line; Linux 4.5 or newer has"
            )
    return tuple(int(values[name]) * 1024 for name in names)
