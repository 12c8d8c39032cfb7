"""Random models under memo for a while: ``make fuzz SECONDS=3600 LOWERING=aten SEED=0``.

Each seed is one model, trained eagerly, in float64 and under memo (several runs), in a process that
may die. What fails is made smaller and written to a folder as a script that stands alone, beside
the case as JSON, which ``--replay`` runs again and tests/fuzz/corpus keeps. Exit 1 when one failed.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks import harness
from tests.fuzz.case import Case, draw_case, from_dict
from tests.fuzz.oracle import Finding, Outcome, judged_dtype
from tests.fuzz.script import script
from tests.fuzz.shrink import shrink
from tests.fuzz.worker import Worker

TIMEOUT_S = {"aten": 300.0, "inductor": 900.0}
"""Of one case; a compilation by Inductor takes a minute where others use the cores."""

SHRINK_S = 180.0
SHRINK_ATTEMPTS = 60
MAX_SHRUNK = 20
"""Failures of one run that are made smaller; a run with more has bugs that hide each other."""

COLUMNS = ("planned", "tiled", "sliced", "moved", "recomputed", "infeasible", "stepped aside")
ON_HOST = ("state on host", "gradients on host", "weights on host")
"""Counted, but not in the table."""


class Tally:
    """What a run has seen so far."""

    def __init__(self, lowering: str, seed: int, folder: Path, shrink_s: float) -> None:
        self.lowering, self.seed, self.folder = lowering, seed, folder
        self.shrink_s = shrink_s
        self.num_models = self.num_invalid = 0
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.torch_wrong: Counter[str] = Counter()
        self.failures: list[dict[str, Any]] = []
        self.torch_raises: list[str] = []

    def add(self, outcome: Outcome) -> None:
        self.num_models += not outcome.invalid
        self.num_invalid += bool(outcome.invalid)
        self.counts.update(outcome.counts)
        self.reasons.update(outcome.reasons)
        self.torch_raises += [
            finding.signature for finding in outcome.findings if finding.is_torchs
        ]
        if outcome.counts["plain inductor wrong"]:
            both = any(finding.torch_too for finding in outcome.findings)
            self.torch_wrong["and memo too" if both else "but memo right"] += 1

    def row(self) -> list[str]:
        known = (self.num_models, self.counts["runs"], *(self.counts[name] for name in COLUMNS))
        return [self.lowering, *map(str, known), str(len(self.failures))]

    def as_dict(self, seconds: float) -> dict[str, Any]:
        return {
            "hardware": harness.hardware(),
            "lowering": self.lowering,
            "first_seed": self.seed,
            "seconds": round(seconds),
            "models": self.num_models,
            **{name: self.counts[name] for name in ("runs", *COLUMNS, *ON_HOST)},
            "refused_by_eager_torch": self.num_invalid,
            "stepped_aside_because": dict(self.reasons.most_common()),
            "plain_inductor_wrong": dict(self.torch_wrong),
            "plain_inductor_raises_too": self.torch_raises,
            "findings": self.failures,
            "failures": [
                f"seed {failure['seed']}: {failure['signature']}" for failure in self.failures
            ],
        }


def main() -> int:
    """Run, show progress, print the table, write the result."""
    options = _options()
    if options.replay:
        return _replay(options.replay)
    lowerings = ("aten", "inductor") if options.lowering == "both" else (options.lowering,)
    code, rows = 0, []
    for lowering in lowerings:
        tally = Tally(lowering, options.seed, options.out / lowering, options.shrink_seconds)
        began = time.monotonic()
        with contextlib.suppress(KeyboardInterrupt):  # what it has seen is written down
            _fuzz(tally, options, seconds=options.seconds / len(lowerings))
        payload = tally.as_dict(time.monotonic() - began)
        rows.append(tally.row())
        save = not options.no_save
        code = max(code, harness.conclude(f"fuzz-{lowering}", payload, save=save))
    harness.print_table("make fuzz", ("lowering", "models", "runs", *COLUMNS, "failed"), rows)
    return code


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="of all lowerings together")
    parser.add_argument("--models", type=int, default=sys.maxsize, help="at most so many")
    parser.add_argument("--lowering", choices=("aten", "inductor", "both"), default="aten")
    parser.add_argument("--device", default="cpu", help="where the models are trained: cpu, cuda")
    parser.add_argument("--seed", type=int, default=0, help="of the first model")
    parser.add_argument("--out", type=Path, default=Path("fuzz-failures"), help="for what fails")
    parser.add_argument(
        "--shrink-seconds", type=float, default=SHRINK_S, help="of a failing case; 0: as it is"
    )
    parser.add_argument("--no-save", action="store_true", help="write no result")
    parser.add_argument("--replay", type=Path, nargs="+", help="run these cases (JSON) again")
    return parser.parse_args()


def _fuzz(tally: Tally, options: argparse.Namespace, *, seconds: float) -> None:
    timeout_s = TIMEOUT_S[tally.lowering]
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    console = Console(stderr=True, highlight=False)
    until = time.monotonic() + seconds
    with Worker(timeout_s=timeout_s) as worker, Progress(*columns, console=console) as progress:
        task = progress.add_task(tally.lowering, total=seconds)
        seed = tally.seed
        while time.monotonic() < until and tally.num_models < options.models:
            case = dataclasses.replace(draw_case(seed, tally.lowering), device=options.device)
            outcome = worker.run(case)
            tally.add(outcome)
            _log(tally.folder, seed, outcome)
            own = [finding for finding in outcome.findings if not finding.is_torchs]
            if own:
                _keep(tally, worker, case, own[0])
                console.print(f"seed {seed}: {own[0].signature}")
            text = f"{tally.lowering}: {tally.num_models} models, {len(tally.failures)} failed"
            left = max(0.0, until - time.monotonic())
            progress.update(task, completed=seconds - left, description=text)
            seed += 1


def _log(folder: Path, seed: int, outcome: Outcome) -> None:
    """One line for every model."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "outcomes.jsonl").open("a") as stream:
        stream.write(json.dumps({"seed": seed, **outcome.as_dict()}) + "\n")


