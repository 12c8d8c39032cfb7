"""Draw the rooms of the code and who imports whom: ``python tools/draw_rooms.py``.

The picture lies in docs/pictures/rooms.svg. A box is a package, an arrow points from a room to one
that it imports; an arrow that a longer way says already is left out.
"""

import ast
import html
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "pictures" / "rooms.svg"
PACKAGES = {
    "memo_compile": ROOT / "memo_compile",
    "memo_runtime": ROOT / "runtime" / "memo_runtime",
}

BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y, MARGIN = 224, 74, 18, 40, 16
"""Pixels."""
STYLE = """
  text { font: 11px system-ui, sans-serif; fill: #1f2328; }
  .name { font-weight: 600; font-size: 13px; }
  rect { fill: #f6f8fa; stroke: #8c959f; }
  path { fill: none; stroke: #8c959f; }
  marker path { fill: #8c959f; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    rect { fill: #161b22; stroke: #59636e; }
    path { stroke: #59636e; }
    marker path { fill: #59636e; }
  }
"""


def modules() -> dict[str, Path]:
    """Every module of the product by its dotted name."""
    return {
        ".".join((name, *file.relative_to(folder).with_suffix("").parts)): file
        for name, folder in PACKAGES.items()
        for file in sorted(folder.rglob("*.py"))
    }


def room_of(module: str) -> str:
    """``memo_compile.planners.moves`` -> ``planners``; all of the runtime is one room."""
    package, *rest = module.split(".")
    return package if package == "memo_runtime" else rest[0]


def imports(file: Path) -> Iterator[str]:
    """Dotted names that ``file`` imports when it is loaded or later."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def rooms() -> nx.DiGraph:
    """Rooms with their ``text``; an edge goes from a room to one that it imports."""
    graph = nx.DiGraph()
    files = modules()
    for module, file in files.items():
        room = room_of(module)
        if module in (f"memo_compile.{room}.__init__", f"{room}.__init__"):
            described = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            graph.add_node(room, text=described.split("\n")[0].replace("`", ""))
    for module, file in files.items():
        read = {room_of(name) for name in imports(file) if name.count(".") and name in files}
        graph.add_edges_from((room_of(module), other) for other in read if other in graph)
    beside = [room for room in graph if "text" not in graph.nodes[room]]
    graph.remove_nodes_from(beside)
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    return graph


def draw(graph: nx.DiGraph) -> str:
    """The picture of ``graph``, which has no circle.

    Raises:
        networkx.NetworkXUnfeasible: rooms import each other in a circle.
    """
    reduced = nx.transitive_reduction(graph)
    rows = list(nx.topological_generations(reduced))
    width = max(len(row) for row in rows) * (BOX_WIDTH + GAP_X) - GAP_X + 2 * MARGIN
    height = len(rows) * (BOX_HEIGHT + GAP_Y) - GAP_Y + 2 * MARGIN
    at = {}
    for number, row in enumerate(rows):
        begin = (width - len(row) * (BOX_WIDTH + GAP_X) + GAP_X) / 2
        above = {room: _mean(at[other][0] for other in reduced.predecessors(room)) for room in row}
        for place, room in enumerate(sorted(row, key=lambda room: (above[room], room))):
            at[room] = (begin + place * (BOX_WIDTH + GAP_X), MARGIN + number * (BOX_HEIGHT + GAP_Y))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">',
        "<title>The rooms of memo, and who imports whom</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z"/></marker></defs>',
        *(_arrow(at[room], at[other]) for room, other in sorted(reduced.edges)),
        *(_box(room, graph.nodes[room], *at[room]) for room in graph),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _mean(numbers: Iterator[float]) -> float:
    values = list(numbers)
    return sum(values) / len(values) if values else 0.0


def _arrow(above: tuple[float, float], below: tuple[float, float]) -> str:
    x1, y1 = above[0] + BOX_WIDTH / 2, above[1] + BOX_HEIGHT
    x2, y2 = below[0] + BOX_WIDTH / 2, below[1] - 2
    bend = (y2 - y1) / 2
    curve = (
        f"M{x1:.0f} {y1:.0f}C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2:.0f}"
    )
    return f'<path d="{curve}" marker-end="url(#to)"/>'


def _box(room: str, data: dict[str, object], x: float, y: float) -> str:
    lines = textwrap.wrap(str(data.get("text", "")), 34)
    lines = [*lines[:2], *(["..."] if lines[3:] else lines[2:3])]
    said = "".join(
        f'<text x="{x + 10:.0f}" y="{y + 35 + 13 * number:.0f}">{html.escape(line)}</text>'
        for number, line in enumerate(lines)
    )
    return (
        f'<rect x="{x:.0f}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5"/>'
        f'<text class="name" x="{x + 10:.0f}" y="{y + 18}">{html.escape(room)}</text>'
        f"{said}"
    )


def main() -> int:
    """Write the picture; its rooms and arrows are printed."""
    graph = rooms()
    PICTURE.write_text(draw(graph), encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)}: {len(graph)} rooms, {graph.number_of_edges()} imports")
    return 0


if __name__ == "__main__":
    sys.exit(main())
