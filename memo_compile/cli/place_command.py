"""``memo place``: offsets for the buffers of a file."""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from memo_compile.cli.options import EXIT_CODES, AsJson
from memo_compile.cli.progress import working
from memo_compile.errors import InputError
from memo_compile.planners.placement import Placement, check_placement, place
from memo_compile.planners.placement.files import format_csv, read_problem
from memo_compile.planners.placement.picture import draw_svg
from memo_compile.planners.solver import SolveStatus
from memo_compile.text_files import write_text
from memo_compile.units import format_bytes, format_seconds, parse_size


def place_file(
    file: Annotated[Path, typer.Argument(help="CSV (id,lower,upper,size,...) or .json problem")],
    capacity: Annotated[str | None, typer.Option(help="bytes of the arena, e.g. 1MiB")] = None,
    alignment: Annotated[str, typer.Option(help="bytes that offsets are multiples of")] = "1",
    solver: Annotated[
        Literal["auto", "greedy", "mip", "search", "cbc", "gurobi"],
        typer.Option(help="how offsets are found"),
    ] = "auto",
    time_limit: Annotated[float, typer.Option(min=0.0, help="seconds")] = 60.0,
    out: Annotated[Path | None, typer.Option(help="write the offsets to this CSV")] = None,
    svg: Annotated[Path | None, typer.Option(help="draw the arena to this SVG")] = None,
    as_json: AsJson = False,
) -> None:
    """Give every buffer an offset so that no two that live together share a byte."""
    capacity_bytes = None if capacity is None else parse_size(capacity, what="--capacity")
    alignment_bytes = parse_size(alignment, what="--alignment")
    if alignment_bytes < 1:
        raise InputError(f"--alignment: expected at least 1 byte, got {alignment}")
    problem = read_problem(file, capacity=capacity_bytes, alignment=alignment_bytes)
    with working("placing buffers"):
        placement = place(problem, solver=solver, time_limit_s=time_limit)
    status = placement.status.value
    fits = EXIT_CODES[status] == 0
    if placement.offsets:
        check_placement(problem, placement, capacity=fits)
    for path, text in ((out, format_csv), (svg, draw_svg)):
        if path is None:
            continue
        if fits:
            write_text(path, text(problem, placement.offsets))
        else:
            print(f"memo: {path} is not written: {status}", file=sys.stderr)
    summary: dict[str, object] = {
        "status": status,
        "height_bytes": placement.height_bytes if status != "infeasible" else None,
        "lower_bound_bytes": placement.lower_bound_bytes,
        "seconds": placement.seconds,
        "solver": placement.solver,
    }
    if status == "infeasible":
        summary["conflict"] = list(placement.conflict)
    print(json.dumps(summary) if as_json else _sentence(placement, problem.capacity))
    raise typer.Exit(EXIT_CODES[status])


def _sentence(placement: Placement, capacity: int | None) -> str:
    """Returns the result for people: one line, and the buffers in conflict in a second one."""
    height, bound = placement.height_bytes, placement.lower_bound_bytes
    took = f"{format_seconds(placement.seconds)}, {placement.solver}"
    room = "" if capacity is None else f", capacity {capacity} ({format_bytes(capacity)})"
    if placement.status is SolveStatus.INFEASIBLE:
        return (
            f"infeasible: at least {bound} bytes ({format_bytes(bound)}) are needed{room} "
            f"[{took}]\nthese {len(placement.conflict)} buffers cannot fit together: "
            f"{', '.join(placement.conflict)}"
        )
    return (
        f"{placement.status.value}: height {height} bytes ({format_bytes(height)}), "
        f"lower bound {bound} ({format_bytes(bound)}){room} [{took}]"
    )
