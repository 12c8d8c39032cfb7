"""``memo verify SCRIPT.py [ARGS...]``: compares a script's training with memo to eager."""

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from memo_compile.cli.options import AsJson, Script, require_script
from memo_compile.errors import InputError
from memo_compile.units import format_bytes

TOLERANCE = 1e-3
"""Losses and gradients in float32 may differ by this share: other kernels round differently."""

HALF_TOLERANCE = 5e-2
"""``TOLERANCE`` where a parameter is in bfloat16 or float16: a few of their last bits."""

SMALL_GRADIENT = 1e-4
"""Differences count relative to a gradient's norm, or to this share of all: less is rounding."""

PEAK_SLACK = 0.02
"""A peak may exceed the plan by this share, for what interpreter and C allocator add."""

PEAK_SLACK_BYTES = 8 * 2**20
"""It may always exceed the plan by this, for code and stacks of a first use."""


_RUNS = {
    "eager": "run 1 of 2, eager",
    "memo": "run 2 of 2, with memo",
    "eager-again": "numbers differ: run 3 of 4, eager again",
    "inductor": "numbers differ: run 4 of 4, through plain Inductor",
}
"""What each run is called on the screen."""

_CHILD = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
from memo_compile.offline.recorded_script import main
sys.exit(main(sys.argv[1:]))
"""
"""What each run executes. Ctrl-C, which reaches it too, ends it at once and without a traceback."""

_STDERR = 2
"""The descriptor: sys.stderr may be no file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Whether memo computes what eager computes within its planned peak, and how near they are."""

    num_steps: int
    loss_difference: float
    """The largest difference of a loss, relative to eager's."""
    gradient_difference: float
    differs: bool
    """True where losses or gradients differ by more than rounding."""
    planned_peak_bytes: int | None
    measured_peak_bytes: int | None
    faults: tuple[str, ...]
    inductor: str = ""
    """How plain Inductor's numbers compare to eager's, where memo's differ."""

    @property
    def holds(self) -> bool:
        """True when there are no faults."""
        return not self.faults

    def __str__(self) -> str:
        if self.faults:
            says = (self.inductor,) if self.inductor else ()
            return "\n  ".join(("memo does not keep its promise:", *self.faults, *says))
        peak = "the peak was not measured: the first steps warm up; more --steps"
        if self.measured_peak_bytes is not None and self.planned_peak_bytes is not None:
            measured = format_bytes(self.measured_peak_bytes)
            peak = f"peak {measured}, planned {format_bytes(self.planned_peak_bytes)}"
        return (
            f"memo keeps its promise: {self.num_steps} steps\n"
            f"  losses within {self.loss_difference:.1e} of eager's, gradients within "
            f"{self.gradient_difference:.1e}\n"
            f"  {peak}"
        )


def verify(
    context: typer.Context,
    script: Script,
    steps: Annotated[int, typer.Option(help="Training steps to compare.", min=1)] = 5,
    as_json: AsJson = False,
) -> None:
    """Run a training script eagerly and with memo; compare losses and gradients, measure the peak.

    Both runs are child processes with the same seed, ended after the steps that are compared. The
    script must compile with backend memo and call backward. Where numbers differ it runs eagerly
    once more, which tells whether two runs of the script are the same at all, and through plain
    Inductor, which tells whether memo is to blame.
    """
    require_script(context, script)
    with tempfile.TemporaryDirectory() as folder:
        eager = _run("eager", script, context.args, steps, Path(folder))
        if eager is None:
            raise InputError(f"{script}: fails without memo too; its own output is above")
        if not eager["steps"]:
            raise InputError(
                f'{script}: no training step went through torch.compile(backend="memo"); compile '
                "the model with it, and call backward on the loss"
            )
        memo = _run("memo", script, context.args, steps, Path(folder))
        verdict = judge(eager, memo)
        if verdict.differs:
            second_eager = _run("eager-again", script, context.args, steps, Path(folder))
            _require_repeatable(script, eager, second_eager)
            inductor = _run("inductor", script, context.args, steps, Path(folder))
            verdict = replace(verdict, inductor=_of_inductor(eager, inductor))
    print(json.dumps(_as_dict(verdict)) if as_json else verdict)
    if not verdict.holds:
        raise typer.Exit(1)


