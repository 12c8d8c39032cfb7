"""Placement problems as files: minimalloc's CSV, and JSON; in and out.

CSV: a header, then one buffer a line. Columns ``id`` (or ``buffer``, ``buffer_id``), ``lower`` (or
``start``), ``upper`` (or ``end``, the LAST time of the life instead of the first after it),
``size``; optional ``alignment``, ``offset`` (fixed), ``hint``, and ``gaps`` as ``7-8 9-10``. A gap
with a window (``7-8@0:16``: those bytes stay in use) is not used: the buffer keeps its bytes, which
is valid and may cost height.
"""

import csv
import io
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memo_compile.errors import InputError
from memo_compile.planners.placement.placement_problem import (
    Buffer,
    PlacementProblem,
    fixed_collisions,
)
from memo_compile.step.serialise import restore
from memo_compile.text_files import read_json, read_text

_log = logging.getLogger(__name__)

_ALIASES = {"buffer": "id", "buffer_id": "id", "start": "lower"}
_REQUIRED = ("id", "lower", "upper", "size")
_OPTIONAL = ("alignment", "gaps", "hint", "offset")
_GAP = re.compile(r"^(-?\d+)-(-?\d+)(@-?\d+:-?\d+)?$")


def read_problem(
    path: Path, *, capacity: int | None = None, alignment: int = 1
) -> PlacementProblem:
    """The problem in ``path``: JSON by its suffix ``.json``, else CSV.

    ``capacity`` (bytes) and ``alignment`` (bytes) override what a JSON file says where given.
    Raises InputError: unreadable or malformed; the message starts with file:line (CSV) or file.
    """
    if path.suffix.lower() != ".json":
        return parse_csv(read_text(path), str(path), capacity=capacity, alignment=alignment)
    data = read_json(path)
    try:
        problem: PlacementProblem = restore(data, PlacementProblem, "problem")
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return replace(
        problem,
        capacity=problem.capacity if capacity is None else capacity,
        alignment=problem.alignment if alignment == 1 else alignment,
    )


def parse_csv(
    text: str, name: str = "<csv>", *, capacity: int | None = None, alignment: int = 1
) -> PlacementProblem:
    """The problem in CSV ``text``; ``name`` is how errors call the file.

    Raises InputError: ``name``:line and the field; also for duplicate ids and colliding offsets.
    """
    rows = csv.reader(io.StringIO(text))
    columns = _header(next(rows, []), name)
    line_of: dict[str, int] = {}
    buffers = []
    num_windows = 0
    for row in rows:
        where = f"{name}:{rows.line_num}"
        if not any(cell.strip() for cell in row):
            continue
        buffer = _buffer(row, columns, where, alignment)
        if buffer.id in line_of:
            raise InputError(
                f"{where}: id: {buffer.id!r} was used on line {line_of[buffer.id]} already"
            )
        line_of[buffer.id] = rows.line_num
        buffers.append(buffer)
        if "gaps" in columns:
            num_windows += row[columns.index("gaps")].count("@")
    if num_windows:
        _log.warning(
            "memo: %s: gaps: %d with a window are not used: their buffers keep all bytes, so a "
            "lower height or a fit may be missed",
            name,
            num_windows,
        )
    for colliding in fixed_collisions(buffers):
        first, second = sorted(colliding, key=lambda b: line_of[b.id])
        raise InputError(
            f"{name}:{line_of[second.id]}: offset: {second.id!r} at {second.offset} overlaps "
            f"{first.id!r} at {first.offset} (line {line_of[first.id]}) while both are live"
        )
    return PlacementProblem(buffers=tuple(buffers), capacity=capacity, alignment=alignment)


