"""A process that answers lines: one JSON question a line on its stdin, one JSON answer a line back.

A question that hangs or kills the process is a finding like any other, and the next question gets a
fresh process.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OBJECTS_BETWEEN_COLLECTIONS = 50_000
"""Python's default of 700 costs a tenth of what tracing takes, and a quarter of what imports do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """What is there instead of an answer."""

    is_stuck: bool
    """The time was up; else the process died."""
    exit_code: int | None
    log: str
    """The last lines that it printed."""
    seconds: float


class Child:
    """A process that runs ``command``, replaced when it is old, stuck or dead."""

    def __init__(
        self, command: Sequence[str], *, timeout_s: float, questions_per_process: int
    ) -> None:
        self._command = command
        self._timeout_s = timeout_s
        self._questions_per_process = questions_per_process
        self._process: subprocess.Popen[bytes] | None = None
        self._num_questions = 0
        self._folder = tempfile.TemporaryDirectory(prefix="memo-child-")
        self._log = Path(self._folder.name) / "log"
        self._received = b""

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
        self._folder.cleanup()

    def ask(self, question: Any, patience: float = 1.0) -> Any:
        """The answer, or ``Lost`` after so many times the time limit."""
        if self._num_questions >= self._questions_per_process:
            self._stop()
        process = self._process if self._process is not None else self._start()
        self._num_questions += 1
        assert process.stdin is not None
        began = time.monotonic()
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            line = self._line(process, began + patience * self._timeout_s * _crowd())
        except OSError:
            line = None
        if line is not None:
            return json.loads(line)
        return self._lost(process, time.monotonic() - began)

    def _lost(self, process: subprocess.Popen[bytes], seconds: float) -> Lost:
        is_stuck = process.poll() is None
        self._stop()
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])
        return Lost(is_stuck=is_stuck, exit_code=process.returncode, log=tail, seconds=seconds)

    def _start(self) -> subprocess.Popen[bytes]:
        cache = Path(self._folder.name) / "cache"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "XDG_CACHE_HOME": str(cache),  # where memo's own is
            "PYTHONFAULTHANDLER": "1",
        }
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._received = b""
        self._num_questions = 0
        return self._process

    def _line(self, process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
        """The next line of the child; None when it died or the time is up."""
        assert process.stdout is not None
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                return None
            read = os.read(process.stdout.fileno(), 2**16)
            if not read:
                process.wait()
                return None
            self._received += read
        line, self._received = self._received.split(b"\n", 1)
        return line

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process = None


def _crowd() -> float:
    """How many processes share a core: where others compute, everything takes longer."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def answer_lines(answer: Callable[[Any], Any]) -> None:
    """The child's side: whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()
