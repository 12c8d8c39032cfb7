"""What the choice under a bound is worth: GPT-7B from 16K to 1M tokens, on the simulator.

Run: python -m benchmarks.policies [--quick]

Once more on h100 with the vocabularies of Llama 3 and of Gemma, whose logits are a part of the peak
that no choice about the layers changes.

Tensor parallel over 8 devices, budget 80 % of the device, 250 GB of host memory for each; copies
at the link's nominal speed and at 12 GB/s, which MEMO's own tables imply. Policies: auto, greedy,
memo, full-recompute, full-offload, save. Peaks are bytes alive, as a perfect placement would reach.
Then, on one device, the whole frontier: over all budgets, how much slower greedy's plans alone are.
The exit code is 1 when another policy that fits is faster than auto.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from benchmarks import harness
from benchmarks.layer_steps import (
    GEMM_EFFICIENCY,
    HBM_EFFICIENCY,
    Setting,
    gpt_step,
    place_live,
    recompute_of,
)
from memo_compile.costs.hardware import find_hardware
from memo_compile.costs.models import find_model
from memo_compile.errors import Infeasible
from memo_compile.planners.policy import choose
from memo_compile.planners.policy.candidates import Candidate, CandidateSource
from memo_compile.planners.policy.chooser import unbeaten
from memo_compile.units import format_bytes, format_seconds

SHAPE = find_model("gpt-7b")
POLICIES = ("auto", "greedy", "memo", "full-recompute", "full-offload", "save")
DEVICES = ("h200", "h100", "a800")
SLOW_LINK_BYTES_PER_S = 12e9
TOKENS = tuple(1024 * 2**power for power in range(4, 11))
VOCABULARIES = (128256, 256000)
"""Of Llama 3 and Gemma; GPT's own has 50,257 words."""
TP = 8
BUDGET_SHARE = 0.8
HOST_BYTES = 250 * 10**9
TOLERANCE = 1e-3
"""Relative: auto's order of preference also weighs seconds of copying, at 1e-4 each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy in one setting; no step where it does not fit."""

    vocab: int
    device: str
    link_bytes_per_s: float
    tokens: int
    policy: str
    step_s: float | None
    stall_s: float | None
    peak_bytes: int | None
    host_bytes: int | None
    planning_s: float


def main() -> int:
    """Run all settings, print the tables, write the results, judge auto."""
    parser = harness.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="h100 at 64K and 256K only")
    return harness.run_benchmark("policies", parser.parse_args(), measure, measure)


