"""Write what the documents show of committed results: ``python -m benchmarks.published``.

Measures nothing. The newest ``budget-*.json`` and ``peers-*.json`` become the curve of README.md
(``docs/pictures/curve-*.svg``) and the tables of docs/comparison.md. The rows of README.md come
from them and from the results that ``rows`` names. A table stands behind ``<!-- table: NAME -->``.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from benchmarks.harness import RESULTS, ROOT
from memo_compile.units import format_bytes

MIB = 2**20
WAYS = {
    "inductor": "Inductor, everything kept",
    "checkpointing": "`torch.utils.checkpoint` of each layer, eager",
    "inductor+checkpointing": "the same, through Inductor",
    "ratio-0.0": "`activation_memory_budget` = 0.0",
    "ratio-0.25": "`activation_memory_budget` = 0.25",
    "ratio-0.5": "`activation_memory_budget` = 0.5",
    "ratio-0.75": "`activation_memory_budget` = 0.75",
    "hooks": "hooks that offload what eager saves",
    "hooks+inductor": "hooks that offload what Inductor saves",
    "torchtitan-op": "torchtitan, `selective`, `op`",
    "torchtitan-2": "torchtitan, `selective`, every second layer",
    "torchtitan-full": "torchtitan, `full`",
    "deepspeed": "DeepSpeed's checkpointing of each layer, eager",
    "deepspeed+inductor": "the same around layers that Inductor compiled",
}
"""Peer -> what the documents call it, in the order of their rows."""

GPU_RUN = "gpu_budget-2026-11-27.txt"
GPU_SPEED = "gpu_speed-2026-11-26.json"
LOGITS = "loss_tiles-2026-11-28.json"


def main() -> int:
    """Write pictures and tables; print what was written."""
    budget, peers = newest("budget"), newest("peers")
    for theme in THEMES:
        path = ROOT / "docs" / "pictures" / f"curve-{theme}.svg"
        path.write_text(curve(budget, peers, THEMES[theme]))
        print(path.relative_to(ROOT))
    for name in ("README.md", "docs/comparison.md"):
        (ROOT / name).write_text(filled((ROOT / name).read_text(), tables(budget, peers)))
        print(name)
    return 0


def newest(kind: str) -> dict[str, Any]:
    """The newest result of ``benchmarks.KIND`` whose steps hold their outputs."""
    paths = sorted(RESULTS.glob(f"{kind}-*.json"), reverse=True)
    results = ({"file": path.name, **json.loads(path.read_text())} for path in paths)
    return next(result for result in results if peers_of(result))


def peers_of(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The peers of a result whose steps hold their outputs."""
    peers: dict[str, dict[str, Any]] = result.get("peers") or result.get("held", {}).get(
        "peers", {}
    )
    return peers


def filled(text: str, tables_by_name: Mapping[str, Sequence[str]]) -> str:
    """``text`` with every table that it marks."""

    def table(match: re.Match[str]) -> str:
        return "\n".join((match[1], *tables_by_name[match[2]], ""))

    return re.sub(r"(<!-- table: ([\w-]+) -->)\n(?:.+\n|\n(?=\|))*", table, text)


def tables(budget: Mapping[str, Any], peers: Mapping[str, Any]) -> dict[str, list[str]]:
    """Name of a table -> its lines."""
    named = {"rows": rows(budget), "budgets": budgets(budget)}
    for name, result in (("budget", budget), ("peers", peers)):
        for host in ("0", "auto"):
            named[f"{name}-{host}"] = beside_peers(result, host)
    return named


def about(result: Mapping[str, Any]) -> str:
    """The line above a table: what was measured, when, where."""
    settings, hardware = result["settings"], result["hardware"]
    return (
        f"`benchmarks/results/{result['file']}`, {hardware['date']}: {settings['layers']} layers, "
        f"{settings['tokens']:,} tokens, {hardware['cores']} cores, torch {hardware['torch']}, "
        f"load at the start {hardware['load_at_start']:.1f}."
    )


