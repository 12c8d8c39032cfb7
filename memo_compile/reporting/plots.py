"""Memory curve and arena map as SVG and PNG for papers and slides; needs the extra ``plot``."""

import importlib.util
from pathlib import Path
from typing import Any

from memo_compile.reporting.view import Role, StepView, view_step
from memo_compile.step.plans import Plan
from memo_compile.step.problem import Problem

ROLE_COLOURS = {
    Role.SAVED: "#2a78b8",
    Role.OFFLOADED: "#d55e00",
    Role.RELOADED: "#eda100",
    Role.RECOMPUTED: "#0a9a74",
    Role.SCRATCH: "#b3bbc5",
}
"""The colours of the HTML report."""

AREAS = (
    ("constant", "#8a95a3"),
    ("gradients and outputs", "#eda100"),
    ("allocated by kernels", "#9a6bb5"),
    ("activations alive", "#2a78b8"),
)
"""Areas of the memory curve and their colours, from the bottom upwards."""

SIZE_INCHES = (9.0, 4.5)
DOTS_PER_INCH = 160
GIB = 1024**3

ROOM = 1.08
"""The memory curve's axis is this many times as high as its highest value."""

MOST_COLUMNS = 1000
"""Most points of the memory curve; more are not seen at this size."""


def write_plots(folder: Path, problem: Problem, plan: Plan) -> tuple[Path, ...]:
    """Memory curve and arena map lie in ``folder``, where matplotlib is installed; the files."""
    if importlib.util.find_spec("matplotlib") is None:
        return ()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    view = view_step(problem, plan)
    written = []
    for name, draw in (("memory", _memory), ("arena", _arena)):
        # A figure that no window and no global state of pyplot knows of.
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        draw(figure.add_subplot(), view, plan)
        for ending in ("svg", "png"):
            path = folder / f"{name}.{ending}"
            # Without a date and random names equal plans give equal files.
            metadata = {"Date": None} if ending == "svg" else None
            with rc_context({"svg.hashsalt": "memo"}):
                figure.savefig(path, dpi=DOTS_PER_INCH, metadata=metadata)
            written.append(path)
    return tuple(written)


def _memory(axes: Any, view: StepView, plan: Plan) -> None:
    columns = view.columns(MOST_COLUMNS)
    lines = [view.starts[-1] * index / len(columns) for index in range(len(columns))]
    bottom = [0.0] * len(lines)
    tops = [[height / GIB for height in view.heights(moment)] for moment in columns]
    for (label, colour), top in zip(AREAS, map(list, zip(*tops, strict=True)), strict=True):
        axes.fill_between(lines, bottom, top, step="post", color=colour, label=label, linewidth=0)
        bottom = top
    held = [moment.held_bytes / GIB for moment in columns]
    axes.step(lines, held, where="post", color="#1a1f26", linewidth=1, label="held")
    if plan.budget_bytes is not None:
        budget = plan.budget_bytes / GIB
        axes.axhline(budget, color="#b3261e", linestyle="--", linewidth=1.5, label="budget")
    axes.set_ylabel("device memory (GiB)")
    axes.set_ylim(0, ROOM * max(plan.peak_bytes, plan.budget_bytes or 0, 1) / GIB)
    _program_axis(axes, view)


def _arena(axes: Any, view: StepView, plan: Plan) -> None:
    from matplotlib.collections import PolyCollection

    for role, colour in ROLE_COLOURS.items():
        corners = []
        for box in (box for box in view.boxes if box.role is role):
            low, high = box.offset / GIB, (box.offset + box.size_bytes) / GIB
            corners.append([(box.start, low), (box.end, low), (box.end, high), (box.start, high)])
        if corners:
            axes.add_collection(
                PolyCollection(
                    corners, facecolors=colour, edgecolors="white", linewidths=0.2, label=role.value
                )
            )
    axes.set_ylabel("address in the arena (GiB)")
    axes.set_ylim(0, max(plan.arena_bytes, 1) / GIB)
    _program_axis(axes, view)


def _program_axis(axes: Any, view: StepView) -> None:
    end = max(view.starts[-1], 1)
    axes.set_xlim(0, end)
    axes.axvline(view.backward_start, color="#1a1f26", linestyle=":", linewidth=1)
    axes.set_xticks(
        [view.backward_start / 2, (view.backward_start + end) / 2], ["forward", "backward"]
    )
    axes.tick_params(axis="x", length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize="small")
