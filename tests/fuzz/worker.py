"""Runs cases in a process of its own: one JSON case a line on stdin, one JSON outcome a line back.

``Worker`` is the parent's side. A case that hangs or kills the process is a finding like any other,
and the next case gets a fresh process.
"""

import gc
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from benchmarks import harness
from tests.fuzz.case import Case, from_dict
from tests.fuzz.oracle import Finding, Outcome, run_case

MODELS_PER_PROCESS = 40
"""Then a fresh one, so that what torch caches does not add up."""

COMMAND = (sys.executable, "-m", "tests.fuzz.worker")

ROOT = Path(__file__).resolve().parents[2]


class Worker:
    """A child process that runs cases, replaced when it is old, stuck or dead."""

    def __init__(self, *, timeout_s: float, command: Sequence[str] = COMMAND) -> None:
        self._timeout_s = timeout_s
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._num_models = 0
        self._folder = tempfile.TemporaryDirectory(prefix="memo-fuzz-")
        self._log = Path(self._folder.name) / "log"
        self._received = b""

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
        self._folder.cleanup()

    def run(self, case: Case) -> Outcome:
        """The case's outcome; what the process itself does wrong is in it."""
        if self._num_models >= MODELS_PER_PROCESS:
            self._stop()
        process = self._process if self._process is not None else self._start()
        self._num_models += 1
        assert process.stdin is not None
        began = time.monotonic()
        try:
            process.stdin.write(json.dumps(case.as_dict()).encode() + b"\n")
            process.stdin.flush()
            line = self._line(process, began + self._timeout_s * _crowd())
        except OSError:
            line = None
        if line is not None:
            return Outcome.from_dict(json.loads(line))
        return self._lost(case, process, time.monotonic() - began)

    def _lost(self, case: Case, process: subprocess.Popen[bytes], seconds: float) -> Outcome:
        stuck = process.poll() is None
        self._stop()
        kind = "timeout" if stuck else "crash"
        where = "" if stuck else f"exit code {process.returncode}"
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])
        finding = Finding(kind=kind, where=where, detail=tail, options=dict(case.options))
        return Outcome(findings=[finding], seconds=seconds)

    def _start(self) -> subprocess.Popen[bytes]:
        cache = Path(self._folder.name) / "cache"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
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
        self._num_models = 0
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


def main() -> None:
    """The child: what torch and the models print goes to stderr."""
    harness.register_memo()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    gc.freeze()  # collections during compilations need not walk what torch keeps for good
    for line in sys.stdin:
        outcome = run_case(from_dict(json.loads(line)))
        answers.write(json.dumps(outcome.as_dict()) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
