"""The files of a dump folder: report, trace, snapshot, the plan and its problem as JSON."""

import json
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path

from memo_compile.reporting.html import render_html
from memo_compile.reporting.snapshot import memory_snapshot
from memo_compile.reporting.trace import chrome_trace
from memo_compile.step.movable import StepCosts
from memo_compile.step.plans import Plan
from memo_compile.step.problem import Problem
from memo_compile.step.serialise import to_json
from memo_compile.text_files import named


def write_pictures(
    folder: Path,
    problem: Problem,
    plan: Plan,
    costs: StepCosts | None = None,
    about: Mapping[str, str] | None = None,
) -> tuple[Path, ...]:
    """Writes every picture of ``plan`` to ``folder``; returns the files.

    ``costs``, where given, come as costs.json; ``about`` is for the head of the page. Raises
    InputError: the folder cannot be written, or the plan is not one of this problem.
    """
    written = []
    with named(folder, "written"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in _files(problem, plan, costs, about):
            (folder / name).write_bytes(content)
            written.append(folder / name)
    return tuple(written)


def _files(
    problem: Problem, plan: Plan, costs: StepCosts | None, about: Mapping[str, str] | None
) -> Iterator[tuple[str, bytes]]:
    """Yields (file name, content), in the order in which they are written."""
    yield "problem.json", to_json(problem).encode()
    yield "plan.json", to_json(plan).encode()
    yield "report.html", render_html(problem, plan, about).encode()
    yield "plan.trace.json", json.dumps(chrome_trace(problem, plan)).encode()
    yield "plan.snapshot.pickle", pickle.dumps(memory_snapshot(problem, plan))
    if costs is not None:
        yield "costs.json", to_json(costs).encode()
