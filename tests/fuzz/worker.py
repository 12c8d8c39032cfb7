"""Runs cases in a process of its own. ``Worker`` is the parent's side.

A case that hangs or kills the process is a finding like any other.
"""

import gc
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from benchmarks import harness
from tests.child import Child, Lost, answer_lines
from tests.fuzz.case import Case, from_dict
from tests.fuzz.oracle import Finding, Outcome, run_case

MODELS_PER_PROCESS = 40
"""Then a fresh one, so that what torch caches does not add up."""

COMMAND = (sys.executable, "-m", "tests.fuzz.worker")


class Worker:
    """A child process that runs cases."""

    def __init__(self, *, timeout_s: float, command: Sequence[str] = COMMAND) -> None:
        self._child = Child(command, timeout_s=timeout_s, questions_per_process=MODELS_PER_PROCESS)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._child.__exit__(kind, error, trace)

    def run(self, case: Case) -> Outcome:
        """The case's outcome; what the process itself does wrong is in it."""
        answer = self._child.ask(case.as_dict())
        return _lost(case, answer) if isinstance(answer, Lost) else Outcome.from_dict(answer)


def _lost(case: Case, lost: Lost) -> Outcome:
    kind = "timeout" if lost.is_stuck else "crash"
    where = "" if lost.is_stuck else f"exit code {lost.exit_code}"
    finding = Finding(kind=kind, where=where, detail=lost.log, options=dict(case.options))
    return Outcome(findings=[finding], seconds=lost.seconds)


def _answer(question: Any) -> Any:
    return run_case(from_dict(question)).as_dict()


def main() -> None:
    """The child."""
    harness.register_memo()
    gc.freeze()  # collections during compilations need not walk what torch keeps for good
    answer_lines(_answer)


if __name__ == "__main__":
    main()
