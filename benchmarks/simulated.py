"""Simulated against measured steps: ``python -m benchmarks.simulated``.

A Llama on the CPU engine under several policies and copy speeds, all in one process. Right before
each measured step its regions are measured, the same way as when memo plans, and the step is
simulated from them, so that a machine that others use is equally slow for both. Here it is the mean
of as many runs as the step has calls of the region: a median would forget what disturbs a run now
and then, and a step forgets nothing. Beside it stands what the plan itself predicted, from medians
that were taken minutes before.

Steps are timed in turn on a machine that others use. Each sample notes which part of the cores
other processes took meanwhile. Samples of a quiet machine count; where there are too few of them,
all count, and the result says so.

Passes when for every step the median of simulated / measured is within 10 % of 1, and what the plan
predicted is within 10 % of the median step.
"""

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness

MODULE = "benchmarks.simulated"
MAX_DIFFERENCE = 0.1
HIDDEN, EQUAL, BOUND = 0.8, 1.0, 2.0
"""A layer's copy over the layer's own time: copies hide, just so, or bound the step."""
MAX_OTHERS = 0.1
"""Of all cores' time, taken by other processes: more, and a sample is not quiet."""
MIN_QUIET = 3
"""Quiet samples of a step; with fewer, all samples count."""
_STAT = Path("/proc/stat")
_IDLE_COLUMNS = (3, 4)
"""idle and iowait among the numbers of the first line of /proc/stat; 8 and 9, the guests', are
counted in the first two already."""


def main() -> int:
    """Run the steps in a child, print the table, write the results, judge."""
    parser = harness.parser(__doc__, sizes={"layers": 8, "hidden": 512, "tokens": 1024})
    parser.add_argument("--samples", type=int, default=7, help="quiet samples of each step")
    parser.add_argument("--time-limit", type=float, default=180.0, help="seconds of sampling")
    return harness.run_benchmark("simulated", parser.parse_args(), measure, run_child)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All steps, in a child, and the verdict."""
    names = ("layers", "hidden", "tokens", "samples", "time-limit")
    arm = harness.Arm(
        name="simulated", arguments=("--child=all", *harness.passed_on(options, *names))
    )
    result = harness.run_arm(MODULE, arm, timeout_s=2 * harness.CHILD_TIMEOUT_S)
    show(result["rows"])
    note = busy_note({row["name"]: row["measured"] for row in result["rows"]})
    return {**result, "failures": judge(result["rows"]), "note": note}


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """All steps, side by side in this process."""
    model, ids = harness.llama_with_ids(options, vocab=1024)

    def compiled(name: str, **more: Any) -> CompiledStep:
        return compiled_step(name, model, ids, more)

    save = compiled("save", policy="save")
    free = compiled("full-offload, no throttle", policy="full-offload")
    first = timed_in_turn([save], num_samples=3, time_limit_s=options.time_limit / 9)
    layer = layer_costs(free.plan, options.layers, first["save"].median_s)
    speeds = {part: copy_speeds(layer, part) for part in (HIDDEN, EQUAL, BOUND)}
    budget = (save.plan.peak_bytes + free.plan.peak_bytes) // 2
    steps = [save, free, compiled("full-recompute", policy="full-recompute")]
    for part, speed in speeds.items():
        name = f"full-offload, copies {part} x a layer"
        steps.append(compiled(name, policy="full-offload", copy_bytes_per_s=speed))
    for part in (HIDDEN, BOUND):
        name = f"auto, copies {part} x a layer"
        steps.append(compiled(name, memory_budget=budget, copy_bytes_per_s=speeds[part]))
    simulations = {step.name: Simulation(step) for step in steps}
    timed = timed_in_turn(
        steps,
        num_samples=options.samples,
        time_limit_s=options.time_limit,
        before_each=lambda step: simulations[step.name].add(),
    )
    return {
        "settings": {key: getattr(options, key) for key in ("layers", "hidden", "tokens")},
        "layer": layer,
        "rows": [row(step, timed[step.name], simulations[step.name]) for step in steps],
    }


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


def layer_costs(plan: Any, num_layers: int, step_s: float) -> dict[str, float]:
    """Seconds of a layer's forward and backward, and the bytes that it offloads.

    The seconds are those of the plan's regions, scaled so that all of them take ``step_s``: the
    machine may have been busier when regions were measured.
    """
    spans = [span for span in plan.timeline.spans if span.lane == "compute"]
    scale = step_s / sum(span.end_s - span.start_s for span in spans)
    costs: dict[str, float] = {"bytes": plan.offloaded_bytes / num_layers}
    for half in ("fwd", "bwd"):
        layers = [span for span in spans if span.name.startswith(f"layer0_{half}")]
        if len(layers) != num_layers:
            raise RuntimeError(f"expected {num_layers} calls of layer0_{half}, got {len(layers)}")
        seconds = sum(span.end_s - span.start_s for span in layers)
        costs[f"{half}_s"] = scale * seconds / num_layers
    return costs


def copy_speeds(layer: Mapping[str, float], part: float) -> tuple[float, float]:
    """Bytes per second at which a layer's copy takes ``part`` of its forward, or backward."""
    return layer["bytes"] / (part * layer["fwd_s"]), layer["bytes"] / (part * layer["bwd_s"])


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


