"""Properties of GPUs that torch and Inductor ask for, to lower a step for a GPU that is not here.

Figures are NVIDIA's: the CUDA C++ Programming Guide's table of compute capabilities (shared memory,
threads), the whitepapers of Ampere, Hopper, Ada (processors, L2). None was compared with a card; of
H200 and B200 the L2 cache is as others have printed it.
"""

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass

MIB = 2**20
KIB = 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One kind of GPU, as cudaDeviceProp has it."""

    device_name: str
    major: int
    """Of the compute capability."""
    minor: int
    num_processors: int
    l2_bytes: int
    """Inductor writes as much between two timings of a kernel."""
    shared_bytes: int
    """Shared memory of a multiprocessor."""
    block_shared_bytes: int
    """The most of it that a block can ask for."""
    processor_threads: int

    @property
    def capability(self) -> int:
        """Such as 90."""
        return 10 * self.major + self.minor


def _gpu(name: str, capability: int, processors: int, l2_bytes: int) -> GpuFacts:
    """Returns a GPU's facts; shared memory and threads follow from its compute capability."""
    shared_kib, threads = {80: (164, 2048), 89: (100, 1536), 90: (228, 2048), 100: (228, 2048)}[
        capability
    ]
    return GpuFacts(
        device_name=name,
        major=capability // 10,
        minor=capability % 10,
        num_processors=processors,
        l2_bytes=l2_bytes,
        shared_bytes=shared_kib * KIB,
        block_shared_bytes=(shared_kib - 1) * KIB,
        processor_threads=threads,
    )


GPUS: Mapping[str, GpuFacts] = {
    "a100": _gpu("NVIDIA A100-SXM4-80GB", 80, 108, 40 * MIB),
    "a800": _gpu("NVIDIA A800-SXM4-80GB", 80, 108, 40 * MIB),
    "h100": _gpu("NVIDIA H100 80GB HBM3", 90, 132, 50 * MIB),
    "h800": _gpu("NVIDIA H800", 90, 132, 50 * MIB),
    "h200": _gpu("NVIDIA H200", 90, 132, 60 * MIB),
    "b200": _gpu("NVIDIA B200", 100, 148, 132_644_864),
    "l40s": _gpu("NVIDIA L40S", 89, 142, 96 * MIB),
    "4090": _gpu("NVIDIA GeForce RTX 4090", 89, 128, 72 * MIB),
}
"""By the names of ``hardware.GPUS``."""


def target_of(hardware: str) -> GpuFacts | None:
    """Returns the GPU to lower a step for; None: it is unknown, or ``missing_for_target``."""
    return None if missing_for_target() else GPUS.get(hardware)


def missing_for_target() -> str:
    """Names what is not installed but needed to write kernels for an absent GPU; or ""."""
    if (version_of("torch") or "").endswith("+cpu"):
        return "a CUDA build of torch"
    return "" if version_of("triton") else "triton"


def version_of(package: str) -> str | None:
    """Returns the installed version; None: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
