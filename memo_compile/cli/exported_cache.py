"""Writes caches into one folder that can be copied to another machine, and reads them there.

    warm/manifest.json    what the caches were made with, and the digest of each file
    warm/files/DIGEST     the files' contents; files of equal content share one

An import compares all of the folder before it writes any of it.
"""

import hashlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from memo_compile.costs.host import processor_instructions
from memo_compile.errors import InputError
from memo_compile.file_store import code_digest, digest_of
from memo_compile.gpus import version_of
from memo_compile.step.serialise import plain, restore
from memo_compile.text_files import named, read_json, write_text

FORMAT = 1
"""Version of the folder's form."""

_NOT_CARRIED = ("locks", "triton")
"""Folders of torch's cache. Triton's files name each other by whole paths; torch keeps their
contents in its cache of graphs too, and writes them where a graph is loaded."""

Caches = Mapping[str, Path]
"""``memo`` and ``torch`` -> the folder of that cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What an exported folder holds."""

    made_with: Mapping[str, str]
    """What the code in the caches depends on; must be the same where the folder is read."""
    instructions: tuple[str, ...]
    """The processor's. Kernels for a CPU use them, so a processor that reads must have them."""
    files: Mapping[str, str]
    """Path of a file, such as ``torch/ab/cabc.so`` -> SHA-256 of its content."""


def export_caches(folder: Path, caches: Caches, gpus: str) -> Manifest:
    """Writes ``caches``, of a machine with ``gpus``, into a new ``folder``. Raises InputError."""
    with named(folder, "made"):
        (folder / "files").mkdir(parents=True)
    files = {}
    for name, path in _files(caches):
        with named(path, "copied"):
            data = path.read_bytes()
            files[name] = hashlib.sha256(data).hexdigest()
            (folder / "files" / files[name]).write_bytes(data)
    manifest = Manifest(
        made_with=_made_with(gpus), instructions=processor_instructions(), files=files
    )
    content = plain(manifest)
    # The manifest comes last: an export that was interrupted has none, and is not read.
    text = json.dumps({"format": FORMAT, "sha256": digest_of(content), "content": content})
    write_text(folder / "manifest.json", text)
    return manifest


def import_caches(folder: Path, caches: Caches, gpus: str) -> Manifest:
    """Writes an exported ``folder`` into ``caches``, on a machine with ``gpus``.

    Raises InputError, before anything is written: the folder is damaged, or not for this machine.
    """
    manifest = _manifest(folder)
    _require_same_machine(folder, manifest, gpus)
    with ExitStack() as stack:
        whole: dict[str, Path] = {}
        for name, root in caches.items():
            with named(root, "written"):
                root.mkdir(parents=True, exist_ok=True)
                whole[name] = Path(
                    stack.enter_context(tempfile.TemporaryDirectory(dir=root, prefix=".import"))
                )
        for name, digest in manifest.files.items():
            _copy(folder, digest, _below(whole, name, folder))
        for name in manifest.files:
            with named(_below(caches, name, folder), "written"):
                _below(caches, name, folder).parent.mkdir(parents=True, exist_ok=True)
                os.replace(_below(whole, name, folder), _below(caches, name, folder))
    return manifest


def _files(caches: Caches) -> Iterator[tuple[str, Path]]:
    """Yields name and path of each file to be carried; a leading dot is of an unfinished one."""
    for cache, root in caches.items():
        for path in sorted(root.rglob("*")):
            parts = path.relative_to(root).parts
            is_hidden = any(part.startswith(".") for part in parts)
            if path.is_file() and not is_hidden and parts[0] not in _NOT_CARRIED:
                yield "/".join((cache, *parts)), path


def _below(roots: Caches, name: str, folder: Path) -> Path:
    """Returns where the file ``name`` lies. Raises InputError: outside of the caches."""
    cache, *parts = PurePosixPath(name).parts or ("",)
    if cache not in roots or not parts or ".." in parts:
        raise InputError(f"{folder}: it is damaged: {name!r} is no file of a cache")
    return roots[cache].joinpath(*parts)


def _copy(folder: Path, digest: str, target: Path) -> None:
    """Copies the content ``digest``. Raises InputError: it is not there, or is another."""
    source = folder / "files" / digest
    with named(source, "copied"):
        data = source.read_bytes()
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    if hashlib.sha256(data).hexdigest() != digest:
        raise InputError(f"{source}: it is damaged; export or copy the folder again")


def _manifest(folder: Path) -> Manifest:
    """Reads a folder's manifest. Raises InputError: missing, damaged, or of a newer memo."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise InputError(f"{folder}: no whole export of memo's: it has no manifest.json")
    body = read_json(path)
    if not isinstance(body, dict) or not isinstance(body.get("format"), int):
        raise InputError(f"{path}: it is damaged, or none of memo's")
    if body["format"] != FORMAT:
        raise InputError(f"{path}: is of format {body['format']}; this memo reads {FORMAT}")
    if digest_of(body.get("content")) != body.get("sha256"):
        raise InputError(f"{path}: it is damaged; export or copy the folder again")
    manifest: Manifest = restore(body["content"], Manifest, "manifest")
    return manifest


def _made_with(gpus: str) -> dict[str, str]:
    """Returns what code in a cache depends on, the most telling first."""
    return {
        "torch": str(version_of("torch")),
        "Python": sys.version,
        "memo": version_of("memo-compile") or "a checkout",
        "a machine": platform.machine(),
        "GPU": gpus,
        "memo's sources": code_digest()[:16],
    }


def _require_same_machine(folder: Path, manifest: Manifest, gpus: str) -> None:
    """Raises InputError that names the first difference between the folder and this machine."""
    for name, value in _made_with(gpus).items():
        if manifest.made_with.get(name) != value:
            exported = manifest.made_with.get(name)
            raise InputError(f"{folder}: was made with {name} {exported}, and here it is {value}")
    missing = sorted(set(manifest.instructions) - set(processor_instructions()))
    if missing:
        raise InputError(
            f"{folder}: was made on a processor with instructions that this one does not have: "
            f"{' '.join(missing[:5])}"
        )
