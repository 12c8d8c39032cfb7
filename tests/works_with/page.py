"""docs/works-with.md: the tables between its marks, made from what was tried."""

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memo_compile.units import format_bytes
from tests.works_with.row import ROWS, Row

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "works-with.md"
BEGIN, END = "<!-- table: works_with -->\n", "<!-- end of the table -->\n"
Outcomes = Mapping[str, Mapping[str, Any]]


def results(lowering: str) -> Path:
    """The file of what was tried with kernels made in that way."""
    return Path(__file__).parent / f"results_{lowering}.json"


def kept(lowering: str = "aten") -> dict[str, dict[str, Any]]:
    """What was tried so far, by the row's name."""
    path = results(lowering)
    return json.loads(path.read_text()) if path.exists() else {}


def written() -> str:
    """The page with the tables of what was tried."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return "".join((before, BEGIN, "\n".join(_tables()), END, rest.partition(END)[2]))


def _tables() -> Iterator[str]:
    outcomes, compiled = kept(), kept("inductor")
    for section, rows in itertools.groupby(ROWS.values(), lambda row: row.section):
        yield from _table(section, list(rows), outcomes)
    if compiled:
        rows_of_it = [row for row in ROWS.values() if row.name in compiled]
        yield from _table("Compiled by Inductor", rows_of_it, compiled)


def _table(section: str, rows: list[Row], outcomes: Outcomes) -> Iterator[str]:
    tried = [outcomes[row.name] for row in rows if row.name in outcomes]
    versions = {f"{name} {v}" for each in tried for name, v in each["versions"].items()}
    yield f"\n## {section}\n"
    yield f"With {', '.join(sorted(versions))}.\n" if versions else "Not tried here.\n"
    yield "| what | numbers | right | planned | least budget | tried | remarks |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        yield f"| {' | '.join([row.name, row.dtype, *_cells(row, outcomes.get(row.name))])} |"
    yield ""


def _cells(row: Row, outcome: Mapping[str, Any] | None) -> list[str]:
    if outcome is None:
        reason = f"not tried: needs {row.needs}" if row.needs else "not tried here"
        return ["", "", "", reason, row.remark]
    right = {True: "yes", False: "**no**", None: "raised"}[outcome["right"]]
    active = "yes" if outcome["active"] else "no"
    return [right, active, _least(outcome), outcome["date"], "; ".join(_remarks(row, outcome))]


def _least(outcome: Mapping[str, Any]) -> str:
    if outcome.get("budget_bytes"):
        return f"keeps {format_bytes(outcome['budget_bytes'])}"
    if not outcome.get("bounded"):
        return "unbounded" if "bounded" in outcome else "not tried"
    floor, peak = outcome["floor_bytes"], outcome["peak_bytes"]
    return f"{floor / peak:.2f} of {format_bytes(peak)}"


def _remarks(row: Row, outcome: Mapping[str, Any]) -> Iterator[str]:
    if row.remark:
        yield row.remark
    if outcome.get("layers"):
        yield f"layers: {' + '.join(map(str, outcome['layers']))}"
    if outcome.get("graphs", 1) > 1:
        yield f"{outcome['graphs']} graphs"
    if row.example:
        yield f"`examples/tools/{row.example[0]}`"
    note = outcome.get("note") or (not row.remark and "; ".join(outcome.get("notes", [])[-1:]))
    if note:
        yield note.replace("|", "/")[:160]
