"""How near the best the plans are: ``python -m benchmarks.plan_quality``.

Named models on the simulator, each planned as ``memo plan`` does, for all but 1 GiB of the device's
memory and for smaller budgets. Two ratios: the step over its computation alone (the same step with
everything kept and nothing in tiles, as if memory were free), and the step over its lower bound
(``step_lower_bound_s``: of the step as it was cut, tiles included).

Passes when each step takes at most 1.02 of its computation alone under the device's whole memory;
over the lower bound the median must be at most 1.01 and the worst 1.05.
"""

import argparse
import statistics
from typing import Any

from benchmarks import harness
from memo_compile.units import format_bytes

MODULE = "benchmarks.plan_quality"
SETTINGS = {
    "llama3-8b": {"seq": 131072, "hardware": "h200"},
    "qwen3-8b": {"seq": 131072, "hardware": "h200"},
    "llama3-8b tp 2": {"seq": 262144, "hardware": "h100", "tp": 2},
    "gpt-7b tp 8": {"seq": 524288, "hardware": "a800", "tp": 8},
    "gpt-13b tp 8": {"seq": 262144, "hardware": "a800", "tp": 8},
}
"""The first word is the model's name."""
SHARES = (1.0, 0.8, 0.65)
"""Of the device's memory; a budget below the floor is left out, and said."""
MAX_OVER_COMPUTE = 1.02
MAX_MEDIAN_OVER_BOUND = 1.01
MAX_OVER_BOUND = 1.05


def main() -> int:
    """Plan every setting in a process of its own, print the ratios, judge."""
    return harness.run_benchmark("plan_quality", arguments(), measure, run_child)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(__doc__, sizes={})
    parser.add_argument("--settings", default=",".join(SETTINGS), help="comma-separated")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All settings, and the verdict."""
    rows: list[dict[str, Any]] = []
    for name in options.settings.split(","):
        arm = harness.Arm(name=name, arguments=(f"--child={name}",))
        rows += harness.run_arm(MODULE, arm, timeout_s=4 * harness.CHILD_TIMEOUT_S)["rows"]
    show(rows)
    return {"rows": rows, "failures": judge(rows)}


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """One setting: its computation alone, and its plan at every share of the memory."""
    from memo_compile.costs.hardware import find_hardware
    from memo_compile.errors import Infeasible
    from memo_compile.offline.forecast import Question, forecast
    from memo_compile.offline.shapes.transformer import Degrees

    setting = SETTINGS[options.child]
    hardware = find_hardware(str(setting["hardware"]))

    def plan(**more: Any) -> Any:
        return forecast(
            Question(
                model=options.child.split()[0],
                hardware=hardware,
                seq=int(setting["seq"]),
                degrees=Degrees(tp=int(setting.get("tp", 1))),
                **more,
            )
        )

    compute_s = plan(budget="1000TB", policy="save").step_s
    rows = []
    for share in SHARES:
        budget = int(hardware.memory_bytes * share) - (2**30 if share == 1.0 else 0)
        row = {"setting": options.child, "share": share, "compute_s": compute_s}
        try:
            answer = plan(budget=budget)
        except Infeasible as error:
            rows.append({**row, "floor_bytes": error.floor_bytes})
            continue
        if not answer.fits:
            rows.append({**row, "floor_bytes": answer.peak_bytes})
            continue
        found = answer.step.plan
        rows.append(
            {
                **row,
                "budget_bytes": budget,
                "peak_bytes": answer.peak_bytes,
                "step_s": answer.step_s,
                "stall_s": found.stall_s,
                "bound_s": found.step_lower_bound_s,
                "policy": found.policy,
                "planning_s": found.planning_s,
            }
        )
    return {"rows": rows}


def judge(rows: list[dict[str, Any]]) -> list[str]:
    """The plans that are too far from the best, as sentences."""
    planned = [row for row in rows if "step_s" in row]
    failures = [
        f"{row['setting']}: {row['step_s'] / row['compute_s']:.3f} x its computation alone"
        for row in planned
        if row["share"] == 1.0 and row["step_s"] > MAX_OVER_COMPUTE * row["compute_s"]
    ]
    ratios = [row["step_s"] / row["bound_s"] for row in planned]
    if ratios and statistics.median(ratios) > MAX_MEDIAN_OVER_BOUND:
        failures.append(f"over the lower bound: median {statistics.median(ratios):.3f}")
    if ratios and max(ratios) > MAX_OVER_BOUND:
        failures.append(f"over the lower bound: worst {max(ratios):.3f}")
    return failures


def show(rows: list[dict[str, Any]]) -> None:
    """The ratios as a table."""
    harness.print_table(
        "plans against their computation alone and their lower bound",
        ("setting", "memory", "step", "/ computation", "/ bound", "stalls", "peak"),
        [
            (
                row["setting"],
                f"{row['share']:.0%}",
                f"{row['step_s']:.2f} s",
                f"{row['step_s'] / row['compute_s']:.4f}",
                f"{row['step_s'] / row['bound_s']:.4f}",
                f"{row['stall_s']:.2f} s",
                format_bytes(row["peak_bytes"]),
            )
            if "step_s" in row
            else (row["setting"], f"{row['share']:.0%}", "below the floor", "", "", "", "")
            for row in rows
        ],
    )


if __name__ == "__main__":
    raise SystemExit(main())