def _run(
    arm: str, script: Path, arguments: Sequence[str], steps: int, folder: Path
) -> dict[str, Any] | None:
    """Runs the script in a child process, its stdout on stderr, and returns what it recorded.

    None: it left no record, or an eager run failed, with which nothing can be compared. Of other
    arms the record has ``failed``.
    """
    out = folder / f"{arm}.json"
    run_name = _RUNS[arm]
    _say(f"{run_name}: up to {steps} steps of {script}")
    began_s = time.monotonic()
    command = [sys.executable, "-c", _CHILD, arm, str(out), str(steps)]
    done = subprocess.run([*command, str(script), *arguments], stdout=_STDERR, check=False)
    took = f"{time.monotonic() - began_s:.1f} s"
    if not out.exists():
        _say(f"{run_name}: ended after {took} without a step")
        return None
    record: dict[str, Any] = json.loads(out.read_text())
    _say(f"{run_name}: {len(record['steps'])} steps in {took}")
    failed = done.returncode != 0 and len(record["steps"]) < steps
    return None if failed and arm in ("eager", "eager-again") else record | {"failed": failed}


def _say(text: str) -> None:
    """Prints a line about the runs on stderr, among the script's own output."""
    print(f"memo verify: {text}", file=sys.stderr, flush=True)


def judge(eager: Mapping[str, Any], memo: Mapping[str, Any] | None) -> Verification:
    """Compares the recorded steps of both runs; ``memo`` None: that process died."""
    if memo is None:
        memo, faults = {"steps": ()}, ["the process with memo died"]
    else:
        faults = list(_state_faults(memo, len(eager["steps"])))
    numbers = _compared(eager, memo)
    faults += numbers.faults
    planned, measured = memo.get("planned_peak_bytes"), memo.get("measured_peak_bytes")
    if planned is not None and measured is not None:
        allowed = planned + max(PEAK_SLACK_BYTES, int(PEAK_SLACK * planned))
        if measured > allowed:
            faults.append(
                f"the peak is {format_bytes(measured)}, planned were {format_bytes(planned)}"
            )
    return Verification(
        num_steps=numbers.num_steps,
        loss_difference=numbers.losses,
        gradient_difference=numbers.gradients,
        differs=bool(numbers.faults),
        planned_peak_bytes=planned,
        measured_peak_bytes=measured,
        faults=tuple(faults),
    )


@dataclass(frozen=True, slots=True)
class _Numbers:
    """How far the losses and gradients of two runs differ."""

    num_steps: int
    losses: float
    gradients: float
    faults: tuple[str, ...]
    """One for each step and kind that differs by more than rounding."""


def _compared(eager: Mapping[str, Any], run: Mapping[str, Any]) -> _Numbers:
    """Returns how far ``run`` differs from ``eager``, over the steps that both have."""
    losses = gradients = 0.0
    faults = []
    pairs = list(zip(eager["steps"], run["steps"], strict=False))
    for number, (eager_step, step) in enumerate(pairs, start=1):
        has_half = eager_step["half"] or step["half"]
        bound = HALF_TOLERANCE if has_half else TOLERANCE
        loss, gradient = _loss_difference(eager_step, step), _gradient_difference(eager_step, step)
        if not loss <= bound:
            faults.append(f"step {number}: losses differ by {loss:.1e}, more than {bound:g}")
        if not gradient <= bound:
            faults.append(f"step {number}: gradients differ by {gradient:.1e}, more than {bound:g}")
        losses, gradients = max(losses, loss), max(gradients, gradient)
    return _Numbers(len(pairs), losses, gradients, tuple(faults))


