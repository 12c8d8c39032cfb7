"""Simulated against measured steps: ``python -m benchmarks.simulated``.

A Llama on the CPU engine under several policies and copy speeds, all in one process. Right before
each measured step its regions are measured, the same way as when memo plans, and the step is
simulated from them, so that a machine that others use is equally slow for both. Here it is the mean
of as many runs as the step has calls of the region: a median would forget what disturbs a run now
and then, and a step forgets nothing. Beside it stands what the plan itself predicted, from medians
that were taken minutes before.

Passes when for every step the median of simulated / measured is within 10 % of 1, and what the plan
predicted is within 10 % of the median step.
"""

import argparse
import statistics
import sys
from collections import Counter
from typing import Any

from benchmarks import harness, overlap, side_by_side

MODULE = "benchmarks.simulated"
MAX_DIFFERENCE = 0.1
HIDDEN, EQUAL, BOUND = 0.8, 1.0, 2.0
"""A layer's copy over the layer's own time: copies hide, just so, or bound the step."""


def main() -> int:
    """Run the steps in a child, print the table, write the results, judge."""
    options = side_by_side.arguments(__doc__, layers=8)
    return harness.run_benchmark("simulated", options, measure, run_child)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All steps, in a child, and the verdict."""
    result = side_by_side.in_child(MODULE, options)
    show(result["rows"])
    note = side_by_side.busy_note({row["name"]: row["measured"] for row in result["rows"]})
    return {**result, "failures": judge(result["rows"]), "note": note}


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """All steps, side by side in this process."""
    model, ids = side_by_side.llama(
        layers=options.layers, hidden=options.hidden, tokens=options.tokens, vocab=1024
    )

    def compiled(name: str, **more: Any) -> side_by_side.CompiledStep:
        return side_by_side.compiled_step(name, model, ids, more)

    save = compiled("save", policy="save")
    free = compiled("full-offload, no throttle", policy="full-offload")
    first = side_by_side.timed_in_turn([save], num_samples=3, time_limit_s=options.time_limit / 9)
    layer = overlap.layer_costs(free.plan, options.layers, first["save"].median_s)
    speeds = {part: overlap.copy_speeds(layer, part) for part in (HIDDEN, EQUAL, BOUND)}
    budget = (save.plan.peak_bytes + free.plan.peak_bytes) // 2
    steps = [save, free, compiled("full-recompute", policy="full-recompute")]
    for part, speed in speeds.items():
        name = f"full-offload, copies {part} x a layer"
        steps.append(compiled(name, policy="full-offload", copy_bytes_per_s=speed))
    for part in (HIDDEN, BOUND):
        name = f"auto, copies {part} x a layer"
        steps.append(compiled(name, memory_budget=budget, copy_bytes_per_s=speeds[part]))
    simulations = {step.name: Simulation(step) for step in steps}
    timed = side_by_side.timed_in_turn(
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


class Simulation:
    """One step, simulated again and again with its regions' seconds as they are just then."""

    def __init__(self, step: side_by_side.CompiledStep) -> None:
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


def row(
    step: side_by_side.CompiledStep, timed: side_by_side.Timed, simulation: Simulation
) -> dict[str, Any]:
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
