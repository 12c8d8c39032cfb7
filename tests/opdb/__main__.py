"""torch's own databases of operators and modules under memo: ``make opdb``.

Every operator that can be differentiated and every module runs in three equal blocks, in processes
that may die. A table and a dated result say what became of each; exit 1 when memo failed.
"""

import argparse
import collections
import json
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import harness
from tests.child import Child, Lost
from tests.opdb.runs import FAILURES, GOOD, VERDICTS
from tests.opdb.samples import databases

COMMAND = (sys.executable, "-m", "tests.opdb.worker")

TIMEOUT_S = 90.0
"""Of one entry where it has a core for itself."""

ENTRIES_PER_PROCESS = 60
"""Then a fresh one, so that what torch caches does not add up."""

SHOWN = ("entry", "samples", "lowering", "mode", "reason", "peers")


def main() -> int:
    """Run, print the table, write the result."""
    options = _options()
    names = list(databases())
    wanted = [
        (number, name)
        for number, name in enumerate(names)
        if _is_taken(number, options.share) and all(word in name for word in options.only)
    ]
    began = time.monotonic()
    answers = _answers(wanted, options)
    payload = _payload(answers, time.monotonic() - began)
    _print_table(payload)
    if options.out is not None:
        options.out.write_text(json.dumps(payload, indent=1) + "\n")
    return harness.conclude("opdb", payload, save=options.out is None and not options.no_save)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--share", type=Fraction, default=Fraction(1), help="e.g. 1/10")
    parser.add_argument("--only", nargs="*", default=[], help="entries whose name has these words")
    parser.add_argument("--workers", type=int, default=1, help="processes, of a thread each")
    parser.add_argument("--lowering", choices=("aten", "inductor", "both"), default="both")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds of an entry")
    parser.add_argument("--out", type=Path, help="where the result goes instead")
    parser.add_argument("--no-save", action="store_true", help="write no result")
    return parser.parse_args()


def _is_taken(number: int, share: Fraction) -> bool:
    return (number * share.numerator) % share.denominator < share.numerator


def _answers(
    wanted: Sequence[tuple[int, str]], options: argparse.Namespace
) -> Mapping[str, Mapping[str, Any]]:
    """Entry -> its outcomes and seconds."""
    waiting: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    for each in wanted:
        waiting.put(each)
    lowerings = ["aten", "inductor"] if options.lowering == "both" else [options.lowering]
    answers: dict[str, Mapping[str, Any]] = {}
    console = Console(stderr=True, highlight=False)

    def work() -> None:
        more = {"timeout_s": options.timeout, "questions_per_process": ENTRIES_PER_PROCESS}
        with Child(COMMAND, **more) as child:
            while not waiting.empty():
                try:
                    number, name = waiting.get_nowait()
                except queue.Empty:
                    return
                question = {"entry": name, "number": number, "lowerings": lowerings}
                answer = child.ask(question)
                answers[name] = _lost(name, answer) if isinstance(answer, Lost) else answer
                console.print(f"{len(answers)}/{len(wanted)} {_line(name, answers[name])}")

    threads = [threading.Thread(target=work) for _ in range(options.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(sorted(answers.items()))


def _lost(name: str, lost: Lost) -> Mapping[str, Any]:
    verdict = "out of time" if lost.is_stuck else "crashed"
    reason = f"{lost.seconds:.0f} s" if lost.is_stuck else f"exit code {lost.exit_code}"
    outcome = {"entry": name, "verdict": verdict, "reason": reason, "detail": lost.log}
    return {"outcomes": [outcome], "processor_s": 0.0}


def _line(name: str, answer: Mapping[str, Any]) -> str:
    counts = collections.Counter(outcome["verdict"] for outcome in answer["outcomes"])
    shown = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"{name}: {shown}; {answer['processor_s']} s"


def _payload(answers: Mapping[str, Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    outcomes = [outcome for answer in answers.values() for outcome in answer["outcomes"]]
    listed = collections.defaultdict(list)
    for outcome in outcomes:
        if outcome["verdict"] not in GOOD:
            listed[outcome["verdict"]].append(
                {name: outcome[name] for name in (*SHOWN, "detail") if name in outcome}
            )
    return {
        "hardware": harness.hardware(),
        "code": harness.code(),
        "seconds": round(seconds),
        "processor_seconds": round(sum(answer["processor_s"] for answer in answers.values())),
        "entries": len(answers),
        "runs": len(outcomes),
        "entries_by_verdict": dict(collections.Counter(map(_worst, answers.values()))),
        "runs_by_verdict": dict(collections.Counter(outcome["verdict"] for outcome in outcomes)),
        "listed": listed,
        "failures": [
            f"{outcome['entry']}: {outcome['verdict']}: {outcome['reason']}"
            for outcome in outcomes
            if outcome["verdict"] in (*FAILURES, "crashed")
        ],
    }


BAD = ("crashed", "wrong", "raised", "out of time", "inherited", "stepped aside")


def _worst(answer: Mapping[str, Any]) -> str:
    """What is said of an entry: what is bad in any run, else the best of its runs."""
    seen = {outcome["verdict"] for outcome in answer["outcomes"]}
    order = (*BAD, "right", "nothing to move", "data-dependent", "graph break", "not tried")
    return next((verdict for verdict in order if verdict in seen), "not tried")


def _print_table(payload: Mapping[str, Any]) -> None:
    verdicts = [*VERDICTS, "out of time", "crashed"]
    rows = [
        [
            verdict,
            *(
                str(payload[kind].get(verdict, 0))
                for kind in ("entries_by_verdict", "runs_by_verdict")
            ),
        ]
        for verdict in verdicts
    ]
    harness.print_table("make opdb", ("verdict", "entries", "runs"), rows)


if __name__ == "__main__":
    sys.exit(main())
