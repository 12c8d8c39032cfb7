"""The files of a dump folder: report, trace, snapshot, the plan and its problem as JSON."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

from memo_compile.reporting.html import render_html
from memo_compile.reporting.plots import can_plot, write_plots
from memo_compile.reporting.snapshot import memory_snapshot
from memo_compile.reporting.trace import chrome_trace
from memo_compile.step.movable import StepCosts
from memo_compile.step.plans import Plan
from memo_compile.step.problem import Problem
from memo_compile.step.serialise import to_json
from memo_compile.text_files import named

PICTURES: tuple[tuple[str, Callable[[Problem, Plan], bytes]], ...] = (
    ("problem.json", lambda problem, plan: to_json(problem).encode()),
    ("plan.json", lambda problem, plan: to_json(plan).encode()),
    ("report.html", lambda problem, plan: render_html(problem, plan).encode()),
    ("plan.trace.json", lambda problem, plan: json.dumps(chrome_trace(problem, plan)).encode()),
    ("plan.snapshot.pickle", lambda problem, plan: pickle.dumps(memory_snapshot(problem, plan))),
)
"""File name -> what it holds, in the order in which they are written."""


COSTS = "costs.json"
"""What ``memo replay`` simulates with."""


def write_pictures(
    folder: Path, problem: Problem, plan: Plan, costs: StepCosts | None = None
) -> tuple[Path, ...]:
    """``folder`` holds every picture of ``plan``; returns the files.

    Memory curve and arena map as SVG and PNG come too where matplotlib is installed (the extra
    ``plot``); ``costs``, where given, as costs.json.

    Raises:
        InputError: the folder cannot be written, or the plan is not one of this problem.
    """
    written = []
    with named(folder, "written"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in PICTURES:
            (folder / name).write_bytes(content(problem, plan))
            written.append(folder / name)
        if costs is not None:
            (folder / COSTS).write_text(to_json(costs))
            written.append(folder / COSTS)
        if can_plot():
            written.extend(write_plots(folder, problem, plan))
    return tuple(written)
