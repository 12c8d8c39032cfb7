"""Files that a command was given, or was asked for; one line for what is wrong with them."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memo_compile.errors import InputError


@contextlib.contextmanager
def named(path: Path, done: str) -> Iterator[None]:
    """Turns an OSError of the block into an InputError: ``path`` cannot be ``done`` ("read")."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be {done}: {error.strerror or error}") from error


def write_text(path: Path, text: str) -> None:
    """Writes ``text`` into ``path``. Raises InputError: it cannot be written."""
    with named(path, "written"):
        path.write_text(text, encoding="utf-8")


def require_writable(path: Path) -> None:
    """Raises InputError: ``path`` is a folder, or lies in none. For use before long work."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InputError(f"{path}: is a folder, or its folder does not exist; name a file")


def read_text(path: Path) -> str:
    """Returns the text in ``path``, without a byte order mark. Raises InputError: it has none."""
    try:
        with named(path, "read"):
            return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start})") from error


def read_json(path: Path) -> Any:
    """Returns the data in ``path``. Raises InputError: it cannot be read, or is not JSON."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, where: str) -> Any:
    """Returns the data of ``text``. Raises InputError: no JSON, at the line of ``where``."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}:{error.lineno}: not JSON: {error.msg}") from error
    except ValueError as error:  # a number of more digits than Python reads
        raise InputError(f"{where}: not JSON: {error}") from error
    except RecursionError:
        raise InputError(f"{where}: lists are nested too deeply") from None
