"""Options that several commands share, and the exit codes of solvers."""

from pathlib import Path
from typing import Annotated

import typer

from memo_compile.errors import InputError
from memo_compile.units import parse_size

EXIT_CODES = {"optimal": 0, "feasible": 0, "infeasible": 1, "time_limit": 3, "error": 3}
"""Of a solver's status."""

RAW_ARGUMENTS = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}
"""Everything after SCRIPT.py is the script's own, options included."""

MAX_COUNT = 10**15
"""Larger counts are slips of the pen, and their products would leave the floats."""


def parse_count(text: str | int) -> int:
    """A whole number, also written 32e3.

    Raises:
        typer.BadParameter: it is none, or beyond ``MAX_COUNT``.
    """
    try:
        value = float(text)
        if value == int(value) and abs(value) <= MAX_COUNT:
            return int(value)
    except (ValueError, OverflowError):
        pass
    raise typer.BadParameter(
        f"expected a whole number such as 4096 or 32e3, at most {MAX_COUNT:.0e}, got {text!r}"
    )


def parse_budget(text: str, device_bytes: int) -> int:
    """Bytes of the option ``--budget``; a percentage is of ``device_bytes``.

    Raises:
        ConfigError: it is no size.
        InputError: it is 0.
    """
    budget_bytes = parse_size(text, total_bytes=device_bytes, what="budget")
    if budget_bytes == 0:
        raise InputError("budget: expected more than 0 bytes")
    return budget_bytes


def require_script(script: Path) -> None:
    """``script`` is a file.

    Raises:
        InputError: it is not.
    """
    if not script.is_file():
        raise InputError(f"{script}: no such file; expected a Python script")


Count = Annotated[int, typer.Option(parser=parse_count, metavar="N")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Model = Annotated[str, typer.Option(help="Named shape, e.g. llama-175b.")]
Hardware = Annotated[str, typer.Option(help="Named device, e.g. h800.")]
Script = Annotated[Path, typer.Argument(metavar="SCRIPT.py [ARGS...]", help="What to run.")]