def budgets(result: Mapping[str, Any]) -> list[str]:
    """The budgets of memo: what the step takes on the device and on the host, and how long."""
    lines = [about(result), "", "| budget | on the device | in host memory | all memory | step |"]
    lines.append("|---|---|---|---|---|")
    for host, measured in result["held"]["memo"].items():
        for row in measured:
            budget = "none" if row["budget_bytes"] is None else mib(row["budget_bytes"])
            without = ", `host_budget=0`" if host == "0" else ""
            sizes = (row["peak_bytes"], row["host_bytes"], row["all_bytes"])
            cells = (budget + without, *map(mib, sizes), f"{row['step_s']:.2f} s")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def beside_peers(result: Mapping[str, Any], host: str) -> list[str]:
    """A row for each peer: all its memory, memo's on the device and on the host, and the ratio."""
    lines = [
        about(result),
        "",
        "| way | all its memory | its step | memo's memory | in host memory | memo / its step |",
        "|---|---|---|---|---|---|",
    ]
    measured = peers_of(result)
    for name, way in WAYS.items():
        row = measured.get(name, {}).get("memo", {}).get(host)
        if row is not None:
            above = "" if row["budget_bytes"] <= measured[name]["all_bytes"] else ", at its floor"
            cells = (
                way,
                mib(measured[name]["all_bytes"]),
                f"{row['step_s']:.2f} s",
                mib(row["peak_bytes"]),
                mib(row["host_bytes"]),
                f"{row['ratio']:.2f}{above}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return lines if len(lines) > 4 else ["Not measured yet."]


def mib(num_bytes: float) -> str:
    """A size in whole MiB."""
    return f"{num_bytes / MIB:.0f} MiB" if num_bytes else "none"


def rows(budget: Mapping[str, Any]) -> list[str]:
    """The rows of README.md: step and memory beside another's, and where that was measured."""
    return [
        "| what | step | on the device | in host memory | machine, date | script |",
        "|---|---|---|---|---|---|",
        checkpointing_row((RESULTS / GPU_RUN).read_text()),
        masks_row(json.loads((RESULTS / GPU_SPEED).read_text())),
        *cpu_rows(budget),
        logits_row(json.loads((RESULTS / LOGITS).read_text())),
    ]


def checkpointing_row(text: str) -> str:
    """A Llama on an H200 under a budget, beside eager checkpointing."""

    def measured(arm: str) -> tuple[float, float]:
        found = re.search(
            rf"^\| {re.escape(arm)} +\| ([\d.]+) s +\|[^|]*\| ([\d.]+) GiB", text, re.M
        )
        assert found is not None, arm
        return float(found[1]), float(found[2])

    step_s, peak = measured('memo, memory_budget="16GiB", again (2)')
    their_s, their_peak = measured("eager checkpointing")
    moved = re.search(r"and by whom: ([\d.]+) GiB to the host", text)
    assert moved is not None
    return (
        "| Llama, 1.5 billion weights, 16,384 tokens, budget 16 GiB, beside eager checkpointing "
        f"| {step_s / their_s:.2f} ({step_s:.2f} s to {their_s:.2f} s) "
        f"| {peak:.1f} GiB to {their_peak:.1f} | {float(moved[1]):.1f} GiB "
        f"| H200, 2026-11-27 | `benchmarks.gpu --part speed` |"
    )


def masks_row(speed: Mapping[str, Any]) -> str:
    """The same model without a budget, beside Inductor."""
    arms = {row["arm"]: row["lengths"][0] for row in speed["rows"] if row["model"] == "1b"}
    memo, inductor = arms["memo"], arms["inductor"]
    peak, their_peak = (format_bytes(arm["peak_bytes"]) for arm in (memo, inductor))
    return (
        "| the same, no budget, beside Inductor, whose attention reads a needless mask "
        f"| {memo['step_s'] / inductor['step_s']:.2f} "
        f"({memo['step_s']:.2f} s to {inductor['step_s']:.2f} s) "
        f"| {peak.replace(' GiB', '')} GiB to {their_peak.replace(' GiB', '')} | none "
        f"| H100, {speed['hardware']['date']} | `benchmarks.gpu --part speed` |"
    )


def cpu_rows(budget: Mapping[str, Any]) -> list[str]:
    """A Llama on a CPU: at Inductor's memory, and at the smallest budget, beside Inductor."""
    date = budget["hardware"]["date"]
    inductor = peers_of(budget)["inductor"]
    host, row = sorted(inductor["memo"].items())[0]
    floor = budget["held"]["memo"][host][0]
    named = ", `host_budget=0`" if host == "0" else ""
    lines = []
    for words, ratio, ours in (
        ("Llama, 4 layers, 2,048 tokens, at the memory of Inductor", row["ratio"], row),
        ("the same at memo's floor", floor["step_s"] / row["step_s"], floor),
    ):
        step_s = ours.get("memo_s", ours.get("step_s"))
        lines.append(
            f"| {words}{named} | {ratio:.2f} ({step_s:.2f} s to {row['step_s']:.2f} s) "
            f"| {mib(ours['peak_bytes'])} to {inductor['all_bytes'] / MIB:.0f} "
            f"| {mib(ours['host_bytes'])} | CPU, {date} | `benchmarks.budget` |"
        )
    return lines


def logits_row(result: Mapping[str, Any]) -> str:
    """Logits of a gibibyte without a budget, beside Inductor."""
    memo, inductor = result["arms"]["memo"], result["arms"]["inductor"]
    pairs = result["pairs"]
    return (
        "| Llama, 2 layers, 1 GiB of logits, no budget, beside Inductor "
        f"| {pairs['ratio']:.2f} ({pairs['memo_s']:.2f} s to {pairs['inductor_s']:.2f} s) "
        f"| {mib(memo['peak_bytes'])} to {inductor['peak_bytes'] / MIB:,.0f} | none "
        f"| CPU, {result['hardware']['date']} | `benchmarks.loss_tiles` |"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """Colours of the curve's picture."""

    ink: str
    faint: str
    memo: str
    others: Mapping[str, str]


THEMES = {
    "light": Theme(
        ink="#24292f",
        faint="#d0d7de",
        memo="#0a6fc2",
        others={
            "Inductor": "#24292f",
            "checkpointing": "#b3261e",
            "torch's activation_memory_budget": "#9a6700",
            "torchtitan's op policy": "#1a7f37",
        },
    ),
    "dark": Theme(
        ink="#e6edf3",
        faint="#3d444d",
        memo="#58a6ff",
        others={
            "Inductor": "#e6edf3",
            "checkpointing": "#ff7b72",
            "torch's activation_memory_budget": "#e3b341",
            "torchtitan's op policy": "#56d364",
        },
    ),
}
WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 24, 52
"""Room round the chart, for the words at its axes."""


def kind_of(peer: str) -> str | None:
    """What the picture calls a peer; None: it is not in the picture."""
    if peer == "inductor":
        return "Inductor"
    if peer.startswith("ratio-"):
        return "torch's activation_memory_budget"
    if peer in ("checkpointing", "inductor+checkpointing"):
        return "checkpointing"
    return "torchtitan's op policy" if peer == "torchtitan-op" else None


Points = list[tuple[float, float]]
"""(MiB, seconds of a step)."""


def points_of(
    budget: Mapping[str, Any], peers: Mapping[str, Any]
) -> tuple[dict[str, Points], Points]:
    """Each kind of peer, and memo's plans that none beats; all memory of the process counts."""
    others: dict[str, Points] = {}
    same = budget["settings"]["tokens"] == peers["settings"]["tokens"]
    theirs = {**(peers_of(peers) if same else {}), **peers_of(budget)}
    for name, peer in theirs.items():
        kind, measured = kind_of(name), peer.get("memo", {})
        if kind is not None and measured:
            row = measured[min(measured)]
            others.setdefault(kind, []).append((peer["all_bytes"] / MIB, row["step_s"]))
    ours = sorted(
        (row["all_bytes"] / MIB, row["step_s"])
        for measured in budget["held"]["memo"].values()
        for row in measured
    )
    return others, list(unbeaten(ours))


def unbeaten(points: Iterable[tuple[float, float]]) -> Iterable[tuple[float, float]]:
    """Of points in the order of their memory those that are faster than all before."""
    fastest = float("inf")
    for memory, seconds in points:
        if seconds < fastest:
            fastest = seconds
            yield memory, seconds


def curve(budget: Mapping[str, Any], peers: Mapping[str, Any], theme: Theme) -> str:
    """The picture: memory to the right, seconds upwards; below and left is better."""
    others, ours = points_of(budget, peers)
    points = [*ours, *(point for several in others.values() for point in several)]
    most_mib = 100 * -(-max(x for x, _ in points) // 100)
    most_s = 0.5 * -(-max(y for _, y in points) // 0.5)

    def at(point: tuple[float, float]) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * point[0] / most_mib
        return x, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * point[1] / most_s

    parts = [*axes(at, most_mib, most_s, theme)]
    line = "L".join(f"{x:.1f} {y:.1f}" for x, y in map(at, ours))
    parts.append(f'<path d="M{line}" fill="none" stroke="{theme.memo}" stroke-width="3"/>')
    parts += [circle(at(point), theme.memo, 5) for point in ours]
    for kind, several in others.items():
        parts += [circle(at(point), theme.others[kind], 6) for point in several]
    parts += legend({"memo": theme.memo, **{kind: theme.others[kind] for kind in others}}, theme)
    title = "Memory of the process against seconds of a step: memo, and other ways"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{theme.ink}">\n'
        f"<title>{title}</title>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def axes(at: Any, most_mib: float, most_s: float, theme: Theme) -> Iterable[str]:
    """Lines, numbers and words of both axes."""
    for step in range(int(most_s / 0.5) + 1):
        (left, y), (right, _) = at((0, 0.5 * step)), at((most_mib, 0))
        yield f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="{theme.faint}"/>'
        yield f'<text x="{left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{0.5 * step:g} s</text>'
    for step in range(int(most_mib / 100) + 1):
        x, y = at((100 * step, 0))
        yield f'<text x="{x:.1f}" y="{y + 20:.1f}" text-anchor="middle">{100 * step}</text>'
    yield (
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">'
        "memory of the process in MiB, host memory included</text>"
    )


def circle(point: tuple[float, float], colour: str, radius: int) -> str:
    """A point of the chart."""
    return f'<circle cx="{point[0]:.1f}" cy="{point[1]:.1f}" r="{radius}" fill="{colour}"/>'


def legend(colours: Mapping[str, str], theme: Theme) -> Iterable[str]:
    """What each colour is, in the corner where no point can lie: little memory, little time."""
    top = HEIGHT - BOTTOM - 14 - 20 * len(colours)
    for at, (words, colour) in enumerate(colours.items()):
        y = top + 20 * at
        yield circle((LEFT + 20, y), colour, 5)
        yield f'<text x="{LEFT + 32}" y="{y + 4}" fill="{theme.ink}">{escape(words)}</text>'


if __name__ == "__main__":
    sys.exit(main())
