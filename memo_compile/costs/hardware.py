"""Declared profiles of named GPUs: what a device can do, in FLOP/s, bytes/s and bytes.

Figures are the makers' nominal ones for one device, links in one direction: half of what is
printed. Those of A100, H100, H200, B200, L40S and 4090, and the links of A800 and H800, were
compared with sellers' listings in November 2026, not with the documents themselves. A step reaches
a part of them (docs/many-gpus.md); ``memo hardware measure`` writes what this machine reaches.
"""

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from memo_compile.costs.host import RESERVE_FRACTION
from memo_compile.errors import InputError
from memo_compile.text_files import read_json

GIB = 2**30

PROFILE_SCHEMA_VERSION = 1
"""Version of the fields in a profile's JSON file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureSource:
    """The source of a figure."""

    document: str
    date: str
    """``YYYY``, ``YYYY-MM`` or ``YYYY-MM-DD``: when the document appeared, or of the measuring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """One device with its links. All rates are per device, per direction."""

    name: str
    peak_flops_per_s: float
    """Dense bfloat16 with float32 accumulation."""
    hbm_bytes_per_s: float
    memory_bytes: int
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    link_bytes_per_s: float
    """Bytes per second between devices of one machine."""
    network_bytes_per_s: float
    """Bytes per second between machines, for each device."""
    devices_per_node: int
    host_memory_bytes: int = 256 * 10**9
    """Memory of the machine, for each of its devices."""
    comm_slowdown: float = 1.0
    """Computation takes so many times as long while a collective runs beside it."""
    source: str
    """The document behind every figure that ``figure_sources`` does not name."""
    date: str = "undated"
    """When ``source`` appeared."""
    figure_sources: Mapping[str, FigureSource] = field(default_factory=dict, hash=False)
    """Field -> where that figure comes from, where it is not ``source``."""

    def __post_init__(self) -> None:
        for name in FIGURES:
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise InputError(f"{name}: expected more than 0, got {value}")
        if self.comm_slowdown < 1:
            raise InputError(f"comm_slowdown: expected at least 1, got {self.comm_slowdown}")
        for name in self.figure_sources:
            if name not in FIGURES:
                raise InputError(f"figure_sources: no figure is called {name!r}")

    @property
    def usable_host_bytes(self) -> int:
        """What a step may take of the host, by default: others need a tenth.

        None of a CPU's: a copy to the host would take the very memory that it frees.
        """
        return 0 if self.name == "cpu" else int(self.host_memory_bytes * (1 - RESERVE_FRACTION))

    def source_of(self, figure: str) -> FigureSource:
        """Returns the document and date behind one of FIGURES."""
        assert figure in FIGURES, f"not a figure: {figure}"
        return self.figure_sources.get(figure, FigureSource(document=self.source, date=self.date))


FIGURES: Mapping[str, Any] = {
    figure.name: figure.type
    for figure in dataclasses.fields(HardwareProfile)
    if figure.type in (float, int)
}
"""The fields of a profile that are numbers, each with its type."""

ADDED = frozenset({"comm_slowdown", "host_memory_bytes"})
"""Figures that a file of an earlier memo lacks."""


class _Stated(NamedTuple):
    """Bytes per second in each direction, or bytes, and who states them."""

    value: float
    document: str
    date: str


_PCIE4 = _Stated(32e9, "PCI-SIG, PCI Express Base Specification 4.0, 16 lanes", "2017-10")
"""Nominal bytes per second; MEMO's own tables imply that 10 to 12e9 are reached."""

_PCIE5 = _Stated(64e9, "PCI-SIG, PCI Express Base Specification 5.0, 16 lanes", "2019-05")
_DGX_A100 = _Stated(25e9, "NVIDIA DGX A100 datasheet: a 200 Gb/s adapter for each GPU", "2020-05")
_DGX_H100 = _Stated(50e9, "NVIDIA DGX H100 datasheet: a 400 Gb/s adapter for each GPU", "2022-03")
_DGX_H200 = _Stated(50e9, "NVIDIA DGX H200 datasheet: a 400 Gb/s adapter for each GPU", "2023-11")
_ASSUMED_200G = _Stated(25e9, "assumed: a 200 Gb/s adapter for each GPU, as beside A100", "2026-11")
_OVER_PCIE4 = _Stated(32e9, "no NVLink: devices meet over PCIe 4.0, 16 lanes", "2017-10")
_A800_LINK = _Stated(200e9, "NVIDIA's statement on the A800: NVLink 400 GB/s both ways", "2022-11")
_H800_LINK = _Stated(200e9, "press on the H800: NVLink 400 GB/s both ways", "2023-03")
_TWO_TB = "2 TB of system memory for 8 GPUs"
_A100_RAM = _Stated(256e9, f"NVIDIA DGX A100 640GB datasheet: {_TWO_TB}", "2020-11")
_H100_RAM = _Stated(256e9, f"NVIDIA DGX H100 and H200 datasheets: {_TWO_TB}", "2022-03")
_B200_RAM = _Stated(256e9, f"NVIDIA DGX B200 datasheet: {_TWO_TB}, or 4 TB", "2024")
_L40S_RAM = _Stated(128e9, "assumed: 1 TB of memory in a server with 8 cards", "2026-11")
_4090_RAM = _Stated(64e9, "assumed: 64 GB of memory for each card", "2026-11")


