"""The ``memo`` command: one typer app, one place that turns errors into exit codes.

Exit codes: 0 done / fits / equal; 1 infeasible, does not fit, verify failed; 2 bad input;
3 time limit without an answer.
"""

import atexit
import functools
import gc
import importlib
import sys

import typer
from typer.exceptions import TyperException

from memo_compile.cli.options import RAW_ARGUMENTS
from memo_compile.errors import Infeasible, MemoError

app = typer.Typer(
    name="memo",
    help="Plan activation memory for torch.compile.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


_COMMANDS = {
    "lynx": "lynx_command:lynx",
    "stages": "lynx_command:stages",
    "alpha": "pipeline_command:alpha",
    "pareto": "pipeline_command:pareto",
    "offload-fraction": "pipeline_command:offload_fraction",
    "search": "search_command:search_command",
    "calibrate": "search_command:calibrate_command",
    "doctor": "doctor_command:doctor",
    "explain": "explain_command:explain",
    "fit": "fit_command:fit",
    "place": "place_command:place_file",
    "hardware": "hardware_command:group",
    "compare": "compare_command:compare_files",
    "diff": "diff_command:diff_files",
    "replay": "replay_command:replay",
    "plan": "plan_command:plan_command",
    "cache": "cache_command:group",
    "verify": "verify_command:verify",
}
"""Command -> module of memo_compile.cli and what it holds: a function, or a group of commands."""

_RUN_SCRIPTS = ("explain", "fit", "verify")
"""Commands whose later arguments are a script's."""


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    """Plan activation memory for torch.compile."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(code=2)


@functools.cache
def _register(name: str) -> None:
    """Imports the command ``name`` and adds it to the app."""
    module, attribute = _COMMANDS[name].split(":")
    command = getattr(importlib.import_module(f"memo_compile.cli.{module}"), attribute)
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        settings = RAW_ARGUMENTS if name in _RUN_SCRIPTS else None
        app.command(name=name, context_settings=settings)(command)


def main(argv: list[str] | None = None) -> None:
    """Run the command line and leave the process with the exit code of the table above."""
    atexit.register(gc.freeze)  # else cycles are looked for at the end: 2 s of a plan
    command = (sys.argv[1:] if argv is None else argv)[:1]
    # Importing one command alone is faster; the help names them all.
    for name in command if command and command[0] in _COMMANDS else _COMMANDS:
        _register(name)
    try:
        code = app(args=argv, standalone_mode=False)
    except TyperException as error:  # a usage error: unknown command, missing argument, ...
        print(f"memo: {error.format_message()}", file=sys.stderr)
        code = 2
    except MemoError as error:
        print(f"memo: {error}", file=sys.stderr)
        code = 1 if isinstance(error, Infeasible) else 2
    sys.exit(code or 0)


if __name__ == "__main__":
    main()
