"""HEU on the layers of GPT shapes, and partition with policy for 175B over 16 stages.

Prints seconds (best of 3) and what the policies cost: HEU against recomputation on demand only and
against full recomputation. Run: python -m benchmarks.lynx
"""

import dataclasses
import platform
import time
from collections.abc import Callable
from typing import Any

from memo_compile.costs.hardware import HardwareProfile, find_hardware
from memo_compile.costs.models import ELEMENT_BYTES, ModelShape, find_model
from memo_compile.errors import InputError, require_at_least
from memo_compile.papers.layer_costs import Efficiency
from memo_compile.papers.lynx.heu import solve_heu
from memo_compile.papers.lynx.joint import JointProblem, plan_stages
from memo_compile.papers.lynx.lynx_instance import (
    NUM_WINDOWS,
    SLICE_TOKENS,
    HeuInstance,
    LayerCosts,
    Operators,
    backward_seconds,
)

SHAPES = ("gpt-300m", "gpt-1.3b", "gpt-7b", "gpt-13b", "gpt-23b", "gpt-175b")
STATIC_BYTES_PER_PARAMETER = 18
"""Mixed precision with Adam: bfloat16 weight, float32 gradient, weight and two moments."""
LINK_EFFICIENCY = 0.6
"""Share of a link that a ring all-reduce of tens of megabytes reaches."""


def best_of_three(function: Callable[[], Any]) -> tuple[float, Any]:
    times = []
    for _ in range(3):
        started = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - started)
    return min(times), result


def describe_layer(
    shape: ModelShape,
    *,
    seq: int,
    micro_batch: int,
    tp: int,
    hardware: HardwareProfile,
    efficiency: Efficiency,
) -> LayerCosts:
    """One layer of ``shape`` on one of ``tp`` GPUs, as in Lynx's evaluation.

    Thirteen operators in execution order, of one micro-batch under tensor parallelism without
    sequence parallelism. Each of the two all-reduces opens a window in forward and in backward.

    The layer's output is the last operator and always kept: it is the next layer's input.

    Raises:
        InputError: a size is below 1, or tp does not divide the attention heads.
    """
    require_at_least(1, {"seq": seq, "micro-batch": micro_batch, "tp": tp})
    if shape.num_heads % tp:
        raise InputError(f"tp: {tp} does not divide the {shape.num_heads} attention heads")
    h, kv = shape.hidden, shape.hidden * shape.num_kv_heads // shape.num_heads
    f = shape.ffn
    wide = 2 * f if shape.gated else f
    # name, output elements per token, FLOPs per token, elements moved, inputs, backward reads it.
    rows: list[tuple[str, float, float, float, tuple[int, ...], bool]] = [
        ("norm1", h, 0, 2 * h, (), True),
        ("qkv", (h + 2 * kv) / tp, 2 * h * (h + 2 * kv) / tp, 0, (0,), True),
        ("attention", h / tp, 2 * h * seq / tp, 0, (1,), True),
        ("projection", h, 2 * h * h / tp, 0, (2,), False),
        ("reduce1", h, 0, 0, (3,), False),
        ("dropout1", h, 0, 2 * h, (4,), False),
        ("residual1", h, 0, 3 * h, (5,), True),
        ("norm2", h, 0, 2 * h, (6,), True),
        ("ffn_in", wide / tp, 2 * h * wide / tp, 0, (7,), True),
        ("activation", f / tp, 0, (wide + f) / tp, (8,), True),
        ("ffn_out", h, 2 * f * h / tp, 0, (9,), False),
        ("reduce2", h, 0, 0, (10,), False),
        ("residual2", h, 0, 3 * h, (6, 11), True),
    ]
    tokens = seq * micro_batch
    compute_rate = hardware.peak_flops_per_s * efficiency.gemm
    moved_rate = hardware.hbm_bytes_per_s * efficiency.hbm
    ring_bytes = 2 * (tp - 1) / tp * tokens * h * ELEMENT_BYTES
    window_s = ring_bytes / (hardware.link_bytes_per_s * LINK_EFFICIENCY)
    comm = frozenset(i for i, row in enumerate(rows) if row[0].startswith("reduce"))
    times = tuple(
        window_s
        if i in comm
        else tokens * (flops / compute_rate + moved * ELEMENT_BYTES / moved_rate)
        for i, (_, _, flops, moved, _, _) in enumerate(rows)
    )
    ops = Operators(
        times=times,
        sizes=tuple(round(tokens * row[1] * ELEMENT_BYTES) for row in rows),
        deps=tuple(row[4] for row in rows),
        comm=comm,
        whole=frozenset({2}),
        num_slices=0 if tokens % SLICE_TOKENS else tokens // SLICE_TOKENS,
    )
    return LayerCosts(
        ops=ops,
        need=tuple(row[5] for row in rows),
        windows=(window_s,) * NUM_WINDOWS,
        backward_s=backward_seconds(ops),
    )


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
