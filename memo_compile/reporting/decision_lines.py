"""Decisions as lines for people: one line for all tensors of a layer with the same decision."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from memo_compile.step.plans import Decision
from memo_compile.step.problem import LayerClassInfo
from memo_compile.units import format_bytes

_LAYERS = re.compile(r"^(.*) \[(\d+):(\d+)\]$")
"""Matches ``layers [0:3]``: a decision for some layers of a class (``driver/report_rows.py``)."""

_VERBS = {"OFFLOAD": "-> host", "RECOMPUTE": "recomputed", "SAVE": "kept"}
"""Decision -> its words, in the order of the lines."""

_MOST_NAMES = 3
"""Tensors that a line names, the largest ones; the others are counted."""

Way = frozenset[tuple[str, str, float]]
"""(tensor, decision, part of the tokens) for each tensor of a layer."""


def decision_lines(
    decisions: Sequence[Decision],
    classes: Sequence[LayerClassInfo],
    *,
    copies: str = "",
    width: int = 100,
) -> Iterator[str]:
    """Yields a line for each set of equally planned layers and each decision on their tensors.

    ``copies`` is appended to lines about the host, such as ``copies hide``. A line names as many
    tensors as ``width`` characters hold, at most three, and at least one.
    """
    sizes = {cls.module_path: cls.num_layers for cls in classes}
    for label, ways in _ways(decisions).items():
        for layers in ways.values():
            where = _where(label, [span for span, _ in layers], sizes.get(label))
            _, rows = layers[0]
            for decision, verb in _VERBS.items():
                same = [row for row in rows if row.decision == decision]
                if same:
                    tail = f"; {copies}" if copies and decision == "OFFLOAD" else ""
                    each = " a layer" if label in sizes else ""
                    words = f" {verb}, {_size(same)}{each}{tail}"
                    yield f"{where}: {_names(same, width - len(where) - 2 - len(words))}{words}"


Span = tuple[int, int] | None
"""The first layer of a class, and the one behind the last; None: all layers of the class."""


def _ways(
    decisions: Sequence[Decision],
) -> Mapping[str, Mapping[Way, list[tuple[Span, list[Decision]]]]]:
    """Class -> way -> the layers that are planned that way."""
    of_layers: dict[str, dict[Span, list[Decision]]] = {}
    for row in decisions:
        layers = _LAYERS.match(row.layer_class)
        label = layers.group(1) if layers else row.layer_class
        span = (int(layers.group(2)), int(layers.group(3))) if layers else None
        of_layers.setdefault(label, {}).setdefault(span, []).append(row)
    ways: dict[str, dict[Way, list[tuple[Span, list[Decision]]]]] = {}
    for label, spans in of_layers.items():
        for span, rows in spans.items():
            way = frozenset((row.tensor, row.decision, row.token_fraction) for row in rows)
            ways.setdefault(label, {}).setdefault(way, []).append((span, rows))
    return ways


def _where(label: str, spans: Sequence[Span], num_layers: int | None) -> str:
    if None in spans:
        return label if not num_layers else f"{label} 0-{num_layers - 1}"
    ranges = [
        f"{first}-{end - 1}" if end - first > 1 else f"{first}"
        for first, end in filter(None, spans)
    ]
    return f"{label} {', '.join(ranges)}"


def _names(rows: Sequence[Decision], width: int) -> str:
    """The names of the largest tensors, each name once with a count."""
    counts = Counter(map(_name, sorted(rows, key=lambda row: -row.bytes * row.token_fraction)))
    names = [name if count == 1 else f"{count} x {name}" for name, count in counts.items()]
    text = ""
    for shown in range(min(_MOST_NAMES, len(names)), 0, -1):
        num_unnamed = len(rows) - sum(list(counts.values())[:shown])
        text = ", ".join(names[:shown]) + (f" and {num_unnamed} more" if num_unnamed else "")
        if len(text) <= width:
            break
    return text


def _name(row: Decision) -> str:
    name = row.role or row.tensor.partition(" ")[0]
    return name if row.token_fraction == 1.0 else f"{name} ({row.token_fraction:.0%} of tokens)"


def _size(rows: Sequence[Decision]) -> str:
    return format_bytes(sum(row.bytes * row.token_fraction for row in rows))
