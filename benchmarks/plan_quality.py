"""How near the best the plans are: ``python -m benchmarks.plan_quality``.

Named models on the simulator, each planned as ``memo plan`` does: for the device's memory less
1 GiB, for the floor, and for budgets between that and what keeping everything takes; with the
device's own host link and with a slow one; with as much host memory as the plan likes, and with
half of it. Two ratios: the step over its computation alone (the same step with everything kept and
nothing in tiles, as if memory were free; with what other ranks cost it at least), and the step over
its lower bound (``step_lower_bound_s``: of the step as it was cut, tiles included). Where a plan of
the integer program was taken: how much slower the plan is that policy ``greedy`` takes, which needs
no solver.

Each setting that is done is written at once. With ``--resume`` those are not planned again that
stand in today's result and were planned by the same code.

Passes when each step takes at most 1.02 of its computation alone under the device's whole
memory, where that is large enough; over the lower bound the median of all must be at most 1.01 and
the worst 1.1. No step may take less than its bound.
"""

import argparse
import statistics
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from benchmarks import harness
from memo_compile.costs.hardware import HardwareProfile, find_hardware
from memo_compile.units import format_bytes

NAME = "plan_quality"
MODULE = "benchmarks.plan_quality"
SETTINGS = {
    "llama3-8b": {"seq": 131072, "hardware": "h200"},
    "qwen3-8b": {"seq": 131072, "hardware": "h200"},
    "llama3-8b tp 2": {"seq": 262144, "hardware": "h100", "tp": 2},
    "gpt-7b tp 8": {"seq": 524288, "hardware": "a800", "tp": 8},
    "gpt-13b tp 8": {"seq": 262144, "hardware": "a800", "tp": 8},
    "benchmarks.hf_shapes:gemma_7b": {"seq": 65536, "hardware": "h200"},
    "benchmarks.hf_shapes:mixtral_8x7b": {"seq": 65536, "hardware": "h200"},
    "mistral-7b": {"seq": 131072, "hardware": "h100", "tight": True},
    "qwen3-8b 65536": {"seq": 65536, "hardware": "h100"},
    "llama3-8b 262144": {"seq": 262144, "hardware": "h200"},
    "llama3-70b tp 8": {"seq": 131072, "hardware": "h100", "tp": 8},
}
"""The first word is the model's name; ``tight``: the device's memory does not let it run at the
speed of its computation alone, so that only its bound judges it."""
LEVELS = (0.0, 0.05, 0.35, 0.65)
"""Budgets: from the floor to what keeping everything takes, or the device's memory if that is
less."""
SLOW_LINK = 12e9
"""Bytes per second: a host link of PCIe 3."""
MAX_OVER_COMPUTE = 1.02
MAX_MEDIAN_OVER_BOUND = 1.01
MAX_OVER_BOUND = 1.1
ROUNDING = 1e-6


def main() -> int:
    """Plan every setting in a process of its own, print the ratios, judge."""
    parser = harness.parser(__doc__, sizes={})
    parser.add_argument("--settings", default=",".join(SETTINGS), help="comma-separated")
    memory = ["device", *map("{:.0%}".format, LEVELS)]
    parser.add_argument("--memory", default=",".join(memory), help="of these budgets")
    parser.add_argument("--resume", action="store_true", help="keep what today's result has")
    return harness.run_benchmark(NAME, parser.parse_args(), measure, run_child)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All settings, and the verdict."""
    planner, rows = harness.code(), known_rows() if options.resume else []
    done = {row["setting"] for row in rows}
    for name in options.settings.split(","):
        if name in done:
            continue
        arm = harness.Arm(name=name, arguments=(f"--child={name}", f"--memory={options.memory}"))
        found = harness.run_arm(MODULE, arm, timeout_s=4 * harness.CHILD_TIMEOUT_S)["rows"]
        show(found)
        rows += [{**row, "code": planner} for row in found]
        if not options.no_save:
            harness.write_results(NAME, {"hardware": harness.hardware(), **judged(rows)})
    summarise(rows)
    return judged(rows)


def judged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is written: all rows, and the verdict."""
    return {"simulated": True, "code": harness.code(), "rows": rows, "failures": judge(rows)}


def known_rows() -> list[dict[str, Any]]:
    """The rows of today's result that were planned by this code."""
    rows = harness.todays_result(NAME).get("rows", [])
    return [row for row in rows if row["code"] == harness.code()]


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """One setting: its computation alone, and its plans."""
    from memo_compile.offline.forecast import Question, forecast
    from memo_compile.offline.shapes.transformer import Degrees

    setting = SETTINGS[options.child]
    device = find_hardware(str(setting["hardware"]))

    def plan(hardware: HardwareProfile = device, **more: Any) -> Any:
        question = Question(
            model=options.child.split()[0],
            hardware=hardware,
            seq=int(setting["seq"]),
            degrees=Degrees(tp=int(setting.get("tp", 1))),
            **more,
        )
        return forecast(question)

    rows = rows_of(plan, device, options.memory.split(","))
    return {"rows": [{"setting": options.child, **row} for row in rows]}


