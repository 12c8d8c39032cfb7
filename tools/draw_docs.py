"""Draw the pictures of docs/why-memory.md: plans of one step, as memo's own report draws them.

    python tools/draw_docs.py    # takes some minutes

Nothing runs on a device: the step is planned as ``memo plan`` does it. A picture is an SVG with the
report's own paths (``memo_compile/reporting/charts.py``); texts stand beside them.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from memo_compile.costs.hardware import find_hardware
from memo_compile.offline.forecast import Question, forecast
from memo_compile.reporting import charts
from memo_compile.reporting.svg import HEIGHT, WIDTH
from memo_compile.reporting.view import view_step

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
STEP = Question(model="gpt-1.3b", hardware=find_hardware("h100"), seq=16384)
BUDGETS = {"kept": None, "budget": "24GiB"}
"""Name of the picture -> the budget; None is all but 1 GiB of the device, in which all is kept."""

AREAS = {
    "held": ("held, arena included", "#e3e8ee"),
    "live": ("activations alive", "#2a78b8"),
    "outside": ("allocated by kernels", "#9a6bb5"),
    "made": ("gradients and outputs", "#eda100"),
    "fixed": ("constant", "#8a95a3"),
}
ROLES = {
    "saved": ("saved", "#2a78b8"),
    "offloaded": ("until copied to the host", "#d55e00"),
    "reloaded": ("copied back", "#eda100"),
    "recomputed": ("recomputed", "#0a9a74"),
    "scratch": ("scratch of one pass", "#b3bbc5"),
}
"""What the report calls an area or a buffer -> words and colour, as in the report."""


def picture(
    paths: Iterable[tuple[str, str]],
    colours: Mapping[str, tuple[str, str]],
    chart: Mapping[str, Any],
    turn: float,
) -> str:
    """An SVG of ``paths`` with the chart's scale and budget, the two phases, and a legend."""
    paths = [(css.split(" ")[0], d) for css, d in paths]
    parts = [f'<path fill="{colours[css][1]}" d="{d}"/>' for css, d in paths]
    for tick in chart["ticks"]:
        y = HEIGHT * (1 - tick["at"] / 100)
        parts.append(
            f'<text x="-8" y="{y + 4:.1f}" text-anchor="end">{escape(tick["text"])}</text>'
        )
    if chart.get("budget") is not None:
        y = HEIGHT * (1 - chart["budget"] / 100)
        parts.append(f'<path stroke="#b3261e" stroke-dasharray="8 5" d="M0 {y:.1f}H{WIDTH}"/>')
        parts.append(f'<text x="6" y="{y - 6:.1f}" fill="#b3261e">{chart["budget_text"]}</text>')
    x = WIDTH * turn / 100
    parts.append(f'<path stroke="#1a1f26" stroke-dasharray="2 4" d="M{x:.1f} 0V{HEIGHT}"/>')
    for phase, at in (("forward", x / 2), ("backward", (x + WIDTH) / 2)):
        parts.append(f'<text x="{at:.0f}" y="{HEIGHT + 20}" text-anchor="middle">{phase}</text>')
    used = [names for css, names in colours.items() if any(css == other for other, _ in paths)]
    for at, (words, colour) in enumerate(used):
        left, y = at * WIDTH / len(used), HEIGHT + 50
        parts.append(f'<rect x="{left:.0f}" y="{y - 11}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{left + 18:.0f}" y="{y}">{words}</text>')
    box = f"-90 -10 {WIDTH + 100:.0f} {HEIGHT + 75:.0f}"
    style = 'font-family="sans-serif" font-size="15" fill="#59636f"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" {style}>\n{body}\n</svg>\n'


def main() -> None:
    """Every picture lies in docs/pictures; what it shows is printed."""
    PICTURES.mkdir(exist_ok=True)
    for name, budget in BUDGETS.items():
        step = forecast(dataclasses.replace(STEP, budget=budget)).step
        view, plan = view_step(step.problem, step.plan), step.plan
        turn = charts.program_axis(step.problem, plan, view)["turn"]
        memory, arena = charts.memory_chart(view, plan), charts.arena_map(view, plan)
        drawn = {
            "memory": picture(memory["areas"], AREAS, memory, turn),
            "arena": picture(arena["paths"], ROLES, arena, turn),
        }
        for kind, text in drawn.items():
            (PICTURES / f"{kind}-{name}.svg").write_text(text)
        moved = sorted({row.decision for row in plan.decisions})
        print(f"{name}: peak {plan.peak_bytes} B, step {plan.step_s} s, {', '.join(moved)}")


if __name__ == "__main__":
    main()