def _gpu(
    name: str,
    tflops: float,
    hbm: float,
    memory_bytes: int,
    document: str,
    date: str,
    *,
    host: _Stated,
    ram: _Stated,
    link: float | _Stated,
    network: float | _Stated,
    talking: tuple[int, int],
) -> HardwareProfile:
    """Returns the profile of a GPU; a rate that is a mere number is in ``document`` too.

    ``hbm`` is in bytes per second. ``talking`` is (multiprocessors that a collective's channels
    hold, all multiprocessors): the others do all computation meanwhile.
    """
    held, total = talking
    channels = f"assumed: a collective's {held} channels hold {held} of {total} multiprocessors"
    sources = {
        "comm_slowdown": FigureSource(document=channels, date="2026-11"),
        "host_memory_bytes": FigureSource(document=ram.document, date=ram.date),
    }
    rates = {}
    for path, rate in {"d2h": host, "h2d": host, "link": link, "network": network}.items():
        figure = f"{path}_bytes_per_s"
        rates[figure] = rate.value if isinstance(rate, _Stated) else rate
        if isinstance(rate, _Stated):
            sources[figure] = FigureSource(document=rate.document, date=rate.date)
    if network is _ASSUMED_200G:  # a card that makers sell alone
        server = FigureSource(document="assumed: a server with 8 cards", date="2026-11")
        sources["devices_per_node"] = server
    return HardwareProfile(
        name=name,
        peak_flops_per_s=tflops * 1e12,
        hbm_bytes_per_s=hbm,
        memory_bytes=memory_bytes,
        devices_per_node=8,
        host_memory_bytes=int(ram.value),
        comm_slowdown=total / (total - held),
        source=document,
        date=date,
        figure_sources=sources,
        **rates,
    )


_A100 = "NVIDIA A100 80GB SXM datasheet"
_H100 = "NVIDIA H100 SXM datasheet"
_B200 = "NVIDIA DGX B200 datasheet, one eighth of the machine"

# fmt: off
_GPUS = (
    _gpu("a800", 312, 2.039e12, 80 * GIB, f"{_A100}; the A800 is the same chip", "2021-06",
         host=_PCIE4, ram=_A100_RAM, link=_A800_LINK, network=_DGX_A100, talking=(24, 108)),
    _gpu("a100", 312, 2.039e12, 80 * GIB, _A100, "2021-06",
         host=_PCIE4, ram=_A100_RAM, link=300e9, network=_DGX_A100, talking=(24, 108)),
    _gpu("h100", 989.4, 3.35e12, 80 * GIB, f"{_H100} and Hopper whitepaper", "2022",
         host=_PCIE5, ram=_H100_RAM, link=450e9, network=_DGX_H100, talking=(16, 132)),
    _gpu("h800", 989.4, 3.35e12, 80 * GIB, f"{_H100}; the H800 is the same chip", "2022",
         host=_PCIE5, ram=_H100_RAM, link=_H800_LINK, network=_DGX_H100, talking=(16, 132)),
    _gpu("h200", 989.4, 4.8e12, 141 * 10**9, "NVIDIA H200 SXM datasheet", "2024",
         host=_PCIE5, ram=_H100_RAM, link=450e9, network=_DGX_H200, talking=(16, 132)),
    _gpu("b200", 2250, 8e12, 180 * 10**9, _B200, "2024",
         host=_PCIE5, ram=_B200_RAM, link=900e9, network=50e9, talking=(16, 148)),
    _gpu("l40s", 362.05, 0.864e12, 48 * GIB, "NVIDIA L40S datasheet", "2023",
         host=_PCIE4, ram=_L40S_RAM, link=_OVER_PCIE4, network=_ASSUMED_200G, talking=(4, 142)),
    _gpu("4090", 165.2, 1.008e12, 24 * GIB, "NVIDIA Ada architecture whitepaper 2.02", "2022",
         host=_PCIE4, ram=_4090_RAM, link=_OVER_PCIE4, network=_ASSUMED_200G, talking=(4, 128)),
)
# fmt: on

