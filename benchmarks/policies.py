"""What the choice under a bound is worth: GPT-7B from 16K to 1M tokens, on the simulator.

Run: python -m benchmarks.policies [--quick]

Tensor parallel over 8 devices, budget 80 % of the device, 250 GB of host memory for each; copies
at the link's nominal speed and at 12 GB/s, which MEMO's own tables imply. Policies: auto, greedy,
memo, full-recompute, full-offload, save. Peaks are bytes alive, as a perfect placement would reach.
Then, on one device, the whole frontier: over all budgets, how much slower greedy's plans alone are.
The exit code is 1 when another policy that fits is faster than auto.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from benchmarks import harness
from benchmarks.layer_steps import GEMM_EFFICIENCY, HBM_EFFICIENCY, Setting, gpt_step, recompute_of
from memo_compile.costs.hardware import find_hardware
from memo_compile.costs.models import find_model
from memo_compile.errors import Infeasible
from memo_compile.planners.policy import choose
from memo_compile.planners.policy.candidates import Candidate, CandidateSource
from memo_compile.planners.policy.frontier import unbeaten
from memo_compile.step.movable import MovableStep
from memo_compile.step.problem import Problem
from memo_compile.step.simulate import peak_live_bytes
from memo_compile.units import format_bytes, format_seconds

POLICIES = ("auto", "greedy", "memo", "full-recompute", "full-offload", "save")
DEVICES = ("h200", "h100", "a800")
SLOW_LINK_BYTES_PER_S = 12e9
TOKENS = tuple(1024 * 2**power for power in range(4, 11))
TP = 8
BUDGET_SHARE = 0.8
HOST_BYTES = 250 * 10**9
TOLERANCE = 1e-3
"""Relative: auto's order of preference also weighs seconds of copying, at 1e-4 each."""


@dataclass(frozen=True, slots=True)
class Live:
    """A placement without loss."""

    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy in one setting; no step where it does not fit."""

    device: str
    link_bytes_per_s: float
    tokens: int
    policy: str
    step_s: float | None
    stall_s: float | None
    peak_bytes: int | None
    host_bytes: int | None
    planning_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all settings, print the tables, write the results, judge auto."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="h100 at 64K and 256K only")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args(arguments)
    rows = []
    for device, speed, tokens in _settings(options.quick):
        found = [_run(device, speed, tokens, policy) for policy in POLICIES]
        rows += found
        print(f"{device} {speed / 1e9:.0f} GB/s {tokens // 1024}K", file=sys.stderr, flush=True)
    show(rows)
    failures = judge(rows)
    gains = solver_gains(rows)
    frontier = frontier_gains((65536,) if options.quick else (32768, 65536, 131072, 524288))
    payload = {
        "hardware": harness.hardware(),
        "settings": {
            "model": "gpt-7b",
            "tp": TP,
            "budget_share": BUDGET_SHARE,
            "host_bytes": HOST_BYTES,
            "gemm_efficiency": GEMM_EFFICIENCY,
            "hbm_efficiency": HBM_EFFICIENCY,
            "simulated": True,
        },
        "rows": [asdict(row) for row in rows],
        "solver_gains": gains,
        "frontier_gains": frontier,
        "failures": failures,
    }
    return harness.conclude("policies", payload, save=not options.no_save)


def _settings(quick: bool) -> Iterator[tuple[str, float, int]]:
    for device in ("h100",) if quick else DEVICES:
        nominal = find_hardware(device).d2h_bytes_per_s
        for speed in (nominal, SLOW_LINK_BYTES_PER_S):
            for tokens in (65536, 262144) if quick else TOKENS:
                yield device, speed, tokens


def _step(device: str, speed: float, tokens: int) -> MovableStep:
    return gpt_step(
        Setting(
            shape=find_model("gpt-7b"),
            seq=tokens,
            tp=TP,
            hardware=find_hardware(device),
            copy_bytes_per_s=speed,
        )
    )


def _run(device: str, speed: float, tokens: int, policy: str) -> Row:
    step = _step(device, speed, tokens)

    def place(problem: Problem) -> Live:
        return Live(peak_live_bytes(problem))

    start = time.perf_counter()
    step_s = stall_s = peak_bytes = host_bytes = None
    try:
        choice = choose(
            step,
            budget_bytes=int(find_hardware(device).memory_bytes * BUDGET_SHARE),
            host_budget_bytes=HOST_BYTES,
            policy=policy,
            recompute=recompute_of(step),
            place=place,
        )
    except Infeasible:
        pass
    else:
        step_s, stall_s = choice.timeline.step_s, choice.timeline.stall_s
        peak_bytes, host_bytes = choice.plan.peak_bytes, choice.problem.host_bytes
    return Row(
        device=device,
        link_bytes_per_s=speed,
        tokens=tokens,
        policy=policy,
        step_s=step_s,
        stall_s=stall_s,
        peak_bytes=peak_bytes,
        host_bytes=host_bytes,
        planning_s=round(time.perf_counter() - start, 3),
    )


def _by_setting(rows: Sequence[Row]) -> dict[tuple[str, float, int], dict[str, Row]]:
    found: dict[tuple[str, float, int], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row.device, row.link_bytes_per_s, row.tokens), {})[row.policy] = row
    return found


def show(rows: Sequence[Row]) -> None:
    """One table for each device and link: seconds of the step, and auto's seconds of planning."""
    settings = _by_setting(rows)
    for device, speed in dict.fromkeys((device, speed) for device, speed, _ in settings):
        lines = []
        for (profile, link, tokens), policies in settings.items():
            if (profile, link) != (device, speed):
                continue
            steps = [policies[policy].step_s for policy in POLICIES]
            cells = [
                "does not fit" if step_s is None else format_seconds(step_s) for step_s in steps
            ]
            planning = f"{policies['auto'].planning_s:.1f} s"
            lines.append([f"{tokens // 1024}K", *cells, planning])
        title = f"GPT-7B, tp {TP}, {device}, copies at {speed / 1e9:.0f} GB/s: simulated step"
        harness.print_table(title, ("tokens", *POLICIES, "planning"), lines)