def _header(cells: Sequence[str], name: str) -> list[str]:
    """The names of the columns, without aliases. Raises InputError: one is missing or unknown."""
    where = f"{name}:1"
    raw = [cell.strip().lower() for cell in cells]
    if not any(raw):
        raise InputError(f"{where}: empty; expected a header such as {','.join(_REQUIRED)}")
    columns = [_ALIASES.get(cell, cell) for cell in raw]
    for column in columns:
        if column not in (*_REQUIRED, *_OPTIONAL, "end"):
            accepted = ", ".join(_REQUIRED + _OPTIONAL)
            raise InputError(f"{where}: unknown column {column!r}; expected some of {accepted}")
        if columns.count(column) > 1:
            raise InputError(f"{where}: column {column!r} occurs twice")
    if "upper" in columns and "end" in columns:
        raise InputError(f"{where}: columns 'upper' and 'end' exclude each other")
    for column in _REQUIRED:
        if column not in columns and not (column == "upper" and "end" in columns):
            raise InputError(f"{where}: column {column!r} is missing")
    return columns


def _buffer(row: Sequence[str], columns: Sequence[str], where: str, alignment: int) -> Buffer:
    """The buffer of one line, which errors call ``where``; ``alignment`` is the problem's."""
    if len(row) != len(columns):
        raise InputError(f"{where}: expected {len(columns)} cells, got {len(row)}")
    cells = {column: cell.strip() for column, cell in zip(columns, row, strict=True)}
    if not cells["id"]:
        raise InputError(f"{where}: id: empty")
    if "end" in cells:
        cells["upper"] = str(_integer(cells["end"], "end", where) + 1)
    integers: dict[str, Any] = {
        key: _integer(cells[key], key, where)
        for key in ("lower", "upper", "size", "alignment", "offset", "hint")
        if cells.get(key) or key in _REQUIRED
    }
    gaps = _gaps(cells.get("gaps", ""), where)
    try:
        buffer = Buffer(id=cells["id"], gaps=gaps, **integers)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    if buffer.offset is not None and buffer.offset % alignment:
        raise InputError(
            f"{where}: offset: {buffer.offset} is not a multiple of the alignment {alignment}"
        )
    return buffer


def _integer(text: str, column: str, where: str) -> int:
    """The number in a cell. Raises InputError: it is none, or too large for the solvers."""
    try:
        value = int(text)
    except ValueError:
        raise InputError(f"{where}: {column}: expected an integer, got {text!r}") from None
    if abs(value) >= 2**62:
        raise InputError(f"{where}: {column}: expected less than 2^62, got {text}")
    return value


def _gaps(text: str, where: str) -> tuple[tuple[int, int], ...]:
    """The gaps in a cell, but for those with a window."""
    gaps = []
    for word in text.split():
        match = _GAP.match(word)
        if match is None:
            raise InputError(f"{where}: gaps: expected spans such as 7-8, got {word!r}")
        if match.group(3) is None:
            gaps.append((int(match.group(1)), int(match.group(2))))
    return tuple(sorted(gaps))


def format_csv(problem: PlacementProblem, offsets: Mapping[str, int] | None = None) -> str:
    """CSV text of ``problem``; with ``offsets`` (bytes by id) the column ``offset`` holds those.

    Optional columns appear only where some buffer uses them.
    """
    offset_of = {b.id: b.offset for b in problem.buffers} if offsets is None else dict(offsets)
    used = {
        "alignment": any(b.alignment != 1 for b in problem.buffers),
        "gaps": any(b.gaps for b in problem.buffers),
        "hint": any(b.hint is not None for b in problem.buffers),
        "offset": any(offset_of.get(b.id) is not None for b in problem.buffers),
    }
    columns = [*_REQUIRED, *(column for column in _OPTIONAL if used[column])]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for b in problem.buffers:
        cells: dict[str, object] = {name: getattr(b, name) for name in (*_REQUIRED, *_OPTIONAL)}
        cells["gaps"] = " ".join(f"{lower}-{upper}" for lower, upper in b.gaps)
        cells["offset"] = offset_of.get(b.id)
        writer.writerow(["" if cells[c] is None else cells[c] for c in columns])
    return out.getvalue()
