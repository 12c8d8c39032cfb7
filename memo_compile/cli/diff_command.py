"""``memo diff A.json B.json``: what changed between two plans, or two problems."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from memo_compile.cli.options import AsJson, format_table, read_data
from memo_compile.errors import InputError
from memo_compile.reporting.differences import Differences, differences
from memo_compile.step.plans import Plan
from memo_compile.step.problem import Problem
from memo_compile.text_files import read_json

MAX_ROWS = 40
"""Most rows of each kind in the table; ``--json`` has all."""


def diff_files(
    first_file: Annotated[Path, typer.Argument(metavar="A.json", help="A plan or a problem.")],
    second_file: Annotated[Path, typer.Argument(metavar="B.json", help="Another of its kind.")],
    as_json: AsJson = False,
) -> None:
    """Show what changed between two plans or two problems: numbers, decisions, offsets.

    How long planning took does not count. Exit 0 when they are equal, 1 otherwise.
    """
    first, second = _read(first_file), _read(second_file)
    if type(first) is not type(second):
        raise InputError(
            f"{second_file}: expected a {type(first).__name__} like {first_file}, "
            f"got a {type(second).__name__}"
        )
    found = differences(first, second)
    equal, kind = not any(found.values()), type(first).__name__.lower()
    if as_json:
        print(json.dumps({"equal": equal, "kind": kind, **as_dict(found)}))
    else:
        print(f"equal {kind}s" if equal else as_text(found))
    raise typer.Exit(0 if equal else 1)


def as_dict(found: Differences) -> dict[str, Any]:
    """``found`` as plain data."""
    return {group: [change._asdict() for change in changes] for group, changes in found.items()}


def _read(path: Path) -> Plan | Problem:
    """The plan or the problem in ``path``, whichever the file says it is."""
    content = read_json(path)
    kind = content.get("kind") if isinstance(content, dict) else None
    if kind == Plan.__name__:
        return read_data(path, Plan)
    if kind == Problem.__name__:
        return read_data(path, Problem)
    raise InputError(f"{path}: expected a plan.json or a problem.json of memo")


def as_text(found: Differences) -> str:
    """A table for each group in which something changed, at most MAX_ROWS rows each."""
    tables = []
    for group, changes in found.items():
        rows = [["-" if v is None else str(v) for v in row] for row in changes[:MAX_ROWS]]
        table = format_table((group, "first", "second"), rows)
        more = len(changes) - MAX_ROWS
        if rows:
            tables.append(table + (f"\n... and {more} more; --json has them" if more > 0 else ""))
    return "\n\n".join(tables)
