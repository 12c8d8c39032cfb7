"""Damage to files of memo's caches."""

import json
from collections.abc import Callable
from pathlib import Path

from memo_compile.file_store import FileStore


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def rewritten(store: FileStore, path: Path, change: Callable[[dict], None]) -> None:
    """``path`` with a changed record, whose digest is right: whoever wrote it knew how."""
    head, _, body = path.read_bytes().partition(b"\n")
    record = json.loads(body)
    change(record)
    store.write({"kind": "rewritten"}, record, "x")
    (made,) = store.folder.glob("*.x.json")
    new_head, _, new_body = made.read_bytes().partition(b"\n")
    said = {**json.loads(new_head), "key": json.loads(head)["key"]}
    path.write_bytes(json.dumps(said).encode() + b"\n" + new_body)
    made.unlink()
