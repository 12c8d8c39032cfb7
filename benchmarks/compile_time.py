"""Compile time against depth: ``python -m benchmarks.compile_time``.

An unmodified Llama at several depths, memo and plain Inductor, each in a process of its own with
empty caches: seconds until the first step has run, and memo's seconds in lowering. memo passes
when its lowering hardly grows with depth and its first step beats Inductor's at the deepest.
"""

import argparse
import sys
import time
from typing import Any

from benchmarks import arena, harness

MODULE = "benchmarks.compile_time"
MAX_LOWERING_GROWTH = 1.3
"""Lowering at the deepest over lowering at the shallowest."""
MAX_FIRST_STEP_RATIO = 0.8
"""First step at the deepest, memo over Inductor."""
DEPTHS = (4, 32)
ARMS = ("inductor", "memo")


def main() -> int:
    """Run every arm at every depth, print the table, write the results, judge."""
    return harness.run_benchmark("compile_time", arguments(), measure, run_child)


def arguments() -> argparse.Namespace:
    """The command line; the defaults take about eight minutes on two cores."""
    parser = harness.parser(__doc__, sizes={"hidden": 256, "tokens": 256, "rounds": 1})
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All arms at all depths, and the verdict."""
    depths = [int(depth) for depth in options.depths.split(",")]
    shared = harness.passed_on(options, "hidden", "tokens")
    arms = [
        harness.Arm(
            name=f"{arm}-{depth}", arguments=(f"--child={arm}", f"--layers={depth}", *shared)
        )
        for depth in depths
        for arm in ARMS
    ]
    rounds = harness.interleaved(MODULE, arms, options.rounds)
    results = {name: harness.medians(values) for name, values in rounds.items()}
    show(results, depths)
    return {"results": results, "rounds": rounds, "failures": judge(results, depths)}


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds from the first call to the end of the first backward."""
    import torch

    model, ids = arena.make_model("llama", options)
    step = torch.compile(model, backend=options.child)
    begin = time.perf_counter()
    step(input_ids=ids, labels=ids).loss.backward()
    result = {"first_step_s": time.perf_counter() - begin}
    if options.child == "memo":
        import memo_compile

        report = memo_compile.report()
        if not report.active:
            raise RuntimeError(f"memo stepped aside:\n{report}")
        plan = report.plans[-1]
        result["lowering_s"] = plan.lowering_s
        result["planning_s"] = plan.planning_s
        result["num_regions"] = plan.num_regions
    return result


def judge(results: dict[str, dict[str, Any]], depths: list[int]) -> list[str]:
    """What misses its bound, in words."""
    low, high = min(depths), max(depths)
    growth = results[f"memo-{high}"]["lowering_s"] / results[f"memo-{low}"]["lowering_s"]
    ratio = results[f"memo-{high}"]["first_step_s"] / results[f"inductor-{high}"]["first_step_s"]
    found = []
    if growth > MAX_LOWERING_GROWTH:
        found.append(f"lowering grows {growth:.2f} x from {low} to {high} layers")
    if ratio > MAX_FIRST_STEP_RATIO:
        found.append(f"first step at {high} layers is {ratio:.2f} x Inductor's")
    return found


def show(results: dict[str, dict[str, Any]], depths: list[int]) -> None:
    """The table."""
    rows = []
    for depth in depths:
        memo, inductor = results[f"memo-{depth}"], results[f"inductor-{depth}"]
        rows.append(
            [
                str(depth),
                f"{inductor['first_step_s']:.1f} s",
                f"{memo['first_step_s']:.1f} s",
                f"{memo['first_step_s'] / inductor['first_step_s']:.3f}",
                f"{memo['lowering_s']:.1f} s",
                f"{memo['planning_s']:.2f} s",
                str(memo["num_regions"]),
            ]
        )
    columns = ["layers", "inductor", "memo", "ratio", "lowering", "planning", "regions"]
    harness.print_table("first step, compilation included", columns, rows)


if __name__ == "__main__":
    sys.exit(main())
