"""Work that goes on after a command has ended, in a process that it leaves behind."""

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Callable

LIMIT_S, GRACE_S = 150, 10
"""The process ends its work after so many seconds; and so much later whatever it does."""

NICENESS = 19
"""It takes what others leave of the processor."""


_process = {"is_own": False}


def tell(*, is_own: bool) -> None:
    """Whether the process was started for one command, or the command was called in another's."""
    _process["is_own"] = is_own


def can_be_left() -> bool:
    """True in a process that is a command's own, on a system where one can be divided.

    Not on macOS, whose libraries do not survive that, and not where the command was called as a
    function: the caller's files and threads would be divided as well.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if not _process["is_own"] or script is None or sys.platform != "linux":
        return False
    return os.path.abspath(script) == os.path.abspath(sys.argv[0])


class _LateError(BaseException):
    """The work took too long; what it holds is given up."""


def _end(*_: object) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(GRACE_S)
    raise _LateError


def leave(work: Callable[[], None]) -> None:
    """Do ``work`` in a process of its own, which nobody waits for and which says nothing.

    It has no terminal, so that an interrupt does not end it, and holds none of the files that a
    caller may wait for.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch has threads, which have ended
        if os.fork():
            return
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, _end)
        signal.alarm(LIMIT_S)
        os.nice(NICENESS)
        for file in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the one that lists them
                os.close(int(file))
        for _ in range(3):  # stdin, stdout, stderr
            os.open(os.devnull, os.O_RDWR)
        work()
    finally:
        os._exit(0)
