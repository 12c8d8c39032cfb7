"""``memo compare PLAN.json SNAPSHOT.pickle``: was the planned peak kept?"""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from memo_compile.cli.options import AsJson, format_table, read_data
from memo_compile.reporting.compare import (
    NUM_LARGEST,
    TOLERANCE,
    Comparison,
    compare,
    measured_peak,
    read_snapshot,
)
from memo_compile.step.plans import Plan
from memo_compile.step.problem import Problem
from memo_compile.units import format_bytes


def compare_files(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan of memo.")],
    snapshot_file: Annotated[
        Path, typer.Argument(metavar="SNAPSHOT.pickle", help="A memory snapshot of torch.")
    ],
    problem_file: Annotated[
        Path | None,
        typer.Option("--problem", help="The plan's problem.json; else the one beside the plan."),
    ] = None,
    device: Annotated[int | None, typer.Option(min=0, help="Of several in the snapshot.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare a plan with a measured memory snapshot: the peak, and layer by layer.

    Exit 0 when the measured peak is at most the planned one and 2 % more, 1 otherwise.
    """
    plan = read_data(plan_file, Plan)
    neighbour = plan_file.with_name("problem.json")
    if problem_file is None and neighbour.is_file():
        problem_file = neighbour
    problem = None if problem_file is None else read_data(problem_file, Problem)
    measured = measured_peak(read_snapshot(snapshot_file), device=device, where=str(snapshot_file))
    found = compare(plan, measured, problem)
    print(json.dumps(_as_dict(found)) if as_json else _as_text(found))
    raise typer.Exit(0 if found.holds else 1)


def _as_dict(found: Comparison) -> dict[str, Any]:
    return {
        "holds": found.holds,
        "planned_peak_bytes": found.planned_bytes,
        "measured_peak_bytes": found.measured.peak_bytes,
        "tolerance": TOLERANCE,
        "device": found.measured.device,
        "layers": [dataclasses.asdict(layer) for layer in found.layers],
        "differences": [{"layer": layer, "bytes": more} for layer, more in found.differences()],
        "largest": [
            {"bytes": block.size_bytes, "frames": list(block.frames)}
            for block in found.measured.blocks[:NUM_LARGEST]
        ],
    }


def _as_text(found: Comparison) -> str:
    """The verdict in one line, then layers where they are known, else the largest blocks."""
    measured, planned = found.measured.peak_bytes, found.planned_bytes
    verdict = "the plan holds" if found.holds else "the plan does NOT hold"
    ratio = f"{measured / planned:.1%} of it" if planned else "of nothing planned"
    text = (
        f"{verdict}: planned peak {format_bytes(planned)}, measured {format_bytes(measured)} on "
        f"device {found.measured.device} ({ratio}; {TOLERANCE:.0%} more is allowed)"
    )
    if found.layers:
        rows = [
            (
                layer.layer,
                "?" if layer.planned_bytes is None else format_bytes(layer.planned_bytes),
                format_bytes(layer.measured_bytes),
            )
            for layer in found.layers
        ]
        return f"{text}\n{_difference(found)}\n\n" + format_table(
            ("alive at the peak", "planned", "measured"), rows
        )
    if not found.measured.blocks:
        return text
    largest = [
        (format_bytes(block.size_bytes), next(iter(block.frames), "no frames"))
        for block in found.measured.blocks[:NUM_LARGEST]
    ]
    note = "no frame of the snapshot names a call of the plan; the largest blocks at its peak:"
    return f"{text}\n{note}\n" + "\n".join(f"{size:>12}  {frame}" for size, frame in largest)


def _difference(found: Comparison) -> str:
    """Where plan and measurement part, in a line."""
    if any(layer.planned_bytes is None for layer in found.layers):
        return (
            "what the plan has of each layer is in its problem.json, which is not here: --problem"
        )
    parts = [
        f"{layer} {format_bytes(abs(more))} {'more' if more > 0 else 'less'}"
        for layer, more in found.differences()[:NUM_LARGEST]
    ]
    return f"beside the plan: {', '.join(parts)}" if parts else "no layer differs from the plan"
