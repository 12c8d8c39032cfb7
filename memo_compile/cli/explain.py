"""``memo explain SCRIPT.py [ARGS...]``: run a script as Python would, then print memo's report."""

import atexit
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from memo_compile.errors import InputError

_INTERRUPTED = 130
"""Exit code of a process that ctrl-C ended: 128 + SIGINT."""

RAW_ARGUMENTS = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}
"""Everything after SCRIPT.py is the script's own, options included."""


def register(app: typer.Typer) -> None:
    """Attach the command to ``app``."""
    app.command(name="explain", context_settings=RAW_ARGUMENTS)(explain)


def explain(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(metavar="SCRIPT.py [ARGS...]", help="What to run.")],
    as_json: Annotated[
        bool,
        typer.Option("--json", help="The report as JSON; the script's output goes to stderr."),
    ] = False,
) -> None:
    """Run a training script and print what memo planned in it, and why.

    The exit code is the script's own; an exception of the script is shown as Python shows it, and
    the report still comes.
    """
    if not script.is_file():
        raise InputError(f"{script}: no such file; expected a Python script")
    # Registered before the script runs, so it comes last: after Python has waited for the script's
    # threads (joining them here would wait for idle workers of thread pools, for ever) and after
    # the script's own exit handlers.
    atexit.register(_print_report, os.getpid(), _stdout_to_stderr() if as_json else None)
    raise typer.Exit(code=run_script(script, context.args))


def _print_report(process: int, json_descriptor: int | None) -> None:
    """Print the report in ``process`` itself, and not in children that it forked."""
    if os.getpid() != process:
        return
    sys.stdout.flush()
    import memo_compile

    report = memo_compile.report()
    if json_descriptor is None:
        print(report, flush=True)
        return
    with os.fdopen(json_descriptor, "w") as stream:
        json.dump(report.as_dict(), stream, indent=2)
        stream.write("\n")


def run_script(
    script: Path, arguments: list[str], *, passes: tuple[type[BaseException], ...] = ()
) -> int:
    """Run ``script`` as ``__main__`` and return the exit code that Python would leave with.

    ``sys.argv`` and ``sys.path`` stay as the script saw them, for its exit handlers. An exception
    of a type in ``passes`` ends it with code 0 and is not shown.
    """
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except passes:
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
    except KeyboardInterrupt:
        _print_traceback(script)
        code = _INTERRUPTED
    except BaseException:
        # Whatever a script raises is its own affair: Python would print it and leave with 1.
        _print_traceback(script)
        code = 1
    return code


def _exit_code(error: SystemExit) -> int:
    """What the interpreter makes of ``sys.exit(code)``: a text goes to stderr and means 1."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr)
    return 1


def _print_traceback(script: Path) -> None:
    """Show the running exception from the script's first frame on, without the frames of memo."""
    kind, error, trace = sys.exc_info()
    assert error is not None
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename != str(script):
        first = first.tb_next
    sys.stdout.flush()
    if isinstance(error, SyntaxError) and first is None:
        traceback.print_exception(kind, error, None)
    else:
        traceback.print_exception(kind, error, first or trace)


def _stdout_to_stderr() -> int:
    """Point descriptor 1 at stderr, for child processes and C code too; returns the old stdout."""
    sys.stdout.flush()
    original = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return original
