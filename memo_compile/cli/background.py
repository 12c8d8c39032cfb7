"""Work that goes on after a command has ended, in a process that it leaves behind."""

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Callable

LIMIT_S = 150.0
"""The process ends its work after so many seconds of a processor."""

ALIVE_S = 600
"""It ends after so many seconds in any case, also where it hangs."""

NICENESS = 19
"""It takes what others leave of the processor."""


_MODULE = os.path.join(os.path.dirname(__file__), "main.py")
"""What ``python -m`` runs."""

_process = {"is_own": False}


def tell(*, is_own: bool) -> None:
    """Whether the process was started for one command, or the command was called in another's."""
    _process["is_own"] = is_own


def can_be_left() -> bool:
    """True in a process that is a command's own, on a system where one can be divided.

    Not on macOS, whose libraries do not survive that, and not where a program has called the
    command: its files and threads would be divided as well.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if not _process["is_own"] or script is None or sys.platform != "linux":
        return False
    called = os.path.abspath(sys.argv[0])
    is_command = os.path.basename(called) == "memo" or called == os.path.abspath(_MODULE)
    return is_command and called == os.path.abspath(script)


class _LateError(BaseException):
    """The work took too long; what it holds is given up."""


def _end(*_: object) -> None:
    raise _LateError


def leave(work: Callable[[], None]) -> None:
    """Do ``work`` in a process of its own, which nobody waits for and which says nothing.

    It has no terminal, so that an interrupt does not end it, and holds none of the files that a
    caller may wait for. Raises OSError: there may be no more processes.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch has threads, which have ended
        if os.fork():
            return
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGPROF, _end)
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # kills, whatever Python does
        signal.alarm(ALIVE_S)
        os.nice(NICENESS)
        for file in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the one that lists them
                os.close(int(file))
        for _ in range(3):  # stdin, stdout, stderr
            os.open(os.devnull, os.O_RDWR)
        work()
    finally:
        os._exit(0)
