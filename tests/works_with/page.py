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
RESULTS = Path(__file__).parent / "results.json"
BEGIN, END = "<!-- table: works_with -->\n", "<!-- end of the table -->\n"
Outcomes = Mapping[str, Mapping[str, Any]]


def kept() -> dict[str, dict[str, Any]]:
    """What was tried so far, by the row's name."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def written(outcomes: Outcomes) -> str:
    """The page with the tables of ``outcomes``."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}{tables(outcomes)}{END}{rest.partition(END)[2]}"


def tables(outcomes: Outcomes) -> str:
    return "\n".join(
        line
        for section, rows in itertools.groupby(ROWS.values(), lambda row: row.section)
        for line in _table(section, list(rows), outcomes)
    )


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
        return ["", "", "", "not tried here", row.remark]
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
    note = outcome.get("note") or "; ".join(outcome.get("notes", [])[-1:])
    if note:
        yield note.replace("|", "/")[:160]
