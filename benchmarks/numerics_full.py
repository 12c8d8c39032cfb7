"""The result of ``make numerics-full`` as a table and as JSON.

``python -m benchmarks.numerics_full JUNIT.xml...`` reads what pytest wrote and counts the cases of
every test and model: how many passed, failed and were skipped. A case that is in several reports
(it was mended and run again) counts as in the last. Exit 1 when one failed.
"""

import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test case of pytest's report."""

    file: str
    test: str
    model: str
    """The first part of the case's name, which is the model in every test of this kind."""
    name: str
    outcome: str
    seconds: float


def main() -> int:
    """Read the reports, print the table, write the result."""
    parser = harness.parser(__doc__)
    parser.add_argument("reports", nargs="+", type=Path, help="pytest's --junitxml files")
    options = parser.parse_args()
    found = (case for path in options.reports for case in read(path.read_text()))
    cases = list({(case.file, case.test, case.name): case for case in found}.values())
    rows = counted(cases)
    failed = [f"{case.test}[{case.name}]" for case in cases if case.outcome in ("failure", "error")]
    columns = ("test", "model", "passed", "failed", "skipped", "seconds")
    harness.print_table("make numerics-full", columns, [tuple(map(str, row)) for row in rows])
    payload: dict[str, Any] = {
        "hardware": harness.hardware(),
        "num_cases": len(cases),
        "rows": [dict(zip(columns, row, strict=True)) for row in rows],
        "failures": failed,
    }
    return harness.conclude("numerics_full", payload, save=not options.no_save) if cases else 1


def read(report: str) -> Iterator[Case]:
    """The cases of a JUnit report."""
    for element in ET.fromstring(report).iter("testcase"):
        test, _, name = element.attrib["name"].removesuffix("]").partition("[")
        outcomes = [child.tag for child in element if child.tag in ("failure", "error", "skipped")]
        yield Case(
            file=element.attrib["classname"],
            test=test,
            model=name.partition("-")[0],
            name=name,
            outcome=outcomes[0] if outcomes else "passed",
            seconds=float(element.attrib["time"]),
        )


def counted(cases: Iterable[Case]) -> list[tuple[str, str, int, int, int, int]]:
    """Per test and model: passed, failed, skipped, seconds of all cases together."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.test, case.model), []).append(case)
    return [
        (
            *key,
            sum(case.outcome == "passed" for case in group),
            sum(case.outcome in ("failure", "error") for case in group),
            sum(case.outcome == "skipped" for case in group),
            round(sum(case.seconds for case in group)),
        )
        for key, group in sorted(groups.items())
    ]


if __name__ == "__main__":
    sys.exit(main())