def judge(rows: Sequence[Row]) -> list[str]:
    """Where another policy that fits is faster than auto, or fits where auto does not."""
    failures = []
    for (device, speed, tokens), policies in _by_setting(rows).items():
        auto = policies["auto"].step_s
        for policy, row in policies.items():
            slower = auto is None or (row.step_s or 0) < auto * (1 - TOLERANCE)
            if row.step_s is not None and slower:
                failures.append(
                    f"{device} {speed:.3g} {tokens}: {policy} {row.step_s}, auto {auto}"
                )
    return failures


def solver_gains(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Where auto, which has the program's plans too, beats greedy, and by how much of the step."""
    gains: list[dict[str, object]] = []
    for (device, speed, tokens), policies in _by_setting(rows).items():
        auto, greedy = policies["auto"].step_s, policies["greedy"].step_s
        if auto is None:
            continue
        share = None if greedy is None else greedy / auto - 1
        if share is None or share > TOLERANCE:
            where = {"device": device, "link_bytes_per_s": speed, "tokens": tokens}
            gains.append({**where, "greedy_slower_by": share})
            text = "does not fit" if share is None else f"is {100 * share:.2f} % slower"
            print(f"{device}, {speed / 1e9:.0f} GB/s, {tokens // 1024}K: greedy {text}")
    print(f"the program beats greedy in {len(gains)} of {len(_by_setting(rows))} settings")
    return gains


def frontier_gains(tokens: Sequence[int]) -> list[dict[str, object]]:
    """Per link and length: over all budgets, how much slower greedy alone is."""
    found: list[dict[str, object]] = []
    for speed in (find_hardware("h100").d2h_bytes_per_s, SLOW_LINK_BYTES_PER_S):
        for count in tokens:
            step = _step("h100", speed, count)
            source = CandidateSource(
                step=step, recompute=recompute_of(step), host_budget_bytes=HOST_BYTES
            )
            all_plans = unbeaten(source.auto(), HOST_BYTES)
            greedy = unbeaten([*source.greedy(), *source.named("save")], HOST_BYTES)
            slower = [
                _fastest(greedy, budget) / best - 1
                for budget in sorted({candidate.live_bytes for candidate in (*all_plans, *greedy)})
                if _fastest(greedy, budget) and (best := _fastest(all_plans, budget))
            ]
            floors = min(candidate.live_bytes for candidate in greedy), all_plans[-1].live_bytes
            worst, middle = max(slower), statistics.median(slower)
            found.append(
                {
                    "link_bytes_per_s": speed,
                    "tokens": count,
                    "greedy_slower_by_at_most": worst,
                    "greedy_slower_by_median": middle,
                    "num_budgets": len(slower),
                    "floor_of_greedy_bytes": floors[0],
                    "floor_bytes": floors[1],
                }
            )
            print(
                f"h100, {speed / 1e9:.0f} GB/s, {count // 1024}K, {len(slower)} budgets: greedy is "
                f"slower by {100 * worst:.2f} % at most, {100 * middle:.2f} % in the middle; floor "
                f"{format_bytes(floors[0])} against {format_bytes(floors[1])}"
            )
    return found


def _fastest(plans: Sequence[Candidate], budget_bytes: int) -> float:
    """Seconds of the fastest plan within the budget; 0 when none fits."""
    steps = (plan.timeline.step_s for plan in plans if plan.live_bytes <= budget_bytes)
    return min(steps, default=0.0)


if __name__ == "__main__":
    raise SystemExit(main())
