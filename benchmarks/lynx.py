"""HEU on the layers of GPT shapes, and partition with policy for 175B over 16 stages.

Prints seconds (best of 3) and what the policies cost: HEU against recomputation on demand only and
against full recomputation. Run: python -m benchmarks.lynx
"""

import dataclasses
import platform
import time
from collections.abc import Callable
from typing import Any

from benchmarks.lynx_layers import describe_layer
from memo_compile.costs.hardware import find_hardware
from memo_compile.costs.models import find_model
from memo_compile.papers.layer_costs import Efficiency
from memo_compile.papers.lynx.heu import solve_heu
from memo_compile.papers.lynx.joint import JointProblem, plan_stages
from memo_compile.papers.lynx.lynx_instance import HeuInstance, LayerCosts

SHAPES = ("gpt-300m", "gpt-1.3b", "gpt-7b", "gpt-13b", "gpt-23b", "gpt-175b")
STATIC_BYTES_PER_PARAMETER = 18
"""Mixed precision with Adam: bfloat16 weight, float32 gradient, weight and two moments."""


def best_of_three(function: Callable[[], Any]) -> tuple[float, Any]:
    times = []
    for _ in range(3):
        started = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - started)
    return min(times), result


def layer(name: str, micro_batch: int) -> LayerCosts:
    return describe_layer(
        find_model(name),
        seq=2048,
        micro_batch=micro_batch,
        tp=8,
        hardware=find_hardware("a100"),
        efficiency=Efficiency(gemm=0.5, hbm=0.8),
    )


def run_layers() -> None:
    print("layer of 8 in a stage with 8 micro-batches; activations may take 30 % of keeping all")
    print("shape      HEU    split  on demand   full  of forward   solve    split")
    for name in SHAPES:
        costs = layer(name, micro_batch=4)
        kept = sum(m for m, need in zip(costs.ops.sizes, costs.need, strict=True) if need)
        instance = HeuInstance(
            ops=costs.ops,
            need=costs.need,
            windows=costs.windows,
            num_layers=8,
            num_batches=8,
            static=0,
            budget=0.3 * 64 * kept,
            forward_windows=True,
        )
        on_demand = dataclasses.replace(instance, windows=(0, 0, 0, 0))
        full_s = sum(costs.ops.times[:-1])
        seconds, heu = best_of_three(lambda i=instance: solve_heu(i))
        split_seconds, split = best_of_three(lambda i=instance: solve_heu(i, token_split=True))
        plain = solve_heu(on_demand)
        assert split.critical_time <= heu.critical_time * (1 + 1e-6)
        assert heu.critical_time <= plain.critical_time <= full_s
        parts = (heu.critical_time, split.critical_time, plain.critical_time, full_s)
        shown = "  ".join(f"{1e3 * part:6.2f}" for part in (*parts, costs.forward_s))
        print(f"{name:9} {shown} ms  {seconds:.3f} s  {split_seconds:.3f} s")


def run_stages() -> None:
    shape = find_model("gpt-175b")
    costs = layer("gpt-175b", micro_batch=1)
    static = STATIC_BYTES_PER_PARAMETER * shape.layer_parameters / 8
    print("\n96 layers of 175B over 16 stages, tp 8, 64 micro-batches")
    for gib in (28, 30, 34, 40, 80):
        for token_split in (False, True):
            seconds, plan = best_of_three(
                lambda g=gib, t=token_split: plan_stages(
                    JointProblem(
                        costs=costs,
                        num_layers=96,
                        num_stages=16,
                        num_batches=64,
                        layer_static=static,
                        budgets=(g * 2**30,) * 16,
                    ),
                    token_split=t,
                )
            )
            what = f"{1e3 * plan.slowest_s:.1f} ms {plan.layers}" if plan.layers else plan.conflict
            kind = "split" if token_split else "whole"
            print(f"{gib} GiB {kind}: {seconds:.2f} s, {what}")


def main() -> None:
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    run_layers()
    run_stages()


if __name__ == "__main__":
    main()
