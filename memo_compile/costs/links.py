"""How long collectives take, remembered for each process group of a machine."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from memo_runtime.collectives import TimedCollective

from memo_compile.costs import remembered
from memo_compile.file_store import digest_of


def label(timed: TimedCollective) -> str:
    """``timed`` in words, equal on all ranks of its group: ``all_reduce sum float32 4096 B``."""
    kind, reduce_op = timed.collective.kind.value, timed.collective.reduce_op
    splits = [timed.collective.input_splits, timed.collective.output_splits]
    words = [kind, *([reduce_op] if reduce_op else []), *(str(own) for own in splits if own)]
    return " ".join([*words, timed.dtype, f"{timed.num_bytes} B"])


def group_fingerprint(
    device: torch.device,
    *,
    backend: str,
    places: list[list[int]],
    num_ranks: int,
    link_bytes_per_s: float | None,
) -> dict[str, Any]:
    """What the seconds of a group's collectives hold for.

    ``places`` are host and rank of each member, counted from the first; ``num_ranks`` is of the
    whole job, ``link_bytes_per_s`` of a link that is slowed down.
    """
    return {
        **remembered.machine(device),
        "num_threads": torch.get_num_threads(),
        "backend": backend,
        "places": places,
        "num_ranks": num_ranks,
        "link_bytes_per_s": link_bytes_per_s,
    }


def read_seconds(folder: Path, fingerprint: Mapping[str, Any]) -> dict[str, float]:
    """Label of a collective -> its seconds; empty where nothing that holds is remembered."""
    return remembered.read(_path(folder, fingerprint), fingerprint, "collectives", _restored) or {}


def add_seconds(folder: Path, fingerprint: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
    """Remember ``seconds`` beside what is remembered already."""
    known = {**read_seconds(folder, fingerprint), **seconds}
    remembered.write(_path(folder, fingerprint), fingerprint, "collectives", known)


def _path(folder: Path, fingerprint: Mapping[str, Any]) -> Path:
    return folder / f"collectives-{digest_of(fingerprint)[:16]}.json"


def _restored(entries: Any) -> dict[str, float]:
    """Raises ValueError: these are no seconds."""
    if not isinstance(entries, dict):
        raise ValueError(f"expected an object, got {entries!r}")
    for name, seconds in entries.items():
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not is_number or not math.isfinite(seconds) or seconds < 0:
            raise ValueError(f"{name}: expected seconds of at least 0, got {seconds!r}")
    return {name: float(seconds) for name, seconds in entries.items()}
