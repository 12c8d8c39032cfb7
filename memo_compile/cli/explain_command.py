"""``memo explain SCRIPT.py [ARGS...]``: run a script as Python would, then print memo's report."""

import atexit
import json
import os
import sys
from typing import Annotated

import typer

from memo_compile.cli.options import Script, require_script, stdout_to_stderr
from memo_compile.errors import InputError
from memo_compile.offline.script import run_script
from memo_compile.reporting import state


def explain(
    context: typer.Context,
    script: Script,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Every tensor with its reason, before SCRIPT.py.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The report as JSON; the script's output goes to stderr.")
    ] = False,
) -> None:
    """Run a training script and print what memo planned in it, and why.

    The exit code is the script's own; an exception of the script is shown as Python shows it, and
    the report still comes. A script that succeeds without memo leaves with 2.
    """
    require_script(context, script)
    # Registered before the script runs, so it comes last: after Python has waited for the script's
    # threads (joining them here would wait for idle workers of thread pools, for ever) and after
    # the script's own exit handlers.
    descriptor = stdout_to_stderr() if as_json else None
    atexit.register(_print_report, os.getpid(), descriptor, verbose=verbose)
    code = run_script(script, context.args)
    report = state.report()
    if not code and not report.plans and not report.notes:
        raise InputError(
            f'{script}: nothing in it went through torch.compile(backend="memo") (processes that '
            "it starts are not seen); compile the model with it, and train a step"
        )
    raise typer.Exit(code=code)


def _print_report(process: int, json_descriptor: int | None, *, verbose: bool) -> None:
    """Print the report in ``process`` itself, and not in children that it forked."""
    if os.getpid() != process:
        return
    sys.stdout.flush()
    report = state.report()
    if json_descriptor is None:
        print(report.text(verbose=verbose), flush=True)
        return
    with os.fdopen(json_descriptor, "w") as stream:
        json.dump(report.as_dict(), stream, indent=2)
        stream.write("\n")
