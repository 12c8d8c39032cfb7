"""The rooms of the code: one name for each thing, and private torch behind one door."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tools import draw_rooms

ROOT = Path(__file__).parents[2]
FOLDERS = ("memo_compile", "runtime/memo_runtime")
BESIDE = ("tests", "benchmarks", "tools", "examples")
"""What is read as often as the product."""


def sources(folders: tuple[str, ...] = FOLDERS) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def module_names(paths: Iterator[Path]) -> list[tuple[str, str]]:
    """Each module and package with its own, last name."""
    return [
        (path.parent.name if path.stem == "__init__" else path.stem, str(path)) for path in paths
    ]


def public_classes(path: Path) -> list[tuple[str, str]]:
    body = ast.parse(path.read_text()).body
    classes = (node for node in body if isinstance(node, ast.ClassDef))
    return [(node.name, str(path)) for node in classes if not node.name.startswith("_")]


def duplicates(named: list[tuple[str, str]]) -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    for name, place in named:
        places.setdefault(name, []).append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def imported(path: Path) -> Iterator[str]:
    """The dotted names that a module imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def variables(text: str) -> set[str]:
    """Names that a module binds or reads, arguments among them."""
    nodes = list(ast.walk(ast.parse(text)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.arg for node in nodes if isinstance(node, ast.arg)}


def test_no_two_modules_have_one_name():
    assert duplicates(module_names(sources())) == {}


def test_no_two_public_classes_have_one_name():
    assert duplicates([found for path in sources() for found in public_classes(path)]) == {}


def test_private_torch_is_imported_in_one_room_only():
    users = {
        path.relative_to(ROOT).as_posix()
        for path in sources()
        for name in imported(path)
        if name.startswith("torch._")
    }
    assert {user.rsplit("/", 1)[0] for user in users} == {"memo_compile/torch_private"}


def test_variables_say_what_they_hold():
    """A call, a slot, a buffer: never just ``one``."""
    files = [path for path in sources((*FOLDERS, *BESIDE)) if "one" in variables(path.read_text())]
    assert [path.relative_to(ROOT).as_posix() for path in files] == []


def test_the_rooms_are_drawn_from_the_imports():
    """An arrow only runs down: networkx refuses to reduce a graph with a circle."""
    graph = draw_rooms.rooms()
    assert {"planners", "check", "driver", "memo_runtime"} <= set(graph)
    assert ("driver", "planners") in graph.edges
    assert all(graph.nodes[room]["text"] for room in graph)
    assert draw_rooms.draw(graph) == draw_rooms.PICTURE.read_text(), "python tools/draw_rooms.py"
