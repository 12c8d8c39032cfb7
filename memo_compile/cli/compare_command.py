"""``memo compare PLAN.json SNAPSHOT.pickle``: was the planned peak kept?"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from memo_compile.cli.options import AsJson, read_data
from memo_compile.reporting.compare import Measured, measured_peak, read_snapshot
from memo_compile.step.plans import Plan
from memo_compile.units import format_bytes

TOLERANCE = 0.02
"""A measured peak may exceed the plan by this share, since allocators round and kernels differ."""

NUM_LARGEST = 8
"""How many of the blocks that are alive at the measured peak are named."""


def compare_files(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan of memo.")],
    snapshot_file: Annotated[
        Path, typer.Argument(metavar="SNAPSHOT.pickle", help="A memory snapshot of torch.")
    ],
    device: Annotated[int | None, typer.Option(min=0, help="Of several in the snapshot.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare a plan with a measured memory snapshot: the peak, and what is largest there.

    Exit 0 when the measured peak is at most the planned one and 2 % more, 1 otherwise.
    """
    planned = read_data(plan_file, Plan).peak_bytes
    measured = measured_peak(read_snapshot(snapshot_file), device=device, where=str(snapshot_file))
    holds = measured.peak_bytes <= planned * (1 + TOLERANCE)
    text_of = _as_json if as_json else _as_text
    print(text_of(planned, measured, holds=holds))
    raise typer.Exit(0 if holds else 1)


def _as_json(planned: int, measured: Measured, *, holds: bool) -> str:
    body: dict[str, Any] = {
        "holds": holds,
        "planned_peak_bytes": planned,
        "measured_peak_bytes": measured.peak_bytes,
        "tolerance": TOLERANCE,
        "device": measured.device,
        "largest": [
            {"bytes": block.size_bytes, "frames": list(block.frames)}
            for block in measured.blocks[:NUM_LARGEST]
        ],
    }
    return json.dumps(body)


def _as_text(planned: int, measured: Measured, *, holds: bool) -> str:
    """Returns the verdict in one line, then the largest blocks."""
    verdict = "the plan holds" if holds else "the plan does NOT hold"
    ratio = f"{measured.peak_bytes / planned:.1%} of it" if planned else "of nothing planned"
    lines = [
        f"{verdict}: planned peak {format_bytes(planned)}, measured "
        f"{format_bytes(measured.peak_bytes)} on device {measured.device} ({ratio}; "
        f"{TOLERANCE:.0%} more is allowed)"
    ]
    if measured.blocks:
        lines.append("the largest blocks at the measured peak:")
    for block in measured.blocks[:NUM_LARGEST]:
        frame = next(iter(block.frames), "no frames")
        lines.append(f"{format_bytes(block.size_bytes):>12}  {frame}")
    return "\n".join(lines)
