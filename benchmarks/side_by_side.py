"""Several compiled steps of one model in one process, timed in turn on a machine that others use.

Each sample notes which part of the cores other processes took meanwhile. Samples of a quiet
machine count; where there are too few of them, all count, and the result says so.
"""

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness

MAX_OTHERS = 0.1
"""Of all cores' time, taken by other processes: more, and a sample is not quiet."""
MIN_QUIET = 3
"""Quiet samples of a step; with fewer, all samples count."""
_STAT = Path("/proc/stat")
_IDLE_COLUMNS = (3, 4)
"""idle and iowait among the numbers of the first line of /proc/stat; 8 and 9, the guests', are
counted in the first two already."""


def arguments(doc: str | None, *, layers: int) -> argparse.Namespace:
    """The command line of a benchmark that times steps of a Llama in turn."""
    parser = harness.parser(doc, sizes={"layers": layers, "hidden": 512, "tokens": 1024})
    parser.add_argument("--samples", type=int, default=7, help="quiet samples of each step")
    parser.add_argument("--time-limit", type=float, default=180.0, help="seconds of sampling")
    return parser.parse_args()


def in_child(module: str, options: argparse.Namespace) -> dict[str, Any]:
    """What the steps of ``module`` gave, in a process of their own."""
    names = ("layers", "hidden", "tokens", "samples", "time-limit")
    arguments = ("--child=all", *harness.passed_on(options, *names))
    arm = harness.Arm(name=module, arguments=arguments)
    return harness.run_arm(module, arm, timeout_s=2 * harness.CHILD_TIMEOUT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStep:
    """One way to run the model's forward and backward."""

    name: str
    prepare: Callable[[], None]
    """What comes before each step and is not timed: the gradients go."""
    run: Callable[[], None]
    plan_name: str
    """Of its plan in memo's report."""
    assembly: Any
    """What memo assembled: the lowered regions, the plan and the step program."""

    @property
    def plan(self) -> Any:
        """Its plan, with what the last step counted."""
        import memo_compile

        return next(plan for plan in memo_compile.report().plans if plan.name == self.plan_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One timed step."""

    seconds: float
    others: float
    """The part of all cores' time that other processes took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """The samples of one step."""

    samples: tuple[Sample, ...]

    @property
    def quiet(self) -> tuple[Sample, ...]:
        """Those during which the machine was this process's."""
        return tuple(taken for taken in self.samples if taken.others <= MAX_OTHERS)

    @property
    def is_quiet(self) -> bool:
        """True when there are enough quiet samples."""
        return len(self.quiet) >= MIN_QUIET

    @property
    def counted(self) -> tuple[int, ...]:
        """Indices of the quiet samples, or of all where they are too few."""
        return tuple(
            index
            for index, taken in enumerate(self.samples)
            if taken.others <= MAX_OTHERS or not self.is_quiet
        )

    @property
    def median_s(self) -> float:
        """Of the samples that count."""
        return statistics.median(self.samples[index].seconds for index in self.counted)

    def as_dict(self) -> dict[str, Any]:
        """For the results' JSON."""
        return {
            "median_s": self.median_s,
            "num_quiet": len(self.quiet),
            "seconds": [round(taken.seconds, 4) for taken in self.samples],
            "others": [round(taken.others, 3) for taken in self.samples],
        }


def llama(*, layers: int, hidden: int, tokens: int, vocab: int) -> tuple[Any, Any]:
    """An unmodified Llama from a config, no download, and its token ids."""
    import argparse

    from benchmarks import budget

    sizes = argparse.Namespace(layers=layers, hidden=hidden, tokens=tokens, vocab=vocab)
    return budget.make_model(sizes)


def compiled_step(name: str, model: Any, ids: Any, options: Mapping[str, Any]) -> CompiledStep:
    """``model`` compiled by memo with ``options``, which differ between the steps of a process.

    Nothing is reset in between: torch keeps one entry of its cache per set of options.
    """
    import torch

    import memo_compile

    torch._dynamo.config.recompile_limit = 64
    step = torch.compile(model, backend="memo", options={"strict": True, **options})

    def prepare() -> None:
        model.zero_grad(set_to_none=True)

    def run() -> None:
        step(input_ids=ids, labels=ids).loss.backward()

    before = {plan.name for plan in memo_compile.report().plans}
    with _assemblies() as assembled:
        prepare()
        run()
    report = memo_compile.report()
    new = [plan.name for plan in report.plans if plan.name not in before]
    if len(new) != 1 or not report.active:
        raise RuntimeError(f"{name}: expected one new plan, got {len(new)}\n{report}")
    return CompiledStep(
        name=name, prepare=prepare, run=run, plan_name=new[0], assembly=assembled[-1]
    )


@contextlib.contextmanager
def _assemblies() -> Iterator[list[Any]]:
    """Collects what memo assembles while the block runs."""
    from memo_compile.backends import entry

    found: list[Any] = []
    original = entry.assemble

    def assemble(*arguments: Any) -> Any:
        found.append(original(*arguments))
        return found[-1]

    entry.assemble = assemble
    try:
        yield found
    finally:
        entry.assemble = original


def timed_in_turn(
    steps: Sequence[CompiledStep],
    *,
    num_samples: int,
    time_limit_s: float,
    before_each: Callable[[CompiledStep], None] = lambda _: None,
) -> dict[str, Timed]:
    """Times every step, one after the other, again and again; each runs once before it is timed.

    The first run takes the arena over from another plan, which one plan alone never does. Ends when
    each has ``num_samples`` quiet samples, or at the time limit with at least that many of any
    kind. ``before_each`` is called before each sample.
    """
    samples: dict[str, list[Sample]] = {step.name: [] for step in steps}
    begin = time.monotonic()
    while True:
        for step in steps:
            before_each(step)
            step.prepare()
            step.run()
            step.prepare()
            samples[step.name].append(sample(step.run))
        found = {name: Timed(samples=tuple(values)) for name, values in samples.items()}
        if all(len(timed.quiet) >= num_samples for timed in found.values()):
            return found
        enough = len(samples[steps[0].name]) >= num_samples
        if enough and time.monotonic() - begin > time_limit_s:
            return found


def busy_note(steps: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Which steps (``Timed.as_dict``, by name) have too few quiet samples to be judged by."""
    busy = [name for name, measured in steps.items() if measured["num_quiet"] < MIN_QUIET]
    if not busy:
        return None
    return f"other processes used the cores; run again on a quiet machine: {', '.join(busy)}"


def sample(run: Callable[[], None]) -> Sample:
    """One call, timed; and what other processes took of the cores meanwhile."""
    busy_s, own_s, begin = _busy_s(), time.process_time(), time.perf_counter()
    run()
    seconds = time.perf_counter() - begin
    others_s = (_busy_s() - busy_s) - (time.process_time() - own_s)
    return Sample(seconds=seconds, others=max(0.0, others_s) / (seconds * (os.cpu_count() or 1)))


def _busy_s() -> float:
    """Core seconds since boot that were not idle; 0 where the system does not say."""
    if not _STAT.exists():
        return 0.0
    columns = [int(column) for column in _STAT.read_text().partition("\n")[0].split()[1:9]]
    busy = sum(value for index, value in enumerate(columns) if index not in _IDLE_COLUMNS)
    return busy / os.sysconf("SC_CLK_TCK")
