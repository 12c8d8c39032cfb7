"""A self-contained HTML report of a search: the best step against GPUs and sequence length."""

import html
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from memo_compile.papers.search.ranking import COLUMNS, SearchQuestion, SearchResult
from memo_compile.text_files import write_text
from memo_compile.units import format_seconds

GPU_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
"""Numbers of GPUs in the plot, relative to the question's."""

SEQ_FACTORS = (1 / 4, 1 / 2, 1, 2, 4, 8, 16)
"""Sequence lengths in the plot, relative to the question's."""

WIDTH, HEIGHT, MARGIN = 520, 300, 60
"""Size of a plot in pixels, and the frame around its axes."""


def write_report(path: Path, question: SearchQuestion, result: SearchResult) -> None:
    """Write ``path``: two plots in inline SVG and the ranking; it loads nothing.

    Raises:
        InputError: ``path`` cannot be written.
    """
    by_gpus = [replace(question, gpus=n) for n in _around(question.gpus, GPU_FACTORS)]
    by_seq = [replace(question, seq=n) for n in _around(question.seq, SEQ_FACTORS)]
    title = f"{question.shape.name} on {question.gpus} x {question.hardware.name}"
    subtitle = f"sequence {question.seq}, global batch {question.global_batch}"
    parts = [
        f"<h1>{html.escape(title)}</h1><p>{subtitle}; {result.num_points} configurations</p>",
        "<p>Both axes are logarithmic; a red x marks where no configuration is usable.</p>",
        _plot("Best step against GPUs", "GPUs", [(q.gpus, _best_s(q)) for q in by_gpus]),
        _plot("Best step against sequence", "tokens", [(q.seq, _best_s(q)) for q in by_seq]),
        _ranking(result),
    ]
    style = "body{font:14px sans-serif;margin:2em}td,th{padding:2px 8px;text-align:right}"
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
        f"<style>{style}</style>{''.join(parts)}\n"
    )
    write_text(path, page)


def _around(value: int, factors: Sequence[float]) -> list[int]:
    """Whole multiples and whole fractions of ``value``, ascending."""
    return [int(value * f) for f in factors if value * f >= 1 and (value * f) % 1 == 0]


def _best_s(question: SearchQuestion) -> float | None:
    """Seconds of the fastest usable configuration; None when none is usable."""
    found = question.search(1).configurations
    return found[0].iteration_s if found else None


def _plot(title: str, unit: str, points: Sequence[tuple[int, float | None]]) -> str:
    """A line plot with logarithmic axes; a cross on the axis marks what does not fit."""
    known = [(x, y) for x, y in points if y is not None]
    if not known:
        return f"<h2>{title}</h2><p>Nothing fits.</p>"
    low, high = min(y for _, y in known), max(y for _, y in known)

    def place(x: int, y: float) -> tuple[float, float]:
        first, last = points[0][0], points[-1][0]
        across = _share(x, first, last) * (WIDTH - 2 * MARGIN)
        up = _share(y, low, high) * (HEIGHT - 2 * MARGIN)
        return MARGIN + across, HEIGHT - MARGIN - up

    line = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in known)
    marks = [_mark(x, y, *place(x, low if y is None else y)) for x, y in points]
    bottom = HEIGHT - MARGIN / 3
    return (
        f"<h2>{title}</h2><svg width={WIDTH} height={HEIGHT} role=img>"
        f'<polyline points="{line}" fill=none stroke="#1f6feb" stroke-width=2 />'
        f"{''.join(marks)}<text x={WIDTH / 2} y={bottom} text-anchor=middle>{unit}</text></svg>"
    )


def _mark(x: int, y: float | None, left: float, top: float) -> str:
    axis = HEIGHT - MARGIN + 18
    label = f'<text x="{left:.1f}" y="{axis}" text-anchor=middle font-size=11>{x}</text>'
    if y is None:
        text = '<text x="{:.1f}" y="{:.1f}" text-anchor=middle fill="#c00">x</text>'
        return text.format(left, HEIGHT - MARGIN) + label
    value = (
        f'<text x="{left:.1f}" y="{top - 8:.1f}" text-anchor=middle font-size=11>'
        f"{format_seconds(y)}</text>"
    )
    return f'<circle cx="{left:.1f}" cy="{top:.1f}" r=3 />{value}{label}'


def _share(value: float, low: float, high: float) -> float:
    """Where ``value`` lies between ``low`` (0) and ``high`` (1) on a logarithmic scale."""
    return 0.5 if high <= low else math.log(value / low) / math.log(high / low)


def _ranking(result: SearchResult) -> str:
    rows = [found.cells() for found in result.configurations]
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    header = "".join(f"<th>{name}</th>" for name in COLUMNS)
    return f"<h2>Fastest configurations</h2><table><tr>{header}</tr>{body}</table>"