_CPU = HardwareProfile(
    name="cpu",
    peak_flops_per_s=100e9,
    hbm_bytes_per_s=20e9,
    memory_bytes=16 * GIB,
    d2h_bytes_per_s=10e9,
    h2d_bytes_per_s=10e9,
    link_bytes_per_s=10e9,
    network_bytes_per_s=1e9,
    devices_per_node=1,
    host_memory_bytes=16 * GIB,
    source="assumed: order of magnitude of two server cores in float32; measure your own",
    date="2026-11",
)

HARDWARE: dict[str, HardwareProfile] = {profile.name: profile for profile in (*_GPUS, _CPU)}
"""Every named profile."""


def find_hardware(name: str) -> HardwareProfile:
    """Returns the profile called ``name``, or the one in the JSON file of that path.

    Case, a leading maker or ``rtx`` and separators of a name do not matter. A path ends in
    ``.json`` or has a separator. Raises InputError: an unknown name (the message lists the names),
    or a file that is no profile.
    """
    if name.endswith(".json") or os.sep in name:
        return read_profile(Path(name))
    key = re.sub(r"[\s_-]+|nvidia|geforce|rtx", "", name.lower())
    if key in HARDWARE:
        return HARDWARE[key]
    near = difflib.get_close_matches(key, HARDWARE, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise InputError(
        f"hardware: unknown {name!r}; {hint}known: {', '.join(HARDWARE)}, "
        "or the path of a profile that `memo hardware measure` wrote"
    )


def declared_for(device: str) -> HardwareProfile | None:
    """Returns the profile of a device's name (``NVIDIA A100-SXM4-80GB``); None: there is none."""
    words = re.split(r"[\s_-]+", device.lower())
    return next((HARDWARE[word] for word in words if word in HARDWARE), None)


def hardware_of(device: str) -> HardwareProfile:
    """Returns the named profile of ``device``; of an unknown one an A100's, whose name says so.

    Only ratios of its times are used then; memory is never read from it.
    """
    stand_in = dataclasses.replace(HARDWARE["a100"], name=f"a100 in place of {device}")
    return declared_for(device) or stand_in


def profile_to_dict(profile: HardwareProfile) -> dict[str, Any]:
    """Returns each figure with its value, document and date; ``read_profile`` reads it back."""
    figures = {
        name: {"value": getattr(profile, name), **dataclasses.asdict(profile.source_of(name))}
        for name in FIGURES
    }
    return {
        "schema_version": PROFILE_SCHEMA_VERSION,
        "name": profile.name,
        "source": profile.source,
        "date": profile.date,
        "figures": figures,
    }


def read_profile(path: Path) -> HardwareProfile:
    """Returns the profile in a JSON file as ``profile_to_dict`` makes it.

    Raises InputError: no such file, not JSON, or a figure is missing or no number; it is named.
    """
    body = read_json(path)
    if not isinstance(body, dict) or body.get("schema_version") != PROFILE_SCHEMA_VERSION:
        raise InputError(
            f"{path}:1: expected a profile with schema_version {PROFILE_SCHEMA_VERSION}; "
            "`memo hardware measure --out FILE.json` writes one"
        )
    try:
        return _profile_of(body)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _profile_of(body: Mapping[str, Any]) -> HardwareProfile:
    """Returns the profile that JSON's ``body`` holds. Raises InputError, as ``read_profile``."""
    figures = body.get("figures")
    if not isinstance(figures, dict):
        raise InputError("figures: expected an object with a value, document and date for each")
    values: dict[str, Any] = {}
    sources: dict[str, FigureSource] = {}
    for name, number_type in FIGURES.items():
        entry = figures.get(name)
        if entry is None and name in ADDED:  # the field's default counts
            document = f"assumed: the file has no {name}"
            sources[name] = FigureSource(document=document, date="undated")
            continue
        entry = entry if isinstance(entry, dict) else {}
        value = entry.get("value")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"figures.{name}.value: expected a number, got {value!r}")
        if not math.isfinite(value):
            raise InputError(f"figures.{name}.value: expected a finite number, got {value}")
        values[name] = number_type(value)
        sources[name] = FigureSource(**_texts(entry, f"figures.{name}", "document", "date"))
    texts = _texts(body, "profile", "name", "source", "date")
    return HardwareProfile(figure_sources=sources, **texts, **values)


def _texts(entry: Mapping[str, Any], where: str, *keys: str) -> dict[str, Any]:
    """Returns the texts of ``entry`` under ``keys``. Raises InputError: one is missing."""
    for key in keys:
        value = entry.get(key)
        if not isinstance(value, str) or not value:
            raise InputError(f"{where}.{key}: expected a text, got {value!r}")
    return {key: entry[key] for key in keys}