def rows_of(
    plan: Callable[..., Any], device: HardwareProfile, memory: Collection[str]
) -> Iterator[dict[str, Any]]:
    """A row for each budget that ``memory`` names, each link and host memory."""
    free = plan(budget="1000TB", policy="save")
    floor = plan(budget=1).peak_bytes
    most = device.memory_bytes - 2**30
    slow = replace(device, d2h_bytes_per_s=SLOW_LINK, h2d_bytes_per_s=SLOW_LINK)
    budgets = {"device": most}
    for level in LEVELS:
        budgets[f"{level:.0%}"] = int(floor + level * (min(free.peak_bytes, most) - floor))
    for name, budget in budgets.items():
        if name not in memory:
            continue
        if budget < floor:
            yield {"memory": name, "link": "own", "floor_bytes": floor}
            continue
        row = planned_row(plan, free.step_s, budget=budget)
        yield row | {"memory": name, "link": "own"}
        found = planned_row(plan, free.step_s, budget=budget, hardware=slow)
        yield found | {"memory": name, "link": "12 GB/s"}
        if half := row.get("host_bytes", 0) // 2:
            found = planned_row(plan, free.step_s, budget=budget, host_budget=half)
            yield found | {"memory": name, "link": "own, half the host"}


def planned_row(plan: Callable[..., Any], compute_s: float, **question: Any) -> dict[str, Any]:
    """The figures of a plan; without ``step_s`` where none fits."""
    answer = plan(**question)
    if not answer.fits:
        return {"floor_bytes": answer.peak_bytes}
    found = answer.step.plan
    proposer = next((point.policy for point in found.frontier if point.chosen), found.policy)
    row = {
        "compute_s": compute_s,
        "budget_bytes": answer.budget_bytes,
        "peak_bytes": answer.peak_bytes,
        "host_bytes": found.host_bytes,
        "step_s": answer.step_s,
        "stall_s": found.stall_s,
        "bound_s": found.step_lower_bound_s,
        "policy": found.policy,
        "proposer": proposer,
        "planning_s": found.planning_s,
    }
    if proposer == "program":
        greedy = plan(**question, policy="greedy")
        row["greedy_step_s"] = greedy.step_s if greedy.fits else None
    return row


def judge(rows: list[dict[str, Any]]) -> list[str]:
    """The plans that are too far from the best, as sentences."""
    planned = [row for row in rows if "step_s" in row]
    failures = [
        f"{row['setting']}: {row['step_s'] / row['compute_s']:.3f} x its computation alone"
        for row in planned
        if (row["memory"], row["link"]) == ("device", "own")
        and "tight" not in SETTINGS[row["setting"]]
        and row["step_s"] > MAX_OVER_COMPUTE * row["compute_s"]
    ]
    ratios = [row["step_s"] / row["bound_s"] for row in planned]
    if ratios and statistics.median(ratios) > MAX_MEDIAN_OVER_BOUND:
        failures.append(f"over the lower bound: median {statistics.median(ratios):.3f}")
    far = (row for row in planned if row["step_s"] > MAX_OVER_BOUND * row["bound_s"])
    failures += [
        f"{row['setting']}, memory {row['memory']}, link {row['link']}: "
        f"{row['step_s'] / row['bound_s']:.3f} x its lower bound"
        for row in far
    ]
    return failures + [
        f"{row['setting']}, memory {row['memory']}, link {row['link']}: {row['bound_s']} s are no"
        f" lower bound of a plan of {row['step_s']} s"
        for row in planned
        if row["step_s"] < row["bound_s"] * (1 - ROUNDING)
    ]


def show(rows: list[dict[str, Any]]) -> None:
    """The ratios of one setting as a table."""
    harness.print_table(
        "plans against their computation alone and their lower bound",
        ("setting memory link step /computation /bound stalls peak proposer greedy".split()),
        [
            (
                row["setting"].split(":")[-1],
                row["memory"],
                row["link"],
                f"{row['step_s']:.2f} s",
                f"{row['step_s'] / row['compute_s']:.4f}",
                f"{row['step_s'] / row['bound_s']:.4f}",
                f"{row['stall_s']:.2f} s",
                format_bytes(row["peak_bytes"]),
                row["proposer"],
                greedy_of(row),
            )
            if "step_s" in row
            else (row["setting"], row["memory"], row["link"], "does not fit", *[""] * 6)
            for row in rows
        ],
    )


def greedy_of(row: dict[str, Any]) -> str:
    """How much slower greedy's plan is than the program's; empty where that was not taken."""
    if "greedy_step_s" not in row:
        return ""
    greedy_s = row["greedy_step_s"]
    return "does not fit" if greedy_s is None else f"{greedy_s / row['step_s'] - 1:+.2%}"


def summarise(rows: list[dict[str, Any]]) -> None:
    """The median and the worst of all, and where the program's plans were taken."""
    planned = [row for row in rows if "step_s" in row]
    won = [row for row in planned if "greedy_step_s" in row]
    lost = [row["greedy_step_s"] / row["step_s"] - 1 for row in won if row["greedy_step_s"]]
    print(
        f"the program's plan was taken in {len(won)} of {len(planned)} settings; greedy's is "
        f"slower by {max(lost, default=0.0):.2%} at most, and fits in {len(lost)} of them"
    )
    ratios = [row["step_s"] / row["bound_s"] for row in rows if "step_s" in row]
    if ratios:
        print(
            f"{len(ratios)} plans over their bound: median {statistics.median(ratios):.4f}, "
            f"worst {max(ratios):.4f}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
