"""Measurements in the user's cache, each for the machine and software that it was made on."""

import json
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from memo_compile.costs.hardware_measure import device_name

log = logging.getLogger("memo")

T = TypeVar("T")


def machine(device: torch.device) -> dict[str, Any]:
    """What every measurement on ``device`` holds for."""
    return {
        "torch": torch.__version__,
        "device": device_name(device),
        "driver": _driver_version() if device.type == "cuda" else None,
        "host": platform.node(),
        "num_cpus": os.cpu_count(),
    }


def _driver_version() -> str:
    """The version of NVIDIA's kernel module; what torch was built with where /proc is silent."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return f"cuda {torch.version.cuda}"


def read(
    path: Path, fingerprint: Mapping[str, Any], what: str, restored: Callable[[Any], T]
) -> T | None:
    """What ``restored`` makes of the entry ``what`` of ``path``.

    None where the file is missing, damaged, or of another ``fingerprint``.
    """
    try:
        content = json.loads(path.read_text())
        return restored(content[what]) if content["fingerprint"] == fingerprint else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.info("memo: %s is not used, %s are timed again: %s", path, what, error)
        return None


def write(path: Path, fingerprint: Mapping[str, Any], what: str, measured: Any) -> None:
    """Remember ``measured``; another process sees the whole file or the old one."""
    text = json.dumps({"fingerprint": fingerprint, what: measured}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            whole = Path(folder) / path.name
            whole.write_text(text)
            os.replace(whole, path)
    except OSError as error:
        log.info("memo: what was measured of %s is not remembered: %s", what, error)
