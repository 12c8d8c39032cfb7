"""Says on stderr what a long compilation is doing, so that nobody takes it for a hang.

The first line comes after five seconds, others after ten, twenty, forty: ``memo: lowering 11
regions (7 are done), planning under 60.00 GiB; 10 s``.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

FIRST_S = 5.0
"""Seconds of silence; before each further line passes twice the time of the last one."""


class _Speaker:
    """Prints the newest stage of one compilation from a thread, at times that double."""

    def __init__(self, line_end: str) -> None:
        self.stage = "tracing the step"
        self._line_end = line_end
        self._began_s = time.monotonic()
        self._ended = threading.Event()
        self._has_spoken = False
        self._thread = threading.Thread(target=self._run, name="memo-compiling", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stops the thread; says how long it took where anything was said."""
        self._ended.set()
        self._thread.join()
        if self._has_spoken:
            self._print("ready")

    def _run(self) -> None:
        wait_s = FIRST_S
        while not self._ended.wait(wait_s):
            self._print(f"{self.stage}{self._line_end}")
            self._has_spoken = True
            wait_s = time.monotonic() - self._began_s

    def _print(self, text: str) -> None:
        took_s = time.monotonic() - self._began_s
        with contextlib.suppress(OSError, ValueError):  # a stderr that is closed
            print(f"memo: {text}; {took_s:.0f} s", file=sys.stderr, flush=True)


_speakers: list[_Speaker] = []
"""Of the compilations that are running; the last one speaks."""


def is_terminal() -> bool:
    """True where a person reads stderr, as far as one can see."""
    with contextlib.suppress(AttributeError, ValueError):  # replaced by something else, closed
        return sys.stderr.isatty()
    return False


@contextlib.contextmanager
def compiling(line_end: str, *, shows: bool) -> Iterator[None]:
    """Inside, a thread prints on stderr what ``say`` says; nothing is, unless it ``shows``.

    ``line_end`` ends each line, such as ``, planning under 60.00 GiB``.
    """
    if not shows:
        yield
        return
    speaker = _Speaker(line_end)
    _speakers.append(speaker)
    try:
        yield
    finally:
        _speakers.remove(speaker)
        speaker.end()


def say(stage: str) -> None:
    """Notes the stage that the compilation has reached: it is printed if that takes long."""
    if _speakers:
        _speakers[-1].stage = stage
