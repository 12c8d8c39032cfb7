"""The ``memo`` command: one typer app, one place that turns errors into exit codes.

Exit codes: 0 done / fits / equal; 1 infeasible, does not fit, verify failed; 2 bad input;
3 time limit without an answer; 130 ended by ctrl-C.
"""

import atexit
import functools
import gc
import importlib
import platform
import sys
from typing import Annotated, Any, NamedTuple

import typer
from typer.exceptions import TyperException

from memo_compile.cli.options import RAW_ARGUMENTS, example
from memo_compile.errors import Infeasible, MemoError
from memo_compile.gpus import version_of

app = typer.Typer(
    name="memo",
    help="Plan activation memory for torch.compile.",
    epilog=example("doctor"),
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
)

INTERRUPTED = 130
"""Exit code of a command that ctrl-C ended: 128 + SIGINT."""


class _Command(NamedTuple):
    """A command of ``memo``, which is imported only when it is used."""

    panel: str
    """Its heading in ``memo --help``."""
    target: str
    """Module of memo_compile.cli, and what it holds: a function, or a group of commands."""
    example: str = ""
    """Arguments with which its ``--help`` ends."""


_USE, _INSPECT, _PAPERS = "Use", "Inspect", "Papers"
_LLAMA = "--model llama-7b --gpus 8 --seq 65536"

_COMMANDS = {
    "doctor": _Command(_USE, "doctor_command:doctor"),
    "plan": _Command(
        _USE, "plan_command:plan_command", "llama3-8b --seq 1048576 --cp 8 --hardware h100"
    ),
    "fit": _Command(_USE, "fit_command:fit", "--memory 60GiB train.py --its --options"),
    "explain": _Command(_USE, "explain_command:explain", "train.py --its --options"),
    "verify": _Command(_USE, "verify_command:verify", "--steps 3 train.py --its --options"),
    "compare": _Command(_INSPECT, "compare_command:compare_files", "plan.json peak.pickle"),
    "diff": _Command(_INSPECT, "diff_command:diff_files", "before/plan.json after/plan.json"),
    "replay": _Command(_INSPECT, "replay_command:replay", "dump/graph0 --out pictures"),
    "hardware": _Command(_INSPECT, "hardware_command:group", "list"),
    "cache": _Command(_INSPECT, "cache_command:group", "show"),
    "place": _Command(_PAPERS, "place_command:place_file", "buffers.csv --svg arena.svg"),
    "alpha": _Command(
        _PAPERS,
        "pipeline_command:alpha",
        "--hidden 4096 --layers 32 --seq 524288 --tp 4 --cp 2 --bandwidth 32e9 "
        "--host-bytes 240e9 --flops 150e12",
    ),
    "pareto": _Command(
        _PAPERS,
        "pipeline_command:pareto",
        "--model llama-7b --seq 4096 --gemm-efficiency 0.8 --hbm-efficiency 0.6",
    ),
    "offload-fraction": _Command(
        _PAPERS,
        "pipeline_command:offload_fraction",
        f"{_LLAMA} --tp 2 --cp 1 --pp 4 --layers-per-chunk 1 --checkpoint full --budget 80%",
    ),
    "search": _Command(_PAPERS, "search_command:search_command", f"{_LLAMA} --global-batch 8"),
    "calibrate": _Command(_PAPERS, "search_command:calibrate_command", "measured.csv"),
    "stages": _Command(_PAPERS, "lynx_command:stages", "stages.json"),
    "lynx": _Command(_PAPERS, "lynx_command:lynx", "heu layer.json"),
}
"""Every command by its name, in the order of the help."""

_RUN_SCRIPTS = ("explain", "fit", "verify")
"""Commands whose later arguments are a script's."""


def _print_versions(is_asked: bool) -> None:
    """Prints the versions of memo, torch and Python, and leaves; loads none of them."""
    if is_asked:
        memo, torch = (version_of(package) or "none" for package in ("memo-compile", "torch"))
        print(f"memo {memo} (torch {torch}, Python {platform.python_version()})")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_versions, is_eager=True, help="Show versions."),
    ] = False,
) -> None:
    """Plan activation memory for torch.compile."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(code=2)


@functools.cache
def _register(name: str) -> None:
    """Imports the command ``name`` and adds it to the app, once in a process."""
    command = _COMMANDS[name]
    module, attribute = command.target.split(":")
    function = getattr(importlib.import_module(f"memo_compile.cli.{module}"), attribute)
    shown: dict[str, Any] = {
        "rich_help_panel": command.panel,
        "epilog": example(name, command.example),
    }
    if isinstance(function, typer.Typer):
        app.add_typer(function, name=name, **shown)
    else:
        settings = RAW_ARGUMENTS if name in _RUN_SCRIPTS else None
        app.command(name=name, context_settings=settings, **shown)(function)


def main(argv: list[str] | None = None) -> None:
    """Run the command line and leave the process with the exit code of the table above."""
    atexit.register(gc.freeze)  # else cycles are looked for at the end: 2 s of a plan
    first_word = (sys.argv[1:] if argv is None else argv)[:1]
    try:
        # Importing one command alone is faster; the help names them all.
        for name in first_word if first_word and first_word[0] in _COMMANDS else _COMMANDS:
            _register(name)
        code = app(args=argv, prog_name="memo", standalone_mode=False)
    except TyperException as error:  # a usage error: unknown command, missing argument, ...
        print(f"memo: {error.format_message()}", file=sys.stderr)
        code = 2
    except MemoError as error:
        print(f"memo: {error}", file=sys.stderr)
        code = 1 if isinstance(error, Infeasible) else 2
    except ModuleNotFoundError as error:
        print(f"memo: {_without_module(error)}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:
        print("memo: interrupted", file=sys.stderr)
    sys.exit(code or 0)


def _without_module(error: ModuleNotFoundError) -> str:
    """Says how to install what ``error`` misses. Raises ``error`` where that is memo's own."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "memo_compile", "memo_runtime"):
        raise error
    return f"this command needs {package}, which is not installed here: pip install {package}"


if __name__ == "__main__":
    main()
