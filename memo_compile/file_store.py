"""Files in which memo remembers what it traced and lowered, found again by content.

A file is JSON: a line that says what it is, with a digest of the rest, and the data. What does not
fit its digest, or says something else than its name, is ignored, and made anew. No torch here.
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
"""Most bytes of all files together; those that were not used for longest go. A step in many tiles
takes 3 MiB."""

FORMAT = 2
"""Version of the files' own form."""


def digest_of(content: Any) -> str:
    """A text of 64 characters that stands for ``content``, which JSON can hold."""
    return _digest(json.dumps(content, sort_keys=True).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@functools.cache
def code_digest() -> str:
    """What stands for the code: memo's own sources, the versions of torch and of Python."""
    digest = hashlib.sha256()
    for package in ("memo_compile", "memo_runtime"):
        found = importlib.util.find_spec(package)
        for folder in found.submodule_search_locations or () if found is not None else ():
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest_of([digest.hexdigest(), importlib.metadata.version("torch"), sys.version])


@functools.cache
def say_unused(path: Path, reason: str) -> None:
    """Say, once in a process, that a file is not used."""
    log.warning("memo: %s is not used, its content is made anew: %s", path, reason)


UNKNOWN = "unknown"
"""The kind of a file that does not say which it is of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberedFile:
    """One file of the store."""

    path: Path
    kind: str
    """What it remembers: model, step ...; UNKNOWN where it does not say."""
    num_bytes: int
    fault: str | None = None
    """Why it is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStore:
    """A folder of remembered data. What cannot be read or written is no error: work is repeated."""

    folder: Path
    max_bytes: int = MAX_BYTES

    def read(self, key: Mapping[str, Any]) -> Iterator[Any]:
        """What is remembered under ``key``, in no order that means something."""
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
                os.utime(path)
            yield body

    def write(self, key: Mapping[str, Any], body: Any, variant: str = "0") -> None:
        """Remember ``body`` under ``key``; several bodies of one key have different variants.

        Another process sees the whole file or none.
        """
        name = digest_of(key)
        data = json.dumps(body, separators=(",", ":")).encode()
        said = {"memo": FORMAT, "kind": key.get("kind", UNKNOWN), "key": name}
        head = json.dumps({**said, "sha256": _digest(data)}).encode()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                whole = Path(folder) / "whole"
                whole.write_bytes(head + b"\n" + data)
                os.replace(whole, self.folder / f"{name}.{variant}.json")
            self._drop_oldest()
        except OSError as error:
            log.info("memo: %s is not remembered: %s", said["kind"], error)

    def stored(self) -> list[RememberedFile]:
        """Every file of the folder, by name; each is read and checked."""
        return [_stored(path) for path in sorted(self.folder.glob("*.json"))]

    def clear(self) -> list[RememberedFile]:
        """Remove every file; what there was. Raises InputError: one cannot be removed.

        What processes left that were killed is removed as well.
        """
        removed = self.stored()
        for rest in self.folder.glob("tmp*/whole"):
            with contextlib.suppress(OSError):
                rest.unlink()
                rest.parent.rmdir()
        for entry in removed:
            try:
                entry.path.unlink(missing_ok=True)
            except OSError as error:
                raise InputError(f"{entry.path}: cannot be removed: {error.strerror}") from error
        return removed

    def _drop_oldest(self) -> None:
        found = [(path, path.stat()) for path in self.folder.glob("*.json")]
        left = sum(known.st_size for _, known in found)
        for path, known in sorted(found, key=lambda item: item[1].st_mtime_ns):
            if left <= self.max_bytes:
                break
            path.unlink(missing_ok=True)
            left -= known.st_size


def _checked(data: bytes, name: str) -> Any:
    """The body of a file. Raises ValueError: it is damaged, or holds something else."""
    head, _, body = data.partition(b"\n")
    said = json.loads(head)
    if not isinstance(said, dict) or not isinstance(said.get("kind"), str):
        raise ValueError("it is no file of memo's")
    if said != {"memo": FORMAT, "kind": said["kind"], "key": name, "sha256": _digest(body)}:
        raise ValueError("it is damaged, or was written for something else")
    return json.loads(body)


def _stored(path: Path) -> RememberedFile:
    """What the file says of itself, and whether it is what it says."""
    kind, num_bytes = UNKNOWN, 0
    try:
        data = path.read_bytes()
        num_bytes = len(data)
        _checked(data, path.name.partition(".")[0])
        kind = json.loads(data.partition(b"\n")[0])["kind"]
    except (OSError, ValueError, RecursionError) as error:
        return RememberedFile(path=path, kind=kind, num_bytes=num_bytes, fault=str(error))
    return RememberedFile(path=path, kind=kind, num_bytes=num_bytes)
