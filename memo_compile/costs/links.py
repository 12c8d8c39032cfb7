"""Reads and keeps the seconds of collectives, for each process group of a machine."""

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from memo_runtime.collectives import TimedCollective

from memo_compile.costs.hardware_measure import machine
from memo_compile.errors import InputError
from memo_compile.file_store import FileStore
from memo_compile.step.serialise import restore


def label(timed: TimedCollective) -> str:
    """Names ``timed``, equally on all ranks of its group: ``all_reduce sum float32 4096 B``."""
    kind, reduce_op = timed.collective.kind.value, timed.collective.reduce_op
    splits = [timed.collective.input_splits, timed.collective.output_splits]
    words = [kind, *([reduce_op] if reduce_op else []), *(str(split) for split in splits if split)]
    return " ".join([*words, timed.dtype, f"{timed.num_bytes} B"])


def group_fingerprint(
    device: torch.device,
    *,
    backend: str,
    places: list[list[int]],
    num_ranks: int,
    link_bytes_per_s: float | None,
) -> dict[str, Any]:
    """Returns what the seconds of a process group's collectives depend on.

    ``places`` are host and rank of each member, counted from the first; ``num_ranks`` is of the
    whole job, ``link_bytes_per_s`` the speed that the user declares; None: not declared.
    """
    return {
        **machine(device),
        "num_threads": torch.get_num_threads(),
        "backend": backend,
        "places": places,
        "num_ranks": num_ranks,
        "link_bytes_per_s": link_bytes_per_s,
    }


def read_seconds(store: FileStore, fingerprint: Mapping[str, Any]) -> dict[str, float]:
    """Returns the kept seconds by label of a collective; empty: none are usable."""
    for body in store.read(_key(fingerprint)):
        with contextlib.suppress(InputError):
            seconds = restore(body, Mapping[str, float], "collectives")
            return {name: float(s) for name, s in seconds.items() if 0 <= s < math.inf}
    return {}


def add_seconds(
    store: FileStore, fingerprint: Mapping[str, Any], seconds: Mapping[str, float]
) -> None:
    """Adds ``seconds`` to the kept ones."""
    store.write(_key(fingerprint), {**read_seconds(store, fingerprint), **seconds})


def _key(fingerprint: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"kind": "collectives", **fingerprint}
