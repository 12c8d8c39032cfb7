"""Reading measured steps from CSV: one row per run, with the configuration and its speed.

Columns (other names in brackets): model, seq [seqlen], gpus, global_batch [gbs], tp, cp, pp,
layers_per_chunk [layers_per_vstage], checkpoint [ckpt], alpha, and tokens_per_s or iteration_s.
"""

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memo_compile.costs.models import ModelShape, find_model
from memo_compile.errors import InputError, MemoError
from memo_compile.papers.kwai.offload import Checkpoint, ParallelConfig, divide_gpus
from memo_compile.text_files import read_text

_NAMES = {
    **{name: (name,) for name in ("model", "gpus", "tp", "cp", "pp", "alpha")},
    "seq": ("seq", "seqlen"),
    "global_batch": ("global_batch", "gbs"),
    "layers_per_chunk": ("layers_per_chunk", "layers_per_vstage"),
    "checkpoint": ("checkpoint", "ckpt"),
}

_POLICIES = {
    **{policy.value: policy for policy in Checkpoint},
    "no": Checkpoint.NONE,
    "ours": Checkpoint.BALANCED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One measured run."""

    shape: ModelShape
    seq: int
    global_batch: int
    config: ParallelConfig
    alpha: float
    iteration_s: float


def read_measurements(path: Path) -> tuple[Measurement, ...]:
    """Returns the runs in ``path``, at least one.

    Raises InputError: the file cannot be read, a column is missing, or a value cannot be used; the
    message starts with file:line.
    """
    reader = csv.DictReader(read_text(path).splitlines())
    header = [name.strip() for name in reader.fieldnames or ()]
    reader.fieldnames = header
    columns = {field: _column(path, header, names) for field, names in _NAMES.items()}
    if not {"tokens_per_s", "iteration_s"} & set(header):
        raise InputError(f"{path}:1: expected a column tokens_per_s or iteration_s")
    rows = []
    for row in reader:
        where = f"{path}:{reader.line_num}"
        if None in row.values() or None in row:
            raise InputError(f"{where}: expected {len(header)} values")
        try:
            rows.append(_measurement(row, columns))
        except MemoError as error:
            raise InputError(f"{where}: {error}") from error
    if not rows:
        raise InputError(f"{path}: expected at least one measured run")
    return tuple(rows)


def _column(path: Path, header: list[str], names: tuple[str, ...]) -> str:
    for name in names:
        if name in header:
            return name
    raise InputError(f"{path}:1: missing column {' or '.join(names)}")


def _measurement(row: dict[str, str], columns: dict[str, str]) -> Measurement:
    """Returns the run in ``row``; ``columns`` has each field's name in this file."""

    def value(field: str, kind: Callable[[str], float]) -> float:
        least = 0.0 if field == "alpha" else 1.0
        return _number(columns[field], row[columns[field]].strip(), kind, least)

    shape = find_model(row[columns["model"]].strip())
    policy = row[columns["checkpoint"]].strip().lower()
    if policy not in _POLICIES:
        raise InputError(
            f"{columns['checkpoint']}: expected none, balanced or full, got {policy!r}"
        )
    config = divide_gpus(
        shape,
        checkpoint=_POLICIES[policy],
        **{name: int(value(name, int)) for name in ("gpus", "tp", "cp", "pp", "layers_per_chunk")},
    )
    alpha = value("alpha", float)
    if alpha > 1:
        raise InputError(f"{columns['alpha']}: expected a share in [0, 1], got {alpha}")
    seq, batch = int(value("seq", int)), int(value("global_batch", int))
    return Measurement(
        shape=shape,
        seq=seq,
        global_batch=batch,
        config=config,
        alpha=alpha,
        iteration_s=_iteration_seconds(row, seq * batch),
    )


def _iteration_seconds(row: dict[str, str], tokens: int) -> float:
    name = "iteration_s" if row.get("iteration_s", "").strip() else "tokens_per_s"
    number = _number(name, row.get(name), float, 1e-12)
    return number if name == "iteration_s" else tokens / number


def _number(name: str, text: str | None, kind: Callable[[str], float], least: float) -> float:
    """Returns the number in column ``name``. Raises InputError: none, or less than ``least``."""
    try:
        number = kind(text or "")
    except ValueError:
        raise InputError(f"{name}: expected a number, got {text!r}") from None
    if not (math.isfinite(number) and number >= least):
        raise InputError(f"{name}: expected a finite number of at least {least:g}, got {number}")
    return number
