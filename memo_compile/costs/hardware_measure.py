"""Measures a profile of this machine by timed matrix products and copies.

Each figure is the best of several runs: what the device can do when nothing else uses it. Figures
that one process cannot time (the network, a link to an absent device) come from the named profile
of the same device, or are assumed; their source says so.
"""

import datetime
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memo_compile.costs.hardware import FigureSource, HardwareProfile, declared_for
from memo_compile.costs.host import host_memory, processor_name
from memo_compile.errors import InputError

MIN_RUNS = 3
"""Fewest runs of one kernel, however long they take."""

BUDGET_S = 0.5
"""Seconds of runs of one kernel: enough that other processes do not disturb every run."""

MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of a timed product: 20 ms on two cores, 2 ms on the fastest GPU."""

COPY_BYTES = 256 * 2**20
"""Size of a timed copy: above every last-level cache, so memory is timed; 16 ms on PCIe 4.0."""

ASSUMED_NETWORK_BYTES_PER_S = {"cpu": 1e9, "cuda": 25e9}
"""Bytes per second per device: a CPU has 10 Gb/s Ethernet, each GPU one 200 Gb/s adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Times kernels on one device; ``say`` announces each measurement."""

    device: torch.device
    say: Callable[[str], None]

    def best_s(self, what: str, kernel: Callable[[], object]) -> float:
        """Seconds of the fastest run of ``kernel`` after one run to warm up."""
        self.say(what)

        def run() -> None:
            kernel()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        return min(run_times(run, runs=MIN_RUNS, budget_s=BUDGET_S))

    def flops_per_s(self) -> float:
        """FLOPs per second of a square matrix product: bfloat16 on a GPU, float32 on a CPU."""
        size = MATMUL_SIZE[self.device.type]
        dtype = matmul_dtype(self.device)
        left = torch.randn(size, size, device=self.device).to(dtype)
        right = torch.randn(size, size, device=self.device).to(dtype)
        out = torch.empty(size, size, device=self.device, dtype=dtype)
        return 2 * size**3 / self.best_s("matrix product", lambda: torch.mm(left, right, out=out))

    def copy_bytes_per_s(self) -> float:
        """Memory traffic of a copy within the device: every byte is read and written."""
        source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * COPY_BYTES / self.best_s("device memory", lambda: target.copy_(source))

    def host_bytes_per_s(self) -> tuple[float, float]:
        """Device to host and host to device, with a pinned host buffer on a GPU."""
        pinned = self.device.type == "cuda"
        host = torch.ones(COPY_BYTES, dtype=torch.uint8, pin_memory=pinned)
        local = torch.ones(COPY_BYTES, dtype=torch.uint8, device=self.device)
        d2h_s = self.best_s("device to host", lambda: host.copy_(local, non_blocking=True))
        h2d_s = self.best_s("host to device", lambda: local.copy_(host, non_blocking=True))
        return COPY_BYTES / d2h_s, COPY_BYTES / h2d_s

    def link_bytes_per_s(self) -> float | None:
        """Bytes per second to another device of the machine; None when this one is alone."""
        if self.device.type != "cuda" or torch.cuda.device_count() < 2:
            return None
        index = self.device.index or 0
        other = torch.device("cuda", 1 if index == 0 else 0)
        local = torch.ones(COPY_BYTES, dtype=torch.uint8, device=self.device)
        far = torch.empty(COPY_BYTES, dtype=torch.uint8, device=other)

        def copy() -> None:
            far.copy_(local, non_blocking=True)
            torch.cuda.synchronize(other)

        return COPY_BYTES / self.best_s("link between devices", copy)


def run_times(run: Callable[[], object], *, runs: int, budget_s: float = 0.0) -> list[float]:
    """Seconds of at least ``runs`` runs that last ``budget_s`` together, after one to warm up."""
    run()
    times: list[float] = []
    while len(times) < runs or sum(times) < budget_s:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return times


def matmul_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype of ``peak_flops_per_s``: the one that models are trained in there."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def pick_device(name: str | None) -> torch.device:
    """Returns ``cpu``, ``cuda`` or ``cuda:N``; None: the first GPU, else the CPU.

    Raises InputError: there is no such GPU.
    """
    if name is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise InputError(f"device: this machine has {torch.cuda.device_count()} GPUs, not {name!r}")
    return torch.device("cuda", index)


def measure_hardware(
    device: torch.device, *, say: Callable[[str], None] = lambda what: None
) -> HardwareProfile:
    """Measures ``device`` in a few seconds. Takes 768 MiB on it, 256 MiB on the host.

    Raises InputError: the machine does not say how much memory it has.
    """
    bench = Bench(device=device, say=say)
    name = device_name(device)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    flops_per_s, memory_bytes_per_s = bench.flops_per_s(), bench.copy_bytes_per_s()
    d2h_bytes_per_s, h2d_bytes_per_s = bench.host_bytes_per_s()
    link_bytes_per_s = bench.link_bytes_per_s()
    num_devices = max(1, torch.cuda.device_count()) if device.type == "cuda" else 1
    figures: dict[str, Any] = {
        "peak_flops_per_s": flops_per_s,
        "hbm_bytes_per_s": memory_bytes_per_s,
        "memory_bytes": memory_bytes(device),
        "d2h_bytes_per_s": d2h_bytes_per_s,
        "h2d_bytes_per_s": h2d_bytes_per_s,
        "link_bytes_per_s": link_bytes_per_s or d2h_bytes_per_s,
        "network_bytes_per_s": ASSUMED_NETWORK_BYTES_PER_S[device.type],
        "comm_slowdown": 1.0,
        "devices_per_node": num_devices,
        "host_memory_bytes": memory_bytes(torch.device("cpu")) // num_devices,
    }
    documents = _documents(device, linked=link_bytes_per_s is not None)
    sources = {f: FigureSource(document=text, date=today) for f, text in documents.items()}
    # What is assumed is the named profile's; that of the CPU is itself assumed and adds nothing.
    named = declared_for(name) if device.type == "cuda" else None
    if named is not None:
        for figure in (f for f, text in documents.items() if text.startswith("assumed")):
            figures[figure], sources[figure] = getattr(named, figure), named.source_of(figure)
    return HardwareProfile(
        name=name,
        source=f"measured on {name} with torch {torch.__version__}",
        date=today,
        figure_sources=sources,
        **figures,
    )


def _documents(device: torch.device, *, linked: bool) -> dict[str, str]:
    """Returns the source of each figure; ``linked``: the link to another device was measured."""
    dtype = str(matmul_dtype(device)).removeprefix("torch.")
    size, mib = MATMUL_SIZE[device.type], COPY_BYTES >> 20
    host = "pinned host memory" if device.type == "cuda" else "a host buffer"
    alone = "assumed: as fast as device to host; there is one device to measure"
    return {
        "peak_flops_per_s": f"measured: product of two {size} x {size} {dtype} matrices",
        "hbm_bytes_per_s": f"measured: copy of {mib} MiB, read and written",
        "memory_bytes": "as the system states it",
        "d2h_bytes_per_s": f"measured: copy of {mib} MiB into {host}",
        "h2d_bytes_per_s": f"measured: copy of {mib} MiB from {host}",
        "link_bytes_per_s": "measured: copy to another device" if linked else alone,
        "network_bytes_per_s": "assumed: a single machine cannot measure it",
        "comm_slowdown": "assumed: a device by itself talks to nobody",
        "devices_per_node": "as the system states it",
        "host_memory_bytes": "as the system states it, over its devices",
    }


def device_name(device: torch.device) -> str:
    """Returns the maker's name of the device."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return processor_name()


def machine(device: torch.device) -> dict[str, Any]:
    """Returns what every measurement on ``device`` depends on."""
    return {
        "torch": torch.__version__,
        "device": device_name(device),
        "driver": _driver_version() if device.type == "cuda" else None,
        "host": platform.node(),
        "num_cpus": os.cpu_count(),
    }


def _driver_version() -> str:
    """Returns the version of NVIDIA's kernel module; where /proc has none, of torch's CUDA."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return f"cuda {torch.version.cuda}"


def memory_bytes(device: torch.device) -> int:
    """Returns all memory of the device; of a CPU, the host's or its control group's limit.

    Raises InputError: the host does not say.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    memory = host_memory()
    limits = [b for b in (memory.total_bytes, memory.cgroup_limit_bytes) if b is not None]
    if not limits:
        raise InputError("memory_bytes: this host does not say how much memory it has")
    return min(limits)
