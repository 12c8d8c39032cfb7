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
from collections.abc import Mapping, Sequence, Set
from fractions import Fraction
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import harness
from tests.child import Child, Lost
from tests.opdb.runs import FAILURES, GOOD, VERDICTS
from tests.opdb.samples import databases

COMMAND = (sys.executable, "-m", "tests.opdb.worker")

ENTRIES_PER_MODEL = 6
"""What a compilation takes does not grow as fast as what is in it."""

TIMEOUT_S = 90.0
"""Of an entry where it has a core for itself; the entries of one model together have it thrice."""

MODELS_PER_PROCESS = 12
"""Then a fresh one, so that what torch caches does not add up."""

BAD = ("crashed", "wrong", "raised", "out of time", "inherited", "stepped aside")
"""Verdicts that tell of an entry more than others, the worst first."""

Group = Mapping[str, int]
"""Entries that run in one model, each with its number."""

Answer = Mapping[str, Any]
"""What a worker says of a group."""


def main() -> int:
    """Run, print the table, write the result."""
    options = _options()
    numbered = {
        name: number
        for number, name in enumerate(databases())
        if number * options.share % 1 < options.share
        and (not options.only or any(word in name for word in options.only))
    }
    entries = list(numbered.items())
    starts = range(0, len(entries), options.group)
    began = time.monotonic()
    answers = _answers([dict(entries[at : at + options.group]) for at in starts], options)
    payload = _payload(numbered, answers, time.monotonic() - began)
    _print_table(payload)
    if options.out is not None:
        options.out.write_text(json.dumps(payload, indent=1) + "\n")
    name = "opdb" if options.lowering == "both" else f"opdb-{options.lowering}"
    name = "opdb-quick" if options.quick else name
    return harness.conclude(name, payload, save=options.out is None and not options.no_save)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--share", type=Fraction, default=Fraction(1), help="e.g. 1/10")
    parser.add_argument("--only", nargs="*", default=[], help="entries whose name has these words")
    parser.add_argument("--quick", action="store_true", help="one call of each, in one mode")
    parser.add_argument("--group", type=int, default=ENTRIES_PER_MODEL, help="entries in a model")
    parser.add_argument("--workers", type=int, default=1, help="processes, of a thread each")
    parser.add_argument("--lowering", choices=("aten", "inductor", "both"), default="both")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds of an entry")
    parser.add_argument(
        "--answers", type=Path, help="keeps a line for each entry; what it holds is not run again"
    )
    parser.add_argument("--out", type=Path, help="where the result goes instead")
    parser.add_argument("--no-save", action="store_true", help="write no result")
    return parser.parse_args()


def _answers(groups: Sequence[Group], options: argparse.Namespace) -> list[Answer]:
    """What each group's worker says."""
    answers = _kept(options.answers)
    done = {name for answer in answers for name in answer["entries"]}
    waiting: queue.SimpleQueue[Group] = queue.SimpleQueue()
    for group in groups:
        if not done >= group.keys():
            waiting.put(group)
    console = Console(stderr=True, highlight=False)
    began = time.monotonic()

    def work() -> None:
        more = {"questions_per_process": MODELS_PER_PROCESS}
        with Child(COMMAND, timeout_s=options.timeout, **more) as child:
            while not waiting.empty():
                try:
                    group = waiting.get_nowait()
                except queue.Empty:
                    return
                for answer in _asked(child, group, options):
                    answers.append(answer)
                    _keep(options.answers, answer)
                    left = f"{waiting.qsize()} models left, {time.monotonic() - began:.0f} s"
                    console.print(f"{_line(answer)}; {left}")

    threads = [threading.Thread(target=work) for _ in range(options.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def _asked(child: Child, group: Group, options: argparse.Namespace) -> list[Answer]:
    """The answer to a group; where it is lost, to each of its entries alone."""
    lowerings = ["aten", "inductor"] if options.lowering == "both" else [options.lowering]
    question = {"entries": group, "lowerings": lowerings, "quick": options.quick}
    answer = child.ask(question, patience=3.0 if len(group) > 1 else 1.0)
    if not isinstance(answer, Lost):
        return [{"entries": list(group), **answer}]
    if len(group) > 1:
        alone = [{name: number} for name, number in group.items()]
        return [answer for part in alone for answer in _asked(child, part, options)]
    verdict = "out of time" if answer.is_stuck else "crashed"
    outcome = {
        "samples": [{"entry": name} for name in group],
        "verdict": verdict,
        "reason": f"{answer.seconds:.0f} s, exit code {answer.exit_code}",
        "detail": answer.log,
    }
    return [{"entries": list(group), "outcomes": [outcome], "processor_s": answer.seconds}]


def _kept(path: Path | None) -> list[Answer]:
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def _keep(path: Path | None, answer: Answer) -> None:
    if path is not None:
        with path.open("a") as stream:
            stream.write(json.dumps(answer) + "\n")


def _line(answer: Answer) -> str:
    counts = collections.Counter(outcome["verdict"] for outcome in answer["outcomes"])
    shown = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"{', '.join(answer['entries'])}: {shown}; {answer['processor_s']} s"


def _payload(numbered: Group, answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    outcomes = [outcome for answer in answers for outcome in answer["outcomes"]]
    verdicts: dict[str, set[str]] = {name: set() for name in numbered}
    for outcome in outcomes:
        for sample in outcome["samples"]:
            verdicts.setdefault(sample["entry"], set()).add(outcome["verdict"])
    runs: collections.Counter[str] = collections.Counter()
    listed = collections.defaultdict(list)
    for outcome in outcomes:
        runs[outcome["verdict"]] += len(outcome["samples"])
        if outcome["verdict"] not in GOOD:
            names = [" ".join(map(str, sample.values())) for sample in outcome["samples"]]
            listed[outcome["verdict"]].append({**outcome, "samples": names})
    return {
        "hardware": harness.hardware(),
        "code": harness.code(),
        "seconds": round(seconds),
        "processor_seconds": round(sum(answer["processor_s"] for answer in answers)),
        "entries": len(verdicts),
        "entries_by_verdict": dict(collections.Counter(map(_worst, verdicts.values()))),
        "runs_by_verdict": dict(runs),
        "listed": listed,
        "failures": [
            f"{', '.join(outcome['samples'])}: {verdict}: {outcome['reason']}"
            for verdict in (*FAILURES, "crashed")
            for outcome in listed[verdict]
        ],
    }


def _worst(seen: Set[str]) -> str:
    """What is said of an entry: what is bad in any run, else the best of its runs."""
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
