"""Many rectangles as few SVG paths: what is under a pixel is merged, coordinates are rounded.

Pictures are WIDTH units wide and HEIGHT high and stretched to their place on the page, so text and
points, which must not be stretched, are not in them: the page lays them over by percentages.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

WIDTH, HEIGHT = 1000.0, 400.0
"""Units of every picture. About 1,300 by 340 pixels on a wide screen: a unit is about a pixel."""

PIXEL = 0.8
"""Rectangles with a side of fewer units are merged with their neighbours."""

MAX_TICKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A rectangle of a picture, its CSS class, and what hovering it says."""

    x: float
    y: float
    width: float
    height: float
    css: str
    tip: tuple[str, ...]
    """Lines of text; the first is the title."""
    count: int = 1
    """How many things it stands for."""

    @property
    def right(self) -> float:
        """Its end along x."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """Its end along y."""
        return self.y + self.height


def one_decimal(value: float) -> str:
    """Returns ``value`` with one decimal at most: ``2.5``, ``3``."""
    text = f"{value:.1f}"
    return text.removesuffix(".0") if text != "-0.0" else "0"


def path_of(shapes: Iterable[Shape]) -> str:
    """Returns the ``d`` of one SVG path with all ``shapes``."""
    return "".join(
        f"M{one_decimal(shape.x)} {one_decimal(shape.y)}h{one_decimal(max(shape.width, 0.1))}"
        f"v{one_decimal(max(shape.height, 0.1))}h-{one_decimal(max(shape.width, 0.1))}z"
        for shape in shapes
    )


def steps_path(heights: Sequence[float], width: float) -> str:
    """Returns the ``d`` of the area under a step curve: height i spans ``width`` units."""
    parts, last_height = [f"M0 {one_decimal(HEIGHT)}"], None
    for index, height in enumerate(heights):
        if height != last_height:
            x, y = index * width, HEIGHT - (last_height or 0.0)  # y grows downwards
            parts.append(f"L{one_decimal(x)} {one_decimal(y)}V{one_decimal(HEIGHT - height)}")
        last_height = height
    end = one_decimal(len(heights) * width)
    return "".join([*parts, f"H{end}V{one_decimal(HEIGHT)}z"])


def merge_small(shapes: Iterable[Shape], *, noun: str) -> list[Shape]:
    """Unites shapes below a pixel that touch and are of one CSS class; others stay as they are.

    Narrow ones are united within their column of one unit, flat ones of equal ends within their
    row. ``noun`` says what a united shape stands for: ``12 small buffers``.
    """
    kept: list[Shape] = []
    columns: dict[tuple[str, int], list[Shape]] = {}
    rows: dict[tuple[str, int, int, int], list[Shape]] = {}
    for shape in shapes:
        if shape.width < PIXEL:
            columns.setdefault((shape.css, int(shape.x)), []).append(shape)
        elif shape.height < PIXEL:
            key = (shape.css, round(shape.x), round(shape.right), int(shape.y))
            rows.setdefault(key, []).append(shape)
        else:
            kept.append(shape)
    for (_, column), group in columns.items():
        kept += _united((replace(shape, x=float(column), width=1.0) for shape in group), noun)
    for (*_, row), group in rows.items():
        kept += _united((replace(shape, y=float(row), height=1.0) for shape in group), noun)
    return kept


def _united(shapes: Iterable[Shape], noun: str) -> list[Shape]:
    """Joins shapes, of one column or one row, with less than a pixel between them along y."""
    united: list[Shape] = []
    for shape in sorted(shapes, key=lambda shape: (shape.y, shape.x)):
        if united and shape.y <= united[-1].bottom + PIXEL:
            last = united[-1]
            united[-1] = replace(
                last,
                x=min(last.x, shape.x),
                width=max(last.right, shape.right) - min(last.x, shape.x),
                height=max(last.bottom, shape.bottom) - last.y,
                count=last.count + shape.count,
            )
        else:
            united.append(shape)
    return [_named(shape, noun) for shape in united]


def merge_along(shapes: Iterable[Shape], *, noun: str) -> list[Shape]:
    """Joins neighbours of one lane and class that are below a pixel and have no visible gap."""
    merged: list[Shape] = []
    for shape in sorted(shapes, key=lambda shape: shape.x):
        last = merged[-1] if merged else None
        touches = last is not None and last.css == shape.css and shape.x - last.right < PIXEL / 2
        if last is not None and touches and min(shape.width, last.width) < PIXEL:
            width = max(last.right, shape.right) - last.x
            merged[-1] = replace(last, width=width, count=last.count + shape.count)
        else:
            merged.append(shape)
    return [_named(shape, noun) for shape in merged]


def _named(shape: Shape, noun: str) -> Shape:
    """Returns a united shape with a text that says how many things it stands for, and where."""
    if shape.count == 1:
        return shape
    where = shape.tip[1] if len(shape.tip) > 1 else shape.tip[0]
    return replace(shape, tip=(f"{shape.count} {noun}", where))


def nice_ticks(most: float, *, base: int = 10, low: float = 0.0) -> list[float]:
    """Returns about MAX_TICKS round numbers from ``low`` to ``most``; base 2: round as MiB, GiB."""
    if most <= low:
        return [low]
    unit = 1024.0 ** int(math.log(max(most, 1.0), 1024)) if base == 2 else 1.0
    least_step = (most - low) / unit / MAX_TICKS
    power = 10.0 ** math.floor(math.log10(least_step))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least_step * 0.999)
    first, last = math.ceil(low / unit / step - 1e-9), math.floor(most / unit / step + 1e-9)
    return [index * step * unit for index in range(first, last + 1)]
