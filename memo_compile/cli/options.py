"""What several commands share: options, exit codes of solvers, tables, files of a dump folder."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from memo_compile.errors import InputError
from memo_compile.step.serialise import Data, from_json
from memo_compile.text_files import read_text

EXIT_CODES = {"optimal": 0, "feasible": 0, "infeasible": 1, "time_limit": 3, "error": 3}
"""A solver's status -> exit code of the command."""

RAW_ARGUMENTS = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}
"""Everything after SCRIPT.py is the script's own, options included."""

MAX_COUNT = 10**15
"""Larger counts are refused: they are slips of the pen, and their products overflow floats."""


def parse_count(text: str | int) -> int:
    """Returns the whole number in ``text``, such as 32e3. Raises BadParameter: it is none."""
    try:
        value = float(text)
        if value == int(value) and abs(value) <= MAX_COUNT:
            return int(value)
    except (ValueError, OverflowError):
        pass
    raise typer.BadParameter(
        f"expected a whole number such as 4096 or 32e3, at most {MAX_COUNT:.0e}, got {text!r}"
    )


def example(*words: str) -> str:
    """Returns the last line of a command's help."""
    return f"Example: memo {' '.join(words)}".rstrip()


def require_script(context: typer.Context, script: Path) -> None:
    """Raises InputError: there is no ``script``. For ``memo COMMAND [OPTIONS] SCRIPT.py [ARGS]``.

    Options of the command that stand behind the script are named on stderr: they are the script's.
    """
    if not script.is_file():
        raise InputError(f"{script}: no such file; expected a Python script")
    options = {name for parameter in context.command.params for name in parameter.opts}
    for word in context.args:
        if word.startswith("--") and word.partition("=")[0] in options:
            name = context.info_name
            print(
                f"memo: {word} behind {script} goes to the script; for memo it stands before it: "
                f"memo {name} {word} {script}",
                file=sys.stderr,
            )


def read_data(path: Path, kind: type[Data]) -> Data:
    """Returns the ``kind`` in ``path``. Raises InputError: unreadable, or something else."""
    return from_json(read_text(path), kind, where=str(path))


def stdout_to_stderr() -> int:
    """Points descriptor 1 at stderr, for child processes and C code too; returns the old stdout."""
    sys.stdout.flush()
    original = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return original


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns ``rows`` under ``header``, in columns as wide as needed and two blanks apart."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


Count = Annotated[int, typer.Option(parser=parse_count, metavar="N")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Model = Annotated[str, typer.Option(help="Named shape, e.g. llama-175b.")]
Hardware = Annotated[str, typer.Option(help="Named device, e.g. h800.")]
Script = Annotated[Path, typer.Argument(metavar="SCRIPT.py [ARGS...]", help="What to run.")]
