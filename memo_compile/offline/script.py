"""Running a user's script as Python would."""

import runpy
import sys
import traceback
from pathlib import Path


class EnoughError(BaseException):
    """Ends a script early. It is no Exception, so that no script catches it."""


def run_script(
    script: Path, arguments: list[str], *, passes: tuple[type[BaseException], ...] = ()
) -> int:
    """Runs ``script`` as ``__main__`` and returns the exit code that Python would leave with.

    ``sys.argv`` and ``sys.path`` stay as the script saw them, for its exit handlers. An exception
    of a type in ``passes`` ends it with code 0 and is not shown. Raises KeyboardInterrupt.
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
        raise  # the command says it in one line
    except BaseException:
        # Whatever a script raises is its own affair: Python would print it and leave with 1.
        _print_traceback(script)
        code = 1
    return code


def _exit_code(error: SystemExit) -> int:
    """Returns what Python makes of ``sys.exit(code)``: a text goes to stderr and means 1."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr)
    return 1


def _print_traceback(script: Path) -> None:
    """Shows the running exception from the script's first frame on, without the frames of memo."""
    kind, error, trace = sys.exc_info()
    assert error is not None
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename != str(script):
        first = first.tb_next
    sys.stdout.flush()
    if isinstance(error, SyntaxError) and first is None:  # the script itself did not parse
        traceback.print_exception(kind, error, None)
    else:
        traceback.print_exception(kind, error, first or trace)
