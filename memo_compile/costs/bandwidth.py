"""Measures how fast this machine copies between a device and the host; keeps the result on disk.

Nominal figures are never believed: MEMO's own tables imply 10 to 12 GB/s where it states 32.
"""

import logging
import math
import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch
from memo_runtime.arena import arena_of
from memo_runtime.copies import Lane, engine_of
from memo_runtime.host_store import FILE_PREFIX, HostStore
from memo_runtime.pinned_memory import HostStoreError

from memo_compile.config import user_store
from memo_compile.costs.hardware_measure import device_name, machine, run_times
from memo_compile.costs.host import free_disk_bytes
from memo_compile.errors import InputError
from memo_compile.step.serialise import restore
from memo_compile.units import format_bytes

log = logging.getLogger("memo")

COPY_BYTES = 64 * 2**20
"""Size of a timed copy: above most last-level caches; 1 ms over PCIe 5.0, long beside a launch."""

SMALL_BYTES = 4096
"""Size of a copy whose time is all latency."""

REPEATS = 5
"""Runs of each copy; the median counts. Together 10 ms on a GPU, 100 ms on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyBandwidth:
    """The speed of copies between one device and the host, one direction at a time."""

    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    latency_s: float
    """Seconds from the issue to the end of a copy of a few bytes."""
    source: str

    def __post_init__(self) -> None:
        for name in ("d2h_bytes_per_s", "h2d_bytes_per_s", "latency_s"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (value == 0 and name != "latency_s"):
                raise ValueError(f"{name}: expected a number above 0, got {value!r}")


def copy_bandwidth(device: torch.device, kind: str) -> CopyBandwidth:
    """Returns the speed of copies to host memory of ``kind``: kept on disk, or measured now.

    Where memory cannot be pinned, that of pageable memory, which steps use then. The kept speed
    holds for one version of torch, device, driver and host.
    """
    store, key = user_store(), _store_key(device, kind)
    for body in () if store is None else store.read(key):
        try:
            kept: CopyBandwidth = restore(body, CopyBandwidth, "copies")
            return kept
        except (InputError, ValueError) as error:
            log.info("memo: copies are timed again: %s", error)
    try:
        measured = measure_copies(device, kind)
    except HostStoreError as error:
        if kind != "pinned":
            raise
        log.warning("memo: copies are timed with pageable memory: %s", error)
        return copy_bandwidth(device, "shm")
    if store is not None:
        store.write(key, asdict(measured))
    return measured


def measure_copies(device: torch.device, kind: str) -> CopyBandwidth:
    """Times copies with the engine that steps use and host memory of ``kind``.

    Files are timed in the system's page cache; a disk may be slower in the long run. Raises
    HostStoreError: the host refused even 64 MiB of it, or half of what a smaller disk has free.
    """
    arena_of(device).host.wait()  # what is being pinned would take the link's time
    num_bytes = _timed_bytes(kind)
    store = HostStore(kind, num_bytes)
    on_device = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    host = store.bytes(num_bytes)
    try:
        latency_s = _copy_s(device, Lane.D2H, host[:SMALL_BYTES], on_device[:SMALL_BYTES])
        d2h_s = _copy_s(device, Lane.D2H, host, on_device)
        h2d_s = _copy_s(device, Lane.H2D, on_device, host)
    finally:
        del host
        store.close()
    places = f"{device_name(device)} and {store.kind}"
    return CopyBandwidth(
        d2h_bytes_per_s=num_bytes / _above(d2h_s, latency_s),
        h2d_bytes_per_s=num_bytes / _above(h2d_s, latency_s),
        latency_s=latency_s,
        source=f"measured: {format_bytes(num_bytes)} between {places}",
    )


def _timed_bytes(kind: str) -> int:
    """Returns the size of a timed copy: on a disk that is nearly full, half of what is free."""
    if not kind.startswith(FILE_PREFIX):
        return COPY_BYTES
    free_bytes = free_disk_bytes(kind.removeprefix(FILE_PREFIX))
    return max(SMALL_BYTES, min(COPY_BYTES, free_bytes // 2))


def _above(seconds: float, latency_s: float) -> float:
    """Returns the seconds of the transfer alone, at least half: latency is measured with noise."""
    return max(seconds - latency_s, seconds / 2)


def _copy_s(
    device: torch.device, lane: Lane, destination: torch.Tensor, source: torch.Tensor
) -> float:
    """Returns the median seconds of a copy; the first run, which touches new pages, is left out."""
    engine = engine_of(device)

    def run() -> None:
        ticket = engine.issue(lane, destination, source)
        engine.wait(ticket)
        if ticket.event is not None:  # CUDA: the wait held up a stream, not the host
            ticket.event.synchronize()

    return statistics.median(run_times(run, runs=REPEATS))


def _store_key(device: torch.device, kind: str) -> dict[str, Any]:
    """Returns what a measurement depends on: the key under which the disk keeps it."""
    place = f"{device.type}:{device.index or 0}"
    depends = {**machine(device), "place": place, "copy_bytes": COPY_BYTES, "host_store": kind}
    return {"kind": "copies", **depends}
