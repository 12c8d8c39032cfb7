"""Keeps on disk what memo has traced and lowered, found again by content.

A file is JSON: a line that says what it is, with a digest of the rest, and the data. A file that
does not fit its digest or its name is ignored, and its content made anew. No torch here.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memo_compile.errors import InputError

log = logging.getLogger("memo")

MAX_BYTES = 256 * 2**20
"""Most bytes of all files; the least recently used go. A step in many tiles takes 3 MiB."""

FORMAT = 2
"""Version of the files' own form."""


def digest_of(content: Any) -> str:
    """Returns the SHA-256 of ``content``, which JSON can hold, as 64 characters."""
    return _digest(json.dumps(content, sort_keys=True).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@functools.cache
def code_digest() -> str:
    """Returns a digest of memo's own sources and of the versions of torch and Python."""
    digest = hashlib.sha256()
    for package in ("memo_compile", "memo_runtime"):
        spec = importlib.util.find_spec(package)
        for folder in spec.submodule_search_locations or () if spec is not None else ():
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest_of([digest.hexdigest(), importlib.metadata.version("torch"), sys.version])


@functools.cache
def say_unused(path: Path, reason: str) -> None:
    """Logs, once in a process, that the file ``path`` is not used."""
    log.warning("memo: %s is not used, its content is made anew: %s", path, reason)


UNKNOWN = "unknown"
"""The kind of a file that does not say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberedFile:
    """One file of the store."""

    path: Path
    kind: str
    """The kind of its content: model, step ..., or UNKNOWN."""
    num_bytes: int
    fault: str | None = None
    """Why it is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStore:
    """A folder of kept data. Failing to read or write it is no error: work is repeated."""

    folder: Path
    max_bytes: int = MAX_BYTES

    def read(self, key: Mapping[str, Any]) -> Iterator[Any]:
        """Yields the body of each variant kept under ``key``; skips damaged files."""
        name = digest_of(key)
        for path in sorted(self.folder.glob(f"{name}.*.json")):
            try:
                body = _checked(path.read_bytes(), name)
            except FileNotFoundError:
                continue  # another process has just dropped it
            except (OSError, ValueError, RecursionError) as error:
                say_unused(path, str(error))
                continue
            with contextlib.suppress(OSError):  # another user's, or on a disk that is only read
                os.utime(path)  # it was used: the least recently used go first
            yield body

    def write(self, key: Mapping[str, Any], body: Any, variant: str = "0") -> None:
        """Keeps ``body`` under ``key``; several bodies of one key have different variants.

        Another process sees the whole file or none.
        """
        name = digest_of(key)
        data = json.dumps(body, separators=(",", ":")).encode()
        kind = key.get("kind", UNKNOWN)
        fields = {"memo": FORMAT, "kind": kind, "key": name, "sha256": _digest(data)}
        head = json.dumps(fields).encode()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                whole = Path(folder) / "whole"
                whole.write_bytes(head + b"\n" + data)
                os.replace(whole, self.folder / f"{name}.{variant}.json")
            self._drop_oldest()
        except OSError as error:
            log.info("memo: %s is not remembered: %s", kind, error)

    def stored(self) -> list[RememberedFile]:
        """Returns every file of the folder, by name; each is read and checked."""
        return [_stored(path) for path in sorted(self.folder.glob("*.json"))]

    def clear(self) -> list[RememberedFile]:
        """Removes every file, and returns what there was. Raises InputError: one stays.

        Removes temporary files of killed processes as well.
        """
        removed = self.stored()
        for leftover in self.folder.glob("tmp*/whole"):
            with contextlib.suppress(OSError):
                leftover.unlink()
                leftover.parent.rmdir()
        for entry in removed:
            try:
                entry.path.unlink(missing_ok=True)
            except OSError as error:
                raise InputError(f"{entry.path}: cannot be removed: {error.strerror}") from error
        return removed

    def _drop_oldest(self) -> None:
        """Removes the least recently used files until the rest take at most ``max_bytes``."""
        files = [(path, path.stat()) for path in self.folder.glob("*.json")]
        total_bytes = sum(stat.st_size for _, stat in files)
        for path, stat in sorted(files, key=lambda item: item[1].st_mtime_ns):
            if total_bytes <= self.max_bytes:
                break
            path.unlink(missing_ok=True)
            total_bytes -= stat.st_size


def _checked(data: bytes, name: str) -> Any:
    """Returns a file's body. Raises ValueError: damaged, or ``name`` is not its key's digest."""
    head, _, body = data.partition(b"\n")
    fields = json.loads(head)
    if not isinstance(fields, dict) or not isinstance(fields.get("kind"), str):
        raise ValueError("it is no file of memo's")
    if fields != {"memo": FORMAT, "kind": fields["kind"], "key": name, "sha256": _digest(body)}:
        raise ValueError("it is damaged, or was written for something else")
    return json.loads(body)


def _stored(path: Path) -> RememberedFile:
    """Reads and checks the file ``path``; its entry names the fault, if there is one."""
    kind, num_bytes = UNKNOWN, 0
    try:
        data = path.read_bytes()
        num_bytes = len(data)
        _checked(data, path.name.partition(".")[0])
        kind = json.loads(data.partition(b"\n")[0])["kind"]
    except (OSError, ValueError, RecursionError) as error:
        return RememberedFile(path=path, kind=kind, num_bytes=num_bytes, fault=str(error))
    return RememberedFile(path=path, kind=kind, num_bytes=num_bytes)