def _require_repeatable(
    script: Path, eager: Mapping[str, Any], second_eager: Mapping[str, Any] | None
) -> None:
    """Raises InputError: two eager runs differ, so that a run with memo cannot be judged."""
    numbers = None if second_eager is None else _compared(eager, second_eager)
    if numbers is not None and not numbers.faults:
        return
    how = "the second one failed" if numbers is None else numbers.faults[0]
    raise InputError(
        f"{script}: two runs without memo differ too ({how}), so that nothing can be compared; "
        "seed what draws its data and weights, and read the same data in each run"
    )


def _of_inductor(eager: Mapping[str, Any], inductor: Mapping[str, Any] | None) -> str:
    """Says whether plain Inductor differs from eager too, or memo alone."""
    if inductor is None or inductor["failed"]:
        return "plain Inductor: the script fails with it too"
    numbers = _compared(eager, inductor)
    within = f"losses within {numbers.losses:.1e}, gradients within {numbers.gradients:.1e}"
    if numbers.faults:
        return (
            f"plain Inductor differs from eager too ({within}): torch is to blame, at least for "
            "that; please report it there"
        )
    return f"plain Inductor is right ({within}): memo is to blame; please report it"


def _state_faults(memo: Mapping[str, Any], num_steps: int) -> Iterator[str]:
    """Yields what is wrong with the run itself; ``num_steps`` is how many eager recorded."""
    if memo["failed"]:
        yield f"the script failed with memo after {len(memo['steps'])} steps"
    elif len(memo["steps"]) != num_steps:
        yield f"{num_steps} steps without memo, {len(memo['steps'])} with it"
    if not memo["active"]:
        yield "memo is not active: " + ("; ".join(memo["notes"]) or "no plan was made")
    if memo["unplanned_steps"]:
        yield f"{memo['unplanned_steps']} steps ran without their plan"
    yield from (f"the checker: {fault}" for fault in memo["check"])


def _loss_difference(eager_step: Mapping[str, Any], step: Mapping[str, Any]) -> float:
    """Returns the largest relative difference of a loss; infinite: one has more losses."""
    if len(eager_step["losses"]) != len(step["losses"]):
        return math.inf
    pairs = zip(eager_step["losses"], step["losses"], strict=True)
    return max((_relative(a, b, abs(a)) for a, b in pairs), default=0.0)


def _gradient_difference(eager_step: Mapping[str, Any], step: Mapping[str, Any]) -> float:
    """Returns the largest difference of a gradient, relative to its norm.

    It is recorded as (norm, signed sum), or None. Infinite: a run has one that the other lacks.
    """
    eager_digests, digests = eager_step["gradients"], step["gradients"]
    if [digest is None for digest in eager_digests] != [digest is None for digest in digests]:
        return math.inf
    pairs = [(a, b) for a, b in zip(eager_digests, digests, strict=True) if a is not None]
    norm_of_all = math.sqrt(sum(eager_digest[0] ** 2 for eager_digest, _ in pairs))
    worst = 0.0
    for eager_digest, digest in pairs:
        scale = max(eager_digest[0], SMALL_GRADIENT * norm_of_all)
        numbers = zip(eager_digest, digest, strict=True)
        worst = max([worst, *(_relative(x, y, scale) for x, y in numbers)])
    return worst


def _relative(first: float, second: float, scale: float) -> float:
    """``|first - second| / scale``, never NaN: infinite where one is not finite or scale is 0."""
    if first == second or (math.isnan(first) and math.isnan(second)):
        return 0.0
    difference = abs(first - second)
    return difference / scale if scale > 0 and math.isfinite(difference) else math.inf


def _as_dict(verdict: Verification) -> dict[str, Any]:
    body = {"holds": verdict.holds, **asdict(verdict)}
    for name in ("loss_difference", "gradient_difference"):
        body[name] = body[name] if math.isfinite(body[name]) else None
    return body
