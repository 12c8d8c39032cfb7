"""``memo diff A.json B.json``: what changed between two plans, or two problems."""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from memo_compile.cli.options import AsJson, format_table, read_data
from memo_compile.errors import InputError
from memo_compile.step.plans import Plan
from memo_compile.step.problem import Problem
from memo_compile.step.serialise import plain
from memo_compile.text_files import read_json

MAX_ENTRIES = 6
"""With more changed entries of one sequence (``resident_bytes``) only the first is listed."""


class Difference(NamedTuple):
    """One value that changed; None stands for a value that one side does not have."""

    what: str
    first: Any
    second: Any


Differences = Mapping[str, list[Difference]]
"""Group -> changes: ``numbers``, a plan's ``decisions`` and ``offsets``, a problem's ``parts``."""


def differences(first: Plan | Problem, second: Plan | Problem) -> Differences:
    """Returns the changes from ``first`` to ``second``, which are two plans or two problems."""
    before, after = (_grouped(data) for data in (first, second))
    return {
        group: [
            change
            for name in dict.fromkeys([*before[group], *after[group]])
            for change in _changes(name, before[group].get(name), after[group].get(name))
        ]
        for group in before
    }


def _grouped(data: Plan | Problem) -> dict[str, dict[str, Any]]:
    """Returns the fields of ``data`` as JSON has them, by group of ``Differences`` and by name."""
    fields = dataclasses.fields(Plan if isinstance(data, Plan) else Problem)
    numbers = {field.name: plain(getattr(data, field.name)) for field in fields}
    decisions: dict[str, str] = {}
    parts: dict[str, Any] = {}
    if isinstance(data, Plan):
        for row in numbers.pop("decisions"):
            name = f"{row['layer_class']}: {row['tensor']}"
            words = f"{row['decision']} of {row['token_fraction']:.1%} of tokens, {row['bytes']} B"
            decisions[name] = f"{decisions[name]} + {words}" if name in decisions else words
    else:
        for kind in ("region", "tensor"):
            of_kind = numbers.pop(f"{kind}s")
            parts.update((f"{kind} {name}", part) for name, part in of_kind.items())
        calls = numbers.pop("calls")
        parts.update((f"call {call['name']}", call) for call in calls)
        parts["order of calls"] = [call["name"] for call in calls]
    offsets = numbers.pop("offsets", {})
    return {"numbers": numbers, "decisions": decisions, "offsets": offsets, "parts": parts}


def _changes(what: str, first: Any, second: Any) -> Iterator[Difference]:
    """Yields the innermost entries that differ; of a long sequence the first, and how many more."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key in dict.fromkeys([*first, *second]):
            yield from _changes(f"{what}.{key}", first.get(key), second.get(key))
    elif isinstance(first, list) and isinstance(second, list):
        pairs = enumerate(itertools.zip_longest(first, second))
        changes = [change for i, pair in pairs for change in _changes(f"{what}[{i}]", *pair)]
        if len(changes) > MAX_ENTRIES:
            changes = [changes[0]._replace(what=f"{changes[0].what} and {len(changes) - 1} more")]
        yield from changes
    elif first != second:
        yield Difference(what, *("there" if isinstance(v, dict) else v for v in (first, second)))


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
    changes = differences(first, second)
    equal, kind = not any(changes.values()), type(first).__name__.lower()
    if as_json:
        print(json.dumps({"equal": equal, "kind": kind, **as_dict(changes)}))
    else:
        print(f"equal {kind}s" if equal else as_text(changes))
    raise typer.Exit(0 if equal else 1)


def as_dict(differences: Differences) -> dict[str, Any]:
    """``differences`` as plain data for JSON."""
    return {
        group: [change._asdict() for change in changes] for group, changes in differences.items()
    }


def _read(path: Path) -> Plan | Problem:
    """Returns the plan or the problem in ``path``. Raises InputError: the file holds neither."""
    content = read_json(path)
    kind = content.get("kind") if isinstance(content, dict) else None
    if kind == Plan.__name__:
        return read_data(path, Plan)
    if kind == Problem.__name__:
        return read_data(path, Problem)
    raise InputError(f"{path}: expected a plan.json or a problem.json of memo")


def as_text(differences: Differences) -> str:
    """Returns a table for each group in which something changed, of at most MAX_ROWS rows."""
    tables = []
    for group, changes in differences.items():
        rows = [["-" if v is None else str(v) for v in row] for row in changes[:MAX_ROWS]]
        table = format_table((group, "first", "second"), rows)
        omitted = len(changes) - MAX_ROWS
        if rows:
            tail = f"\n... and {omitted} more; --json has them" if omitted > 0 else ""
            tables.append(table + tail)
    return "\n\n".join(tables)
