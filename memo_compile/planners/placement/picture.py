"""A placement as a picture: time to the right, addresses upwards, one rectangle a live span."""

import hashlib
from collections.abc import Mapping
from html import escape

from memo_compile.planners.placement.placement_problem import Buffer, PlacementProblem
from memo_compile.units import format_bytes

_WIDTH, _HEIGHT, _MARGIN = 1200.0, 700.0, 40.0
"""Pixels of the map and of the frame around it, which holds the two axis labels."""


def draw_svg(problem: PlacementProblem, offsets: Mapping[str, int]) -> str:
    """SVG text of the arena map; hovering a rectangle shows id, lifetime, offset and size."""
    buffers = [b for b in problem.buffers if b.size > 0]
    begin = min((b.lower for b in buffers), default=0)
    end = max((b.upper for b in buffers), default=1)
    height = max((offsets[b.id] + b.size for b in buffers), default=0)
    top = max(height, problem.capacity or 0, 1)
    across, up = _WIDTH / (end - begin), _HEIGHT / top
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12" '
        f'viewBox="0 0 {_WIDTH + 2 * _MARGIN:.0f} {_HEIGHT + 2 * _MARGIN:.0f}">',
        f'<rect x="{_MARGIN}" y="{_MARGIN}" width="{_WIDTH}" height="{_HEIGHT}" '
        'fill="#f6f6f6" stroke="#999"/>',
    ]
    for buffer in buffers:
        offset = offsets[buffer.id]
        life, size = f"[{buffer.lower}, {buffer.upper})", format_bytes(buffer.size)
        caption = escape(f"{buffer.id}: {life}, offset {offset}, {size}")
        for lower, upper in buffer.segments():
            x = _MARGIN + (lower - begin) * across
            y = _MARGIN + _HEIGHT - (offset + buffer.size) * up
            lines.append(
                f'<rect x="{x:.2f}" y="{y:.2f}" width="{(upper - lower) * across:.2f}" '
                f'height="{buffer.size * up:.2f}" fill="{_colour(buffer)}" stroke="#fff" '
                f'stroke-width="0.3"><title>{caption}</title></rect>'
            )
    label = f"{format_bytes(height)} used, times {begin} to {end}"
    if problem.capacity is not None:
        label += f", capacity {format_bytes(problem.capacity)}"
    lines.append(f'<text x="{_MARGIN}" y="{_MARGIN - 12}">{escape(label)}</text>')
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def _colour(buffer: Buffer) -> str:
    """Stable for an id, so that two pictures of one problem can be compared."""
    hue = int.from_bytes(hashlib.sha256(buffer.id.encode()).digest()[:2], "big") % 360
    return f"hsl({hue},55%,60%)"
