"""What a device can do: declared profiles of named GPUs, in FLOP/s, bytes/s and bytes.

Figures are the makers' nominal ones for one device, attributed to the document and year in
``source``; those of A100, H100, H200, B200, L40S were compared with sellers' listings in November
2026, not with the documents themselves. A step reaches a part of them (docs/many-gpus.md), and a
measured profile replaces them where one exists. Links are one direction: half of what is printed.
"""

import difflib
import re
from dataclasses import dataclass

from memo_compile.errors import InputError

GIB = 2**30

_PCIE4_BYTES_PER_S = 32e9
"""16 lanes of PCIe 4.0, each direction. MEMO's own tables imply 10 to 12e9 of it in use."""

_PCIE5_BYTES_PER_S = 64e9
"""16 lanes of PCIe 5.0, each direction."""

_NETWORK_200G_BYTES_PER_S = 25e9
"""One 200 Gb/s adapter for each GPU, usual beside A100."""

_NETWORK_400G_BYTES_PER_S = 50e9
"""One 400 Gb/s adapter for each GPU, usual beside H100 and later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """One device with its links. All rates are per device, per direction."""

    name: str
    peak_flops_per_s: float
    """Dense bfloat16 with float32 accumulation."""
    hbm_bytes_per_s: float
    memory_bytes: int
    d2h_bytes_per_s: float
    """Device to host, nominal."""
    h2d_bytes_per_s: float
    """Host to device, nominal."""
    link_bytes_per_s: float
    """Between devices of one machine."""
    network_bytes_per_s: float
    """Between machines, for each device."""
    devices_per_node: int
    source: str

    def __post_init__(self) -> None:
        for field in (
            "peak_flops_per_s",
            "hbm_bytes_per_s",
            "memory_bytes",
            "d2h_bytes_per_s",
            "h2d_bytes_per_s",
            "link_bytes_per_s",
            "network_bytes_per_s",
            "devices_per_node",
        ):
            if not getattr(self, field) > 0:
                raise InputError(f"{field}: expected more than 0, got {getattr(self, field)}")


def _gpu(
    name: str,
    tflops: float,
    hbm: float,
    memory_bytes: int,
    host: float,
    link: float,
    network: float,
    source: str,
) -> HardwareProfile:
    return HardwareProfile(
        name=name,
        peak_flops_per_s=tflops * 1e12,
        hbm_bytes_per_s=hbm,
        memory_bytes=memory_bytes,
        d2h_bytes_per_s=host,
        h2d_bytes_per_s=host,
        link_bytes_per_s=link,
        network_bytes_per_s=network,
        devices_per_node=8,
        source=source,
    )


HARDWARE: dict[str, HardwareProfile] = {
    profile.name: profile
    for profile in (
        _gpu(
            "a800",
            312,
            2.039e12,
            80 * GIB,
            _PCIE4_BYTES_PER_S,
            200e9,
            _NETWORK_200G_BYTES_PER_S,
            "NVIDIA A100 80GB SXM datasheet (June 2021); NVLink 400 GB/s both ways on the A800",
        ),
        _gpu(
            "a100",
            312,
            2.039e12,
            80 * GIB,
            _PCIE4_BYTES_PER_S,
            300e9,
            _NETWORK_200G_BYTES_PER_S,
            "NVIDIA A100 80GB SXM datasheet (June 2021)",
        ),
        _gpu(
            "h100",
            989.4,
            3.35e12,
            80 * GIB,
            _PCIE5_BYTES_PER_S,
            450e9,
            _NETWORK_400G_BYTES_PER_S,
            "NVIDIA H100 SXM datasheet and Hopper whitepaper (2022)",
        ),
        _gpu(
            "h800",
            989.4,
            3.35e12,
            80 * GIB,
            _PCIE5_BYTES_PER_S,
            200e9,
            _NETWORK_400G_BYTES_PER_S,
            "NVIDIA H100 SXM datasheet (2022); NVLink 400 GB/s both ways on the H800",
        ),
        _gpu(
            "h200",
            989.4,
            4.8e12,
            141 * 10**9,
            _PCIE5_BYTES_PER_S,
            450e9,
            _NETWORK_400G_BYTES_PER_S,
            "NVIDIA H200 SXM datasheet (2024)",
        ),
        _gpu(
            "b200",
            2250,
            8e12,
            180 * 10**9,
            _PCIE5_BYTES_PER_S,
            900e9,
            _NETWORK_400G_BYTES_PER_S,
            "NVIDIA DGX B200 datasheet (2024), one eighth of the machine",
        ),
        _gpu(
            "l40s",
            362.05,
            0.864e12,
            48 * GIB,
            _PCIE4_BYTES_PER_S,
            _PCIE4_BYTES_PER_S,
            _NETWORK_200G_BYTES_PER_S,
            "NVIDIA L40S datasheet (2023); no NVLink, devices meet over PCIe",
        ),
        _gpu(
            "4090",
            165.2,
            1.008e12,
            24 * GIB,
            _PCIE4_BYTES_PER_S,
            _PCIE4_BYTES_PER_S,
            _NETWORK_200G_BYTES_PER_S,
            "NVIDIA Ada architecture whitepaper 2.02 (2022); no NVLink, devices meet over PCIe",
        ),
        HardwareProfile(
            name="cpu",
            peak_flops_per_s=100e9,
            hbm_bytes_per_s=20e9,
            memory_bytes=16 * GIB,
            d2h_bytes_per_s=10e9,
            h2d_bytes_per_s=10e9,
            link_bytes_per_s=10e9,
            network_bytes_per_s=1e9,
            devices_per_node=1,
            source="order of magnitude of two server cores in float32; measure your own",
        ),
    )
}
"""Every named profile."""


def find_hardware(name: str) -> HardwareProfile:
    """The profile called ``name``; case, a leading maker or ``rtx`` and separators do not matter.

    Raises:
        InputError: unknown; the message lists the names.
    """
    key = re.sub(r"[\s_-]+|nvidia|geforce|rtx", "", name.lower())
    if key in HARDWARE:
        return HARDWARE[key]
    near = difflib.get_close_matches(key, HARDWARE, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise InputError(f"hardware: unknown {name!r}; {hint}known: {', '.join(HARDWARE)}")
