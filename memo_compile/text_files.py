"""Writing a text file that a command was asked for."""

from pathlib import Path

from memo_compile.errors import InputError


def write_text(path: Path, text: str) -> None:
    """``path`` holds ``text``.

    Raises:
        InputError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error
