"""``memo doctor``: what is installed, what works, what is missing and how to get it."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from memo_compile.cli.options import AsJson
from memo_compile.offline import checkup
from memo_compile.offline.checkup import Finding, Health


def doctor(as_json: AsJson = False) -> None:
    """Look at versions, devices, solvers, compiler and host memory; exit 1 when memo cannot run."""
    findings = tuple(checkup.examine())
    if as_json:
        print(json.dumps(as_dict(findings), indent=2))
    else:
        _print_table(findings)
    raise typer.Exit(code=0 if can_run(findings) else 1)


def can_run(findings: Sequence[Finding]) -> bool:
    """Returns whether memo works here: nothing that it needs is broken."""
    return all(finding.health is not Health.BROKEN for finding in findings)


def as_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    """Returns plain data: ``ok``, ``missing`` (names), and each group's findings by name."""
    groups: dict[str, dict[str, Any]] = {}
    for finding in findings:
        entry = {**asdict(finding), "health": finding.health.value}
        del entry["group"], entry["name"]
        groups.setdefault(finding.group, {})[finding.name] = entry
    missing = [finding.name for finding in findings if finding.remedy]
    return {"ok": can_run(findings), "missing": missing, **groups}


_STYLES = {Health.OK: "green", Health.LIMITED: "yellow", Health.BROKEN: "bold red"}


def _print_table(findings: Sequence[Finding]) -> None:
    """Prints a row for each finding, then what to do, then whether memo can run."""
    console = Console(highlight=False)
    table = Table(title="memo doctor", title_justify="left")
    for column in ("", "what", "found", ""):
        table.add_column(column)
    group = ""
    for finding in findings:
        label = ""  # a group's name stands beside its first finding only
        if finding.group != group:
            table.add_section()
            group = label = finding.group
        style = _STYLES[finding.health]
        table.add_row(
            label, finding.name, escape(finding.text), f"[{style}]{finding.health.value}[/]"
        )
    console.print(table)
    for finding in findings:
        if finding.remedy:
            style = _STYLES[finding.health]
            console.print(f"[{style}]{finding.name}[/]: {escape(finding.remedy)}", soft_wrap=True)
    works = can_run(findings)
    console.print("memo can run here." if works else "[bold red]memo cannot run here.[/]")
