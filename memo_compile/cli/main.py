"""The ``memo`` command: one typer app, one place that turns errors into exit codes.

Exit codes: 0 done / fits / equal; 1 infeasible, does not fit, verify failed; 2 bad input;
3 time limit without an answer.
"""

import functools
import importlib
import sys

import typer
from typer.exceptions import TyperException

from memo_compile.errors import Infeasible, MemoError

app = typer.Typer(
    name="memo",
    help="Plan activation memory for torch.compile.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


_COMMAND_MODULES: tuple[str, ...] = (
    "lynx",
    "pipeline",
    "search",
    "doctor",
    "explain",
    "place",
    "hardware",
    "compare",
    "diff",
    "replay",
    "plan",
    "verify",
)
"""Modules of memo_compile.cli; each has ``register(app)`` that attaches its commands."""


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    """Plan activation memory for torch.compile."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(code=2)


@functools.cache
def _register() -> None:
    for name in _COMMAND_MODULES:
        importlib.import_module(f"memo_compile.cli.{name}").register(app)


def main(argv: list[str] | None = None) -> None:
    """Run the command line and leave the process with the exit code of the table above."""
    _register()
    try:
        code = app(args=argv, standalone_mode=False)
    except TyperException as error:  # a usage error: unknown command, missing argument, ...
        print(f"memo: {error.format_message()}", file=sys.stderr)
        code = 2
    except Infeasible as error:
        print(f"memo: {error}", file=sys.stderr)
        code = 1
    except MemoError as error:
        print(f"memo: {error}", file=sys.stderr)
        code = 2
    sys.exit(code or 0)


if __name__ == "__main__":
    main()
