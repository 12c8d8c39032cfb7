"""``memo replay DUMP_DIR``: place, check, simulate and draw a dumped step once more, anywhere."""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from memo_compile.cli.diff_command import Differences, as_dict, as_text, differences
from memo_compile.cli.options import AsJson, read_data
from memo_compile.cli.progress import working
from memo_compile.errors import InputError
from memo_compile.planners.place_step import place_step
from memo_compile.reporting.write import write_pictures
from memo_compile.step.movable import StepCosts
from memo_compile.step.plans import ReportedPlan
from memo_compile.step.problem import Problem
from memo_compile.step.program_text import program_text
from memo_compile.step.simulate import simulate
from memo_compile.units import format_bytes, format_seconds


def replay(
    folder: Annotated[
        Path, typer.Argument(metavar="DUMP_DIR", help="Holds problem.json and plan.json.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Write plan and pictures to this folder.")
    ] = None,
    solver: Annotated[
        str, typer.Option(metavar="auto|greedy|mip|search", help="How offsets are found.")
    ] = "auto",
    time_limit: Annotated[float, typer.Option(min=0.0, help="Seconds for the placement.")] = 5.0,
    program: Annotated[
        bool, typer.Option("--program", help="Print the step program, and do nothing else.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Plan the step of a dump again, without torch, and say whether the same plan comes out.

    The stages: problem.json -> placement -> check -> simulation (where costs.json is there) ->
    pictures (--out). Exit 0 when the plan equals plan.json, 1 when it differs.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; expected one that options dump wrote")
    problem = read_data(folder / "problem.json", Problem)
    if program:
        print(program_text(problem), end="")
        raise typer.Exit
    before = read_data(folder / "plan.json", ReportedPlan)
    costs_file = folder / "costs.json"
    costs = read_data(costs_file, StepCosts) if costs_file.is_file() else None
    with working("planning again"):
        after = _replan(problem, before, costs, solver, time_limit)
    if out is not None:
        for path in write_pictures(out, problem, after, costs):
            print(f"wrote {path}", file=sys.stderr)
    changes = differences(before, after)
    if as_json:
        print(json.dumps(_as_dict(changes, after)))
    else:
        print(_as_text(changes, after, is_simulated=costs is not None))
    raise typer.Exit(1 if any(changes.values()) else 0)


_PLACED = (
    "offsets arena_bytes lower_bound_bytes outside_bytes_by_kind peak_bytes fixed layer_classes "
    "resident_bytes solver num_regions check"
).split()
"""Fields of a plan that follow from its problem alone."""


def _replan(
    problem: Problem,
    before: ReportedPlan,
    costs: StepCosts | None,
    solver: str,
    time_limit_s: float,
) -> ReportedPlan:
    """Places, checks and simulates ``problem``; what follows from decisions is as in ``before``."""
    start = time.perf_counter()
    placed = place_step(
        dataclasses.replace(problem, releases_pages=before.releases_pages),
        name=before.name,
        solver=solver,
        time_limit_s=time_limit_s,
        decisions=before.decisions,
        budget_bytes=before.budget_bytes,
    )
    planning_s = time.perf_counter() - start
    timeline = before.timeline if costs is None else simulate(problem, costs)
    return dataclasses.replace(
        before,
        timeline=timeline,
        planning_s=planning_s,
        **{name: getattr(placed, name) for name in _PLACED},
    )


def _as_dict(changes: Differences, plan: ReportedPlan) -> dict[str, Any]:
    return {
        "equal": not any(changes.values()),
        "arena_bytes": plan.arena_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "peak_bytes": plan.peak_bytes,
        "step_s": plan.timeline.step_s if plan.timeline else None,
        "check": str(plan.check),
        "solver": plan.solver,
        "seconds": plan.planning_s,
        **as_dict(changes),
    }


def _as_text(changes: Differences, plan: ReportedPlan, *, is_simulated: bool) -> str:
    """Returns a line for each stage, then the verdict, and what differs."""
    needed = f"at least {format_bytes(plan.lower_bound_bytes)} needed"
    lines = [
        f"placement   {format_bytes(plan.arena_bytes)} by {plan.solver} in "
        f"{format_seconds(plan.planning_s)}, {needed}",
        f"check       {plan.check}",
    ]
    if is_simulated and plan.timeline is not None:
        step, stall = plan.timeline.step_s, plan.timeline.stall_s
        lines.append(f"simulation  {format_seconds(step)}, {format_seconds(stall)} of it stalled")
    else:
        lines.append("simulation  skipped: the dump has no costs.json")
    if not any(changes.values()):
        return "\n".join([*lines, "the plan equals plan.json"])
    verdict = "the plan differs from plan.json (first: the file)"
    return "\n".join([*lines, verdict, as_text(changes)])