def _keep(tally: Tally, worker: Worker, case: Case, finding: Finding) -> None:
    """Make the case smaller, if it is one of the first, and write it down."""
    known = Counter(failure["signature"] for failure in tally.failures)[finding.signature]
    is_new = finding.kind != "exception" or not known
    small, shown = case, finding
    if is_new and len(tally.failures) < MAX_SHRUNK and finding.kind != "timeout":
        small, shown = _shrunk(tally, worker, case, finding)
    path = _write(tally.folder, small, shown)
    tally.failures.append(
        {
            "seed": case.seed,
            "signature": finding.signature,
            "plain_inductor_too": shown.torch_too,
            "script": str(path),
            "pieces": [piece.kind for piece in small.pieces()],
            "detail": shown.detail.splitlines()[-1:],
        }
    )


def _shrunk(tally: Tally, worker: Worker, case: Case, finding: Finding) -> tuple[Case, Finding]:
    shown = {str(case): finding}

    def fails(smaller: Case) -> bool:
        same = [
            found for found in worker.run(smaller).findings if found.signature == finding.signature
        ]
        shown.update({str(smaller): found for found in same[:1]})
        return bool(same)

    small = shrink(case, fails, attempts=SHRINK_ATTEMPTS, seconds=tally.shrink_s)
    return small, shown[str(small)]


def _write(folder: Path, case: Case, finding: Finding) -> Path:
    """The case as JSON and as a script; the path of the script."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"seed{case.seed}.py"
    path.write_text(script(case, finding, judged_dtype(case)))
    data = {"about": finding.signature, "case": dataclasses.asdict(case)}
    path.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    return path


def _replay(paths: list[Path]) -> int:
    """Run kept cases again, each in a process of its own kind."""
    failed = 0
    for path in paths:
        case = from_dict(json.loads(path.read_text())["case"])
        with Worker(timeout_s=TIMEOUT_S[case.options["lowering"]]) as worker:
            outcome = worker.run(case)
        print(f"{path}: {outcome.invalid or 'ok' if not outcome.findings else 'FAILED'}")
        for finding in outcome.findings:
            print(f"  {finding.signature}\n{finding.detail}")
        failed += bool(outcome.findings or outcome.invalid)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
