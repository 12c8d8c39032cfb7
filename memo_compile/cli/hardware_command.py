"""``memo hardware``: what devices can do, by whom it was said and when, and what this one can."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from memo_compile.cli.options import AsJson, example, format_table
from memo_compile.costs.hardware import HARDWARE, HardwareProfile, find_hardware, profile_to_dict
from memo_compile.errors import InputError
from memo_compile.text_files import require_writable
from memo_compile.units import format_bytes

DEFAULT_FILE = Path("memo-hardware.json")

group = typer.Typer(help="Profiles of devices: what is known, and what is here.")


@group.command(name="list", epilog=example("hardware list"))
def list_command(as_json: AsJson = False) -> None:
    """Every named profile, with its figures in one line."""
    if as_json:
        print(json.dumps({"profiles": [profile_to_dict(p) for p in HARDWARE.values()]}))
        return
    header = ("name", "TFLOP/s", "memory", "GB/s", "host", "host GB/s", "link GB/s", "network GB/s")
    rows = [
        (
            profile.name,
            f"{profile.peak_flops_per_s / 1e12:.4g}",
            format_bytes(profile.memory_bytes),
            f"{profile.hbm_bytes_per_s / 1e9:.4g}",
            format_bytes(profile.host_memory_bytes),
            f"{profile.d2h_bytes_per_s / 1e9:.4g}",
            f"{profile.link_bytes_per_s / 1e9:.4g}",
            f"{profile.network_bytes_per_s / 1e9:.4g}",
        )
        for profile in HARDWARE.values()
    ]
    print(format_table(header, rows))
    print("\nOne device, one direction, nominal. `memo hardware show NAME` says who says so.")


@group.command(name="show", epilog=example("hardware show h200"))
def show_command(
    name: Annotated[str, typer.Argument(help="A name, or the path of a measured profile.")],
    as_json: AsJson = False,
) -> None:
    """One profile: each figure with the document and the date behind it."""
    _print_profile(find_hardware(name), as_json)


@group.command(name="measure", epilog=example("hardware measure --out here.json"))
def measure_command(
    out: Annotated[
        Path | None,
        typer.Option(help=f"The file to write; default {DEFAULT_FILE}, with --json none."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; default the first GPU, else the CPU.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time matrix products and copies on this machine and write its profile (a few seconds)."""
    if out is None and not as_json:
        out = DEFAULT_FILE
    if out is not None:
        require_writable(out)
    if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise InputError(f"device: expected cpu, cuda or cuda:N, got {device!r}")
    from memo_compile.costs.hardware_measure import device_name, measure_hardware, pick_device

    torch_device = pick_device(device)
    print(f"memo: measuring {device_name(torch_device)}", file=sys.stderr, flush=True)
    _warn_if_busy()
    profile = measure_hardware(
        torch_device, say=lambda what: print(f"memo:   {what} ...", file=sys.stderr, flush=True)
    )
    if out is not None:
        out.write_text(json.dumps(profile_to_dict(profile), indent=2) + "\n")
    _print_profile(profile, as_json)
    if out is not None:
        spelled = str(out) if out.suffix == ".json" else f"./{out}"
        print(f"memo: wrote {out}; use it as --hardware {spelled}", file=sys.stderr)


def _warn_if_busy() -> None:
    """Warns on stderr where others compute here: even the best of many runs is then too slow."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 2:
        print(
            f"memo: warning: other processes use this machine (load {load:.1f} on {cores} cores); "
            "the figures will be too low, measure again when it is idle",
            file=sys.stderr,
            flush=True,
        )


def _print_profile(profile: HardwareProfile, as_json: bool) -> None:
    """Prints each figure of ``profile`` with the document and the date behind it."""
    body = profile_to_dict(profile)
    if as_json:
        print(json.dumps(body))
        return
    print(profile.name)
    rows = [
        (name, f"{figure['value']:.5g}", figure["date"], figure["document"])
        for name, figure in body["figures"].items()
    ]
    print(format_table(("figure", "value", "date", "source"), rows))
