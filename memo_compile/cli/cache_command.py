"""``memo cache``: what memo remembers on disk; how to carry it elsewhere, or make it forget."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from memo_compile.cli.exported_cache import Manifest, export_caches, import_caches
from memo_compile.cli.options import AsJson, example
from memo_compile.config import user_store
from memo_compile.errors import InputError
from memo_compile.file_store import FileStore, RememberedFile
from memo_compile.units import format_bytes

group = typer.Typer(help="What memo remembers on disk: show it, carry it elsewhere, clear it.")

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="a folder that can be copied")]


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


@group.command("export", epilog=example("cache export warm"))
def export_command(folder: Folder) -> None:
    """Write all that makes a first step fast into a new FOLDER: memo's cache and torch's.

    Run it when a process with these caches (XDG_CACHE_HOME, TORCHINDUCTOR_CACHE_DIR) has ended.
    """
    print(_said(export_caches(folder, *_caches_and_gpus()), f"written into {folder}"))


@group.command("import", epilog=example("cache import warm"))
def import_command(folder: Folder) -> None:
    """Take what was exported into FOLDER into the caches of this machine.

    It must have the same torch, Python, memo, processor and GPU. What the folder holds is code that
    later steps run: import only what you would run.
    """
    print(_said(import_caches(folder, *_caches_and_gpus()), f"taken from {folder}"))


def _caches_and_gpus() -> tuple[dict[str, Path], str]:
    """Returns the folders of memo's cache and of torch's, and the names of this machine's GPUs."""
    import torch

    from memo_compile.torch_private import compile_caches

    gpus = {torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())}
    caches = {"memo": _store().folder, "torch": compile_caches.cache_folder()}
    return caches, ", ".join(sorted(gpus)) or "none"


def _said(manifest: Manifest, action: str) -> str:
    num_memo = sum(name.startswith("memo/") for name in manifest.files)
    return f"{num_memo} files of memo and {len(manifest.files) - num_memo} of torch {action}"


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
