"""Decisions as lines for people: one line for all tensors of a layer with the same decision."""

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from memo_compile.step.plans import Decision
from memo_compile.step.problem import LayerClassInfo
from memo_compile.units import format_bytes

WIDTH = 100
"""Characters of a line: what a terminal shows beside a margin."""

_LAYERS = re.compile(r"^(.*) \[(\d+):(\d+)\]$")
"""Matches ``layers [0:3]``: a decision for some layers of a class (``driver/report_rows.py``)."""

_VERBS = {"OFFLOAD": "-> host", "RECOMPUTE": "recomputed", "SAVE": "kept"}
"""Decision -> its words, in the order of the lines."""

_MOST_NAMES = 3
"""Tensors that a line names, the largest ones; the others are counted."""


Span = tuple[int, int] | None
"""The first layer of a class, and the one behind the last; None: all layers of the class."""


def layers_of(decision: Decision) -> tuple[str, Span]:
    """Returns the class of layers that ``decision`` is about, and which of its layers."""
    match = _LAYERS.match(decision.layer_class)
    if match is None:
        return decision.layer_class, None
    return match[1], (int(match[2]), int(match[3]))


def wrapped(text: str, indent: str = "    ") -> list[str]:
    """Returns ``text`` as lines of at most WIDTH characters, those behind the first indented."""
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def decision_lines(
    decisions: Sequence[Decision],
    classes: Sequence[LayerClassInfo],
    *,
    copies: str = "",
    width: int = WIDTH,
) -> Iterator[str]:
    """Yields a line for each set of equally planned layers and each decision on their tensors.

    ``layers 0-27: mlp.up and 2 more -> host, 96.00 MiB a layer; copies hide``, where ``copies`` is
    what to say about copies. A line names as many tensors as ``width`` characters hold, at most
    three, and at least one.
    """
    num_layers_of = {cls.module_path: cls.num_layers for cls in classes}
    for label, groups in _equal_layers(decisions).items():
        for layers in groups:
            where = _where(label, [span for span, _ in layers], num_layers_of.get(label))
            _, rows = layers[0]
            for decision, verb in _VERBS.items():
                tensors = [row for row in rows if row.decision == decision]
                if tensors:
                    tail = f"; {copies}" if copies and decision == "OFFLOAD" else ""
                    each = " a layer" if label in num_layers_of else ""
                    words = f" {verb}, {_size(tensors)}{each}{tail}"
                    names = _names(tensors, width - len(where) - 2 - len(words))
                    yield f"{where}: {names}{words}"


def _equal_layers(
    decisions: Sequence[Decision],
) -> Mapping[str, Iterable[list[tuple[Span, list[Decision]]]]]:
    """Groups the layers of each class by their decisions.

    Layers 0-3 and 8-9 planned alike, 4-7 otherwise: the class has two groups, of two spans and one.
    """
    rows_of: dict[str, dict[Span, list[Decision]]] = {}
    for row in decisions:
        label, span = layers_of(row)
        rows_of.setdefault(label, {}).setdefault(span, []).append(row)
    groups: dict[str, dict[object, list[tuple[Span, list[Decision]]]]] = {}
    for label, spans in rows_of.items():
        for span, rows in spans.items():
            what = frozenset((row.tensor, row.decision, row.token_fraction) for row in rows)
            groups.setdefault(label, {}).setdefault(what, []).append((span, rows))
    return {label: group.values() for label, group in groups.items()}


def _where(label: str, spans: Sequence[Span], num_layers: int | None) -> str:
    """Names layers of a class: ``layers 0-3, 8-9``; ``num_layers`` are all that the class has."""
    if None in spans:
        return label if not num_layers else f"{label} 0-{num_layers - 1}"
    ranges = [
        f"{first}-{end - 1}" if end - first > 1 else f"{first}"
        for first, end in filter(None, spans)
    ]
    return f"{label} {', '.join(ranges)}"


def _names(rows: Sequence[Decision], width: int) -> str:
    """Names the largest tensors, as many as ``width`` holds: ``mlp.up, 2 x norm and 3 more``."""
    counts = Counter(map(_name, sorted(rows, key=lambda row: -row.bytes * row.token_fraction)))
    names = [name if count == 1 else f"{count} x {name}" for name, count in counts.items()]
    text = ""
    for num_shown in range(min(_MOST_NAMES, len(names)), 0, -1):
        num_unnamed = len(rows) - sum(list(counts.values())[:num_shown])
        text = ", ".join(names[:num_shown]) + (f" and {num_unnamed} more" if num_unnamed else "")
        if len(text) <= width:
            break
    return text


def _name(row: Decision) -> str:
    name = row.role or row.tensor.partition(" ")[0]
    return name if row.token_fraction == 1.0 else f"{name} ({row.token_fraction:.0%} of tokens)"


def _size(rows: Sequence[Decision]) -> str:
    return format_bytes(sum(row.bytes * row.token_fraction for row in rows))
