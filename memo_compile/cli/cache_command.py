"""``memo cache``: what memo remembers on disk, and how to make it forget."""

import json

import typer
from rich.console import Console
from rich.table import Table

from memo_compile.cli.options import AsJson, example
from memo_compile.config import user_store
from memo_compile.errors import InputError
from memo_compile.file_store import FileStore, RememberedFile
from memo_compile.units import format_bytes

group = typer.Typer(help="What memo remembers on disk: show it, clear it.")


@group.command(epilog=example("cache show"))
def show(as_json: AsJson = False) -> None:
    """What is remembered, of which models, in how many bytes; files that are not used are named."""
    store = _store()
    stored = store.stored()
    kinds: dict[str, list[RememberedFile]] = {}
    for entry in sorted(stored, key=lambda entry: entry.kind):
        kinds.setdefault(entry.kind, []).append(entry)
    if as_json:
        print(json.dumps(_as_dict(store, stored, kinds)))
        return
    console = Console(highlight=False)
    console.print(f"{store.folder}: {_size(stored)} of at most {format_bytes(store.max_bytes)}")
    if not stored:
        return
    table = Table("kind", "files", "size")
    for kind, entries in kinds.items():
        table.add_row(kind, str(len(entries)), _size(entries))
    console.print(table)
    for entry in stored:
        if entry.fault is not None:
            console.print(f"{entry.path.name}: not used: {entry.fault}", markup=False)


@group.command(epilog=example("cache clear"))
def clear() -> None:
    """Forget everything: plans are traced, and models lowered, anew."""
    store = _store()
    removed = store.clear()
    print(f"{store.folder}: {len(removed)} files removed, {_size(removed)}")


def _store() -> FileStore:
    store = user_store()
    if store is None:
        raise InputError("cache: this user has no home, so nothing is remembered")
    return store


def _num_bytes(stored: list[RememberedFile]) -> int:
    return sum(entry.num_bytes for entry in stored)


def _size(stored: list[RememberedFile]) -> str:
    return format_bytes(_num_bytes(stored))


def _as_dict(
    store: FileStore, stored: list[RememberedFile], kinds: dict[str, list[RememberedFile]]
) -> dict[str, object]:
    faults = {entry.path.name: entry.fault for entry in stored if entry.fault is not None}
    return {
        "folder": str(store.folder),
        "num_files": len(stored),
        "num_bytes": _num_bytes(stored),
        "max_bytes": store.max_bytes,
        "kinds": {
            kind: {"num_files": len(entries), "num_bytes": _num_bytes(entries)}
            for kind, entries in kinds.items()
        },
        "not_used": faults,
    }
