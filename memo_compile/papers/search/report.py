"""A self-contained HTML report of a search: the best step against GPUs and sequence length."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memo_compile.papers.search.ranking import COLUMNS, SearchQuestion, SearchResult, search
from memo_compile.reporting.render import render
from memo_compile.text_files import write_text
from memo_compile.units import format_seconds

GPU_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
"""Numbers of GPUs in the plot, relative to the question's."""

SEQ_FACTORS = (1 / 4, 1 / 2, 1, 2, 4, 8, 16)
"""Sequence lengths in the plot, relative to the question's."""

WIDTH, HEIGHT, MARGIN = 520, 300, 60
"""Size of a plot in pixels, and the frame around its axes."""

PLOT_HEIGHT = HEIGHT - 2 * MARGIN


def write_search_report(path: Path, question: SearchQuestion, result: SearchResult) -> None:
    """Writes two plots in inline SVG and the ranking. Raises InputError: not into ``path``."""
    by_gpus = [replace(question, gpus=n) for n in _around(question.gpus, GPU_FACTORS)]
    by_seq = [replace(question, seq=n) for n in _around(question.seq, SEQ_FACTORS)]
    page = render(
        "search.html.j2",
        question=question,
        num_points=result.num_points,
        size=(WIDTH, HEIGHT, MARGIN),
        plots=(
            ("Best step against GPUs", "GPUs", _marks([(q.gpus, _best_s(q)) for q in by_gpus])),
            ("Best step against sequence", "tokens", _marks([(q.seq, _best_s(q)) for q in by_seq])),
        ),
        columns=COLUMNS,
        rows=[config.cells() for config in result.configurations],
        seconds=format_seconds,
    )
    write_text(path, page + "\n")


def _around(value: int, factors: Sequence[float]) -> list[int]:
    """Returns the products of ``value`` and ``factors`` that are whole numbers of at least 1."""
    return [int(value * f) for f in factors if value * f >= 1 and (value * f) % 1 == 0]


def _best_s(question: SearchQuestion) -> float | None:
    """Returns the seconds of the fastest usable configuration; None when none is usable."""
    configurations = search(question, 1).configurations
    return configurations[0].iteration_s if configurations else None


def _marks(points: Sequence[tuple[int, float | None]]) -> list[dict[str, Any]]:
    """Places (size, seconds) on logarithmic axes; sizes that do not fit stand at the bottom."""
    seconds = [y for _, y in points if y is not None]
    if not seconds:  # no size fits: nothing to draw
        return []
    first, last, low, high = points[0][0], points[-1][0], min(seconds), max(seconds)
    return [
        {
            "value": x,
            "seconds": y,
            "left": MARGIN + _share(x, first, last) * (WIDTH - 2 * MARGIN),
            "top": HEIGHT - MARGIN - _share(y or low, low, high) * PLOT_HEIGHT,
        }
        for x, y in points
    ]


def _share(value: float, low: float, high: float) -> float:
    """Returns where ``value`` lies between ``low`` (0) and ``high`` (1), logarithmically."""
    return 0.5 if high <= low else math.log(value / low) / math.log(high / low)
