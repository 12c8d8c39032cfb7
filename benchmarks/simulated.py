"""Simulated against measured steps: ``python -m benchmarks.simulated``.

A Llama on the CPU engine under several policies and copy speeds, all in one process. Regions are
measured beside the steps, in the same rounds and the same way as when memo plans, so that a
machine that others use is equally slow for both; the simulated step follows from them. The step
that was simulated when it was planned is printed as well.

Passes when every simulated step is within 10 % of the median measured one.
"""

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks import harness, overlap, side_by_side

MODULE = "benchmarks.simulated"
MAX_DIFFERENCE = 0.1
HIDDEN, EQUAL, BOUND = 0.8, 1.0, 2.0
"""A layer's copy over the layer's own time: copies hide, just so, or bound the step."""


def main() -> int:
    """Run the steps in a child, print the table, write the results, judge."""
    options = arguments()
    if options.child:
        harness.send_result(run_child(options))
        return 0
    names = ("layers", "hidden", "tokens", "samples", "time-limit")
    shared = tuple(f"--{name}={getattr(options, name.replace('-', '_'))}" for name in names)
    hardware = harness.hardware()
    arm = harness.Arm(name="simulated", arguments=("--child", *shared))
    result = harness.run_arm(MODULE, arm, timeout_s=2 * harness.CHILD_TIMEOUT_S)
    failures = judge(result["rows"])
    show(result["rows"])
    payload = {"hardware": hardware, **result, "failures": failures}
    measured = {one["name"]: one["measured"] for one in result["rows"]}
    payload["note"] = side_by_side.busy_note(measured)
    if not options.no_save:
        print(f"written: {harness.write_results('simulated', payload)}", file=sys.stderr)
    if payload["note"]:
        print(f"NOT QUIET: {payload['note']}", file=sys.stderr)
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=7, help="quiet samples of each step")
    parser.add_argument("--time-limit", type=float, default=180.0, help="seconds of sampling")
    parser.add_argument("--no-save", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


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
    regions = RegionTimes(steps)
    timed = side_by_side.timed_in_turn(
        steps,
        num_samples=options.samples,
        time_limit_s=options.time_limit,
        each_round=regions.measure,
    )
    return {
        "settings": {key: getattr(options, key) for key in ("layers", "hidden", "tokens")},
        "layer": layer,
        "region_s": regions.seconds(),
        "rows": [row(one, timed[one.name], regions.seconds()) for one in steps],
    }


class RegionTimes:
    """Seconds of every region that the steps call, measured again in each round."""

    def __init__(self, steps: list[side_by_side.CompiledStep]) -> None:
        self.regions: dict[str, tuple[Any, Any]] = {}
        self.samples: dict[str, list[side_by_side.Sample]] = {}
        for one in steps:
            planner = one.assembly.planner
            lowered, graphs = dict(planner.lowered), dict(planner.graphs)
            called = {call.region for call in one.assembly.problem.calls}
            if not called & set(lowered) == called:
                library = planner.library()
                lowered.update(library.lowered)
                graphs.update(library.lowered_graphs())
            for name in called & set(lowered):
                self.regions.setdefault(name, (lowered[name], graphs[name]))

    def measure(self) -> None:
        """One more sample of every region, as memo measures them when it plans."""
        from memo_compile.backends.measure_regions import measure_all

        for name, (lowered, graph) in self.regions.items():
            found: dict[str, float] = {}

            def run(
                name: str = name,
                lowered: Any = lowered,
                graph: Any = graph,
                found: dict[str, float] = found,
            ) -> None:
                found.update(measure_all({name: lowered}, {name: graph}))

            noise = side_by_side.sample(run)
            sample = side_by_side.Sample(seconds=found[name], others=noise.others)
            self.samples.setdefault(name, []).append(sample)

    def seconds(self) -> dict[str, float]:
        """The median of every region."""
        timed = {name: side_by_side.Timed(samples=tuple(one)) for name, one in self.samples.items()}
        return {name: one.median_s for name, one in timed.items()}


def row(
    step: side_by_side.CompiledStep, timed: side_by_side.Timed, region_s: Mapping[str, float]
) -> dict[str, Any]:
    """One step: measured, simulated with ``region_s``, and simulated when it was planned."""
    from dataclasses import replace

    from memo_compile.movable import StepCosts
    from memo_compile.simulate import simulate

    problem, plan = step.assembly.problem, step.plan
    if any(call.copy is not None for call in problem.calls):
        costs = replace(step.assembly.planner.movable().step.costs, region_s=region_s)
    else:
        costs = StepCosts(region_s=region_s, d2h_bytes_per_s=1.0, h2d_bytes_per_s=1.0)
    timeline = simulate(problem, costs)
    return {
        "name": step.name,
        "measured": timed.as_dict(),
        "measured_s": timed.median_s,
        "simulated_s": timeline.step_s,
        "planned_s": None if plan.timeline is None else plan.timeline.step_s,
        "simulated_stall_s": timeline.stall_s,
        "stall_s": plan.stall_s,
        "offloaded_bytes": plan.offloaded_bytes,
        "recomputed_bytes": plan.recomputed_bytes,
    }


def judge(rows: list[dict[str, Any]]) -> list[str]:
    """Simulated steps that are too far from the measured ones, in words."""
    return [
        f"{one['name']}: simulated {one['simulated_s']:.3f} s, measured {one['measured_s']:.3f} s"
        for one in rows
        if abs(one["simulated_s"] / one["measured_s"] - 1) > MAX_DIFFERENCE
    ]


def show(rows: list[dict[str, Any]]) -> None:
    """The table."""
    cells = []
    for one in rows:
        measured, planned = one["measured"], one["planned_s"]
        cells.append(
            (
                one["name"],
                f"{one['measured_s']:.3f} s",
                f"{one['simulated_s']:.3f} s",
                f"{one['simulated_s'] / one['measured_s']:.3f}",
                "-" if planned is None else f"{planned:.3f} s",
                f"{one['stall_s']:.3f} s",
                f"{one['simulated_stall_s']:.3f} s",
                f"{measured['num_quiet']} / {len(measured['seconds'])}",
            )
        )
    columns = ("step", "measured", "simulated", "ratio", "when planned", "stall", "simulated")
    harness.print_table("steps on the CPU engine", (*columns, "quiet samples"), cells)


if __name__ == "__main__":
    sys.exit(main())