class Simulation:
    """One step, simulated again and again with its regions' seconds as they are just then."""

    def __init__(self, step: CompiledStep) -> None:
        planned = step.assembly.planned
        self.problem, self.graphs = planned.problem, step.assembly.known.graphs()
        called = {call.region for call in self.problem.calls}
        self.lowered = {name: region for name, region in planned.lowered.items() if name in called}
        self.num_calls = Counter(call.region for call in self.problem.calls)
        copies = any(call.copy is not None for call in self.problem.calls)
        self.costs = step.assembly.costs() if copies else None
        self.seconds: list[float] = []
        self.stalls_s: list[float] = []

    def add(self) -> None:
        """Measure the regions, as memo does when it plans, and simulate the step."""
        from dataclasses import replace

        from memo_compile.costs.measure_regions import measure_all
        from memo_compile.step.movable import StepCosts
        from memo_compile.step.simulate import simulate

        region_s: dict[str, float] = {}
        for name, region in self.lowered.items():
            region_s |= measure_all(
                {name: region},
                {name: self.graphs[name]},
                repeats=max(3, self.num_calls[name]),
                average=statistics.mean,
            )
        if self.costs is None:
            costs = StepCosts(region_s=region_s, d2h_bytes_per_s=1.0, h2d_bytes_per_s=1.0)
        else:
            costs = replace(self.costs, region_s=region_s)
        timeline = simulate(self.problem, costs)
        self.seconds.append(timeline.step_s)
        self.stalls_s.append(timeline.stall_s)


def row(step: CompiledStep, timed: Timed, simulation: Simulation) -> dict[str, Any]:
    """One step: measured, simulated beside each sample, and simulated when it was planned."""
    plan = step.plan
    pairs = [(simulation.seconds[at], timed.samples[at].seconds) for at in timed.counted]
    return {
        "name": step.name,
        "measured": timed.as_dict(),
        "measured_s": timed.median_s,
        "simulated": [round(second, 4) for second in simulation.seconds],
        "simulated_s": statistics.median(simulated for simulated, _ in pairs),
        "ratio": statistics.median(simulated / measured for simulated, measured in pairs),
        "planned_s": None if plan.timeline is None else plan.timeline.step_s,
        "simulated_stall_s": statistics.median(simulation.stalls_s),
        "stall_s": plan.stall_s,
        "offloaded_bytes": plan.offloaded_bytes,
        "recomputed_bytes": plan.recomputed_bytes,
    }


def judge(rows: list[dict[str, Any]]) -> list[str]:
    """Simulated steps that are too far from the measured ones, in words."""
    return [
        f"{row['name']}: simulated / measured {row['ratio']:.3f}"
        for row in rows
        if abs(row["ratio"] - 1) > MAX_DIFFERENCE
    ] + [
        f"{row['name']}: planned / measured {row['planned_s'] / row['measured_s']:.3f}"
        for row in rows
        if row.get("planned_s") is not None
        and abs(row["planned_s"] / row["measured_s"] - 1) > MAX_DIFFERENCE
    ]


def show(rows: list[dict[str, Any]]) -> None:
    """The table."""
    cells = []
    for row in rows:
        measured, planned = row["measured"], row["planned_s"]
        cells.append(
            (
                row["name"],
                f"{row['measured_s']:.3f} s",
                f"{row['simulated_s']:.3f} s",
                f"{row['ratio']:.3f}",
                "-" if planned is None else f"{planned / row['measured_s']:.3f}",
                f"{row['stall_s']:.3f} s",
                f"{row['simulated_stall_s']:.3f} s",
                f"{measured['num_quiet']} / {len(measured['seconds'])}",
            )
        )
    columns = ("step", "measured", "simulated", "ratio", "planned / measured", "stall", "simulated")
    harness.print_table("steps on the CPU engine", (*columns, "quiet samples"), cells)


if __name__ == "__main__":
    sys.exit(main())
