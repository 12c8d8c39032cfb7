"""The emulated device's own functions: its schedule, its log, what a test says or puts into it."""

import ctypes
import enum
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch

_device = ctypes.CDLL(None)
_device.memo_device_time.restype = ctypes.c_double
_device.memo_device_shadow.restype = ctypes.c_void_p
_device.memo_device_log_read.restype = ctypes.c_long
_device.memo_device_pinned_bytes.restype = ctypes.c_long
_device.memo_device_busy.restype = ctypes.c_long
_device.memo_device_requests.restype = ctypes.c_long
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_long)


class Did(enum.IntEnum):
    """What happened, as ``device/device.h`` lists it."""

    COPY = 0
    FILL = 1
    LAUNCH = 2
    RECORD = 3
    WAIT = 4
    SYNC_STREAM = 5
    SYNC_EVENT = 6
    SYNC_ALL = 7
    FREE = 8
    READ = 9
    WRITE = 10
    MARK = 11


class Entry(NamedTuple):
    """One line of the log; ``device.h`` says what a, b and c are."""

    did: Did
    stream: int
    a: int
    b: int
    c: int


class _Entry(ctypes.Structure):
    _fields_ = [("did", ctypes.c_int32), ("stream", ctypes.c_int32)] + [
        (name, ctypes.c_int64) for name in "abc"
    ]


class Counts(NamedTuple):
    """Since the process began; bytes are of now."""

    launches: int
    triton_launches: int
    copies: int
    used_bytes: int
    peak_bytes: int
    host_copies: int
    """Copies between the device and the host."""
    graph_launches: int


def counts() -> Counts:
    found = (ctypes.c_long * len(Counts._fields))()
    _device.memo_device_counts(found)
    return Counts(*found)


def pinned_bytes() -> int:
    """Host memory that is pinned or registered now."""
    return _device.memo_device_pinned_bytes()


def limit_device(num_bytes: int) -> None:
    """The device has so many bytes from now on; 0: as at first."""
    _device.memo_device_limit(ctypes.c_size_t(num_bytes))


def refuse(first: int, number: int = -1) -> None:
    """Requests for memory are refused from ``first`` on (0: the next), ``number`` or all of them.

    Of the device's memory, and of pinned memory; torch's cache asks only where it has none.
    """
    _device.memo_device_refuse(ctypes.c_long(first), ctypes.c_long(number))


def grant() -> int:
    """No request is refused any more; returns how many there were since ``refuse``."""
    made = _device.memo_device_requests()
    refuse(-1)
    return made


def time_s() -> float:
    """The host's virtual clock."""
    return _device.memo_device_time()


def set_speeds(kernel_s: float = 0.0, link_bytes_per_s: float = 0.0) -> None:
    """From now on each kernel takes so long, and pinned copies are so fast; 0: as at first."""
    _device.memo_device_speeds(ctypes.c_double(kernel_s), ctypes.c_double(link_bytes_per_s))


def busy_s() -> list[float]:
    """Seconds of all work of each stream, by its number; 0 is the default stream."""
    found = (ctypes.c_double * _device.memo_device_busy(None, 0))()
    _device.memo_device_busy(found, len(found))
    return list(found)


def run_at_once() -> None:
    """From now on work runs when it is put into a stream."""
    _device.memo_device_schedule(0, ctypes.c_double(0.0), 0)


def run_late(chance_of_progress: float, seed: int) -> None:
    """From now on work runs when the host waits; each call makes some stream go on by chance."""
    _device.memo_device_schedule(1, ctypes.c_double(chance_of_progress), seed)


def start_log() -> None:
    """Forget what was logged, and log from now on."""
    _device.memo_device_log(1)


def stop_log() -> list[Entry]:
    """What happened since ``start_log``."""
    _device.memo_device_log(0)
    found = (_Entry * _device.memo_device_log_read(None, 0))()
    _device.memo_device_log_read(found, len(found))
    return [Entry(Did(entry.did), entry.stream, entry.a, entry.b, entry.c) for entry in found]


def say(did: Did, start: int, num_bytes: int) -> None:
    """Log that what the current stream does now reads or writes these bytes."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    _device.memo_device_says(int(did), stream, ctypes.c_void_p(start), ctypes.c_size_t(num_bytes))


def new_stream() -> torch.cuda.ExternalStream:
    """A stream outside torch's pool, whose 32 streams are given out again and again."""
    made = ctypes.c_void_p()
    if error := _device.cudaStreamCreate(ctypes.byref(made)):
        raise RuntimeError(f"CUDA error {error}")
    return torch.cuda.ExternalStream(made.value)


def shadow(address: int) -> int:
    """Where the device reads and writes ``address``."""
    return _device.memo_device_shadow(ctypes.c_void_p(address))


_waiting: dict[int, Callable[[], None]] = {}
_captured: dict[int, Callable[[], None]] = {}
"""Kernels of CUDA graphs, which may be launched again."""
_numbers = itertools.count(1)


@_FUNCTION
def _run(number: int) -> None:
    run = _captured[number] if number in _captured else _waiting.pop(number)
    run()


def launch(run: Callable[[], None]) -> None:
    """``run`` as a kernel of the current stream.

    Raises RuntimeError: an earlier call of this thread failed, as behind torch's own launches.
    """
    number = next(_numbers)
    kept = _captured if torch.cuda.is_current_stream_capturing() else _waiting
    kept[number] = run
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    _device.memo_device_call(stream, _run, ctypes.c_long(number))
    if error := _device.cudaGetLastError():
        raise RuntimeError(f"CUDA error {error}")