def measure(options: argparse.Namespace) -> dict[str, object]:
    """The rows of all settings, what the solver gains, and where auto is not the fastest."""
    rows = []
    for setting in _settings(options.quick):
        rows += [_run(setting, policy) for policy in POLICIES]
        print(_case(rows[-1]), file=sys.stderr, flush=True)
    show(rows)
    failures = judge(rows)
    gains = solver_gains(rows)
    frontier = frontier_gains((65536,) if options.quick else (32768, 65536, 131072, 524288))
    return {
        "settings": {
            "model": SHAPE.name,
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


def _settings(quick: bool) -> Iterator[Setting]:
    kinds = [(device, SHAPE.vocab) for device in (("h100",) if quick else DEVICES)]
    for device, vocab in [*kinds, *(("h100", vocab) for vocab in VOCABULARIES)]:
        for speed in (find_hardware(device).d2h_bytes_per_s, SLOW_LINK_BYTES_PER_S):
            for tokens in (65536, 262144) if quick else TOKENS:
                yield _setting(device, speed, tokens, vocab)


def _setting(device: str, speed: float, tokens: int, vocab: int = SHAPE.vocab) -> Setting:
    return Setting(
        shape=replace(SHAPE, vocab=vocab),
        seq=tokens,
        tp=TP,
        hardware=find_hardware(device),
        copy_bytes_per_s=speed,
    )


def _run(setting: Setting, policy: str) -> Row:
    step = gpt_step(setting)
    start = time.perf_counter()
    step_s = stall_s = peak_bytes = host_bytes = None
    try:
        choice = choose(
            step,
            budget_bytes=int(setting.hardware.memory_bytes * BUDGET_SHARE),
            host_budget_bytes=HOST_BYTES,
            policy=policy,
            recompute=recompute_of(step),
            place=place_live,
        )
    except Infeasible:
        pass
    else:
        step_s, stall_s = choice.timeline.step_s, choice.timeline.stall_s
        peak_bytes, host_bytes = choice.plan.peak_bytes, choice.problem.host_bytes
    return Row(
        vocab=setting.shape.vocab,
        device=setting.hardware.name,
        link_bytes_per_s=setting.copy_bytes_per_s,
        tokens=setting.seq,
        policy=policy,
        step_s=step_s,
        stall_s=stall_s,
        peak_bytes=peak_bytes,
        host_bytes=host_bytes,
        planning_s=round(time.perf_counter() - start, 3),
    )


class Case(NamedTuple):
    """What a row was planned for."""

    vocab: int
    device: str
    link_bytes_per_s: float
    tokens: int

    def __str__(self) -> str:
        link = f"copies at {self.link_bytes_per_s / 1e9:.0f} GB/s"
        return f"{self.vocab} words, {self.device}, {link}, {self.tokens // 1024}K tokens"


def _case(row: Row) -> Case:
    return Case(row.vocab, row.device, row.link_bytes_per_s, row.tokens)


def _by_case(rows: Sequence[Row]) -> dict[Case, dict[str, Row]]:
    found: dict[Case, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(_case(row), {})[row.policy] = row
    return found


def show(rows: Sequence[Row]) -> None:
    """One table for each vocabulary, device and link: the step, and auto's seconds of planning."""
    cases = _by_case(rows)
    for shared, members in itertools.groupby(cases, key=lambda case: case[:3]):
        lines = []
        for case in members:
            policies = cases[case]
            steps = [policies[policy].step_s for policy in POLICIES]
            cells = [
                "does not fit" if step_s is None else format_seconds(step_s) for step_s in steps
            ]
            lines.append(
                [f"{case.tokens // 1024}K", *cells, f"{policies['auto'].planning_s:.1f} s"]
            )
        vocab, device, speed = shared
        title = (
            f"GPT-7B, {vocab} words, tp {TP}, {device}, copies at {speed / 1e9:.0f} GB/s: "
            "simulated step"
        )
        harness.print_table(title, ("tokens", *POLICIES, "planning"), lines)


def judge(rows: Sequence[Row]) -> list[str]:
    """Where another policy that fits is faster than auto, or fits where auto does not."""
    failures = []
    for case, policies in _by_case(rows).items():
        auto = policies["auto"].step_s
        for policy, row in policies.items():
            slower = auto is None or (row.step_s or 0) < auto * (1 - TOLERANCE)
            if row.step_s is not None and slower:
                failures.append(f"{case}: {policy} {row.step_s}, auto {auto}")
    return failures


def solver_gains(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Where auto, which has the program's plans too, beats greedy, and by how much of the step."""
    gains: list[dict[str, object]] = []
    cases = _by_case(rows)
    for case, policies in cases.items():
        auto, greedy = policies["auto"].step_s, policies["greedy"].step_s
        if auto is None:
            continue
        share = None if greedy is None else greedy / auto - 1
        if share is None or share > TOLERANCE:
            gains.append({**case._asdict(), "greedy_slower_by": share})
            text = "does not fit" if share is None else f"is {100 * share:.2f} % slower"
            print(f"{case}: greedy {text}")
    print(f"the program beats greedy in {len(gains)} of {len(cases)} settings")
    return gains


def frontier_gains(tokens: Sequence[int]) -> list[dict[str, object]]:
    """Per link and length: over all budgets, how much slower greedy alone is."""
    found: list[dict[str, object]] = []
    for speed in (find_hardware("h100").d2h_bytes_per_s, SLOW_LINK_BYTES_PER_S):
        for count in tokens:
            step = gpt_step(_setting("h100", speed, count))
            source = CandidateSource(
                step=step, recompute=recompute_of(step), host_budget_bytes=HOST_BYTES
            )
            all_plans = unbeaten(source.plans(*source.all), HOST_BYTES)
            greedy = unbeaten([*source.plans(*source.quick), *source.named("save")], HOST_BYTES)
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
