"""A step of several graphs under one budget, kept: ``python -m benchmarks.pieces``.

* breaks: a stack that graph breaks cut into pieces, in one process
* ddp: DistributedDataParallel on two gloo ranks, which cuts the graph at its gradient buckets
* fsdp: ``fully_shard`` on two gloo ranks, each block compiled by itself

For each, where everything is kept and at a budget of BELOW of that: the physical peak of steps from
the fourth on (the first is watched) must be at most 1.01 times what was planned, on each rank. The
budget is below the sum of what the graphs need by themselves.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import harness
from memo_compile.units import format_bytes

MODULE = "benchmarks.pieces"
SIZES = {"layers": 6, "hidden": 256, "rows": 2048}
ARMS = ("breaks", "ddp", "fsdp")
NUM_STEPS = 3
MAX_PEAK_OVER_BUDGET = 1.01
ANY_BYTES = 2**40
BELOW = 0.8
BUCKET_MB = 2


def main() -> int:
    """Run every arm, print the table, write the results, judge."""
    options = harness.parser(__doc__, sizes=SIZES).parse_args()
    return harness.run_benchmark("pieces", options, measure, run_child)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All arms, and the verdict."""
    shared = harness.passed_on(options, *SIZES)
    results: dict[str, Any] = {}
    for name in ARMS:
        print(name, file=sys.stderr, flush=True)
        arm = harness.Arm(name=name, arguments=(f"--child={name}", *shared))
        results[name] = harness.run_arm(MODULE, arm)["ranks"]
    harness.print_table(
        "steps of several graphs",
        ("arm", "graphs", "sum of their own", "budget", "planned", "most measured", "of planned"),
        [table_row(name, ranks, at) for name, ranks in results.items() for at in range(2)],
    )
    settings = {name: getattr(options, name) for name in SIZES}
    return {"settings": settings, "arms": results, "failures": list(judge(results))}


def table_row(name: str, ranks: list[dict[str, Any]], at: int) -> list[str]:
    found = ranks[0]["runs"][at]
    most = max(rank["runs"][at]["peak_bytes"] for rank in ranks)
    sizes = (found["planned_bytes"], most)
    budget = "any" if at == 0 else format_bytes(found["budget_bytes"])
    count, total = str(ranks[0]["num_graphs"]), format_bytes(ranks[0]["sum_bytes"])
    ratio = f"{most / found['planned_bytes']:.3f}"
    return [name, count, total, budget, *map(format_bytes, sizes), ratio]


def judge(results: dict[str, Any]) -> list[str]:
    """What does not hold."""
    failures = []
    for name, ranks in results.items():
        for number, rank in enumerate(ranks):
            for run in rank["runs"]:
                bound = min(run["budget_bytes"], run["planned_bytes"])
                if run["peak_bytes"] > MAX_PEAK_OVER_BUDGET * bound:
                    failures.append(f"{name}, rank {number}: {run['peak_bytes']} > {bound}")
                if run["unplanned"]:
                    failures.append(f"{name}, rank {number}: forwards ran without a plan")
            if name != "fsdp" and rank["runs"][-1]["budget_bytes"] >= rank["sum_bytes"]:
                failures.append(f"{name}: no budget is below the sum of the graphs' own peaks")
    return failures


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """One arm; what each of its ranks found."""
    sizes = (options.layers, options.hidden, options.rows)
    if options.child == "breaks":
        return {"ranks": [budgets(lambda budget: broken(*sizes, budget))]}
    return harness.result_of_ranks(run_rank, options.child, *sizes)


def run_rank(rank: int, folder: str, arm: str, *sizes: int) -> None:
    """One of two ranks."""
    make = parallel if arm == "ddp" else sharded
    with harness.joined_ranks(rank, folder):
        found = budgets(lambda budget: make(*sizes, budget))
        (Path(folder) / f"found{rank}.json").write_text(json.dumps(found))


Make = Callable[[int], tuple[Any, Any, Any]]
"""A model, how it runs, and its input, for a budget."""


def budgets(make: Make) -> dict[str, Any]:
    """The runs of one arm on one rank, in one process."""
    import memo_compile

    everything = run(make, ANY_BYTES)
    report = memo_compile.report()
    own = [plan.peak_bytes for plan in report.plans]
    budget = int(BELOW * everything["planned_bytes"])
    return {
        "num_graphs": report.groups[-1].num_instances,
        "sum_bytes": sum(own),
        "runs": [everything, run(make, budget)],
    }


def run(make: Make, budget: int) -> dict[str, Any]:
    """Steps under ``budget``, and their physical peak."""
    import gc

    import memo_compile

    model, step, x = fresh(make, budget)
    for _ in range(3):
        model.zero_grad()
        step(x).backward()
    model.zero_grad()
    gc.collect()
    before = memo_compile.report().unplanned_steps
    held = sum(local(parameter).nbytes for parameter in model.parameters()) + x.nbytes
    with harness.physical_peak("cpu", held) as peak:
        for _ in range(NUM_STEPS):
            step(x).backward()
            model.zero_grad()
    report = memo_compile.report()
    (group,) = report.groups
    return {
        "budget_bytes": budget,
        "planned_bytes": group.peak_bytes,
        "peak_bytes": peak.peak_bytes,
        "unplanned": report.unplanned_steps - before,
        "offloaded_bytes": group.offloaded_bytes,
        "recomputed_bytes": group.recomputed_bytes,
    }


def fresh(make: Make, budget: int) -> tuple[Any, Any, Any]:
    import gc

    import torch

    from memo_compile.reporting import state

    torch._dynamo.reset()
    gc.collect()
    state.reset()
    return make(budget)


def local(parameter: Any) -> Any:
    """This rank's part of it."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def memo_settings(budget: Any) -> dict[str, Any]:
    """The arguments of torch.compile for a plan under ``budget``."""
    options = {
        "lowering": "aten",
        "strict": True,
        "optimizer_state_bytes_per_parameter": 0,
        "memory_budget": budget,
        "costs": "roofline",
    }
    return {"backend": "memo", "options": options}


def stack(num_layers: int, hidden: int, num_parts: int = 1) -> Any:
    """Equal residual layers, with breaks between parts of them; returns the loss."""
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(hidden)
            self.up = nn.Linear(hidden, 2 * hidden)
            self.down = nn.Linear(2 * hidden, hidden)

        def forward(self, x: Any) -> Any:
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

        def forward(self, x: Any) -> Any:
            # Written out: a break inside of a loop makes Dynamo compile each layer instead.
            size = num_layers // num_parts
            for layer in self.layers[:size]:
                x = layer(x)
            if num_parts > 1:
                torch._dynamo.graph_break()
            for layer in self.layers[size : 2 * size]:  # none of a single part
                x = layer(x)
            if num_parts > 1:
                torch._dynamo.graph_break()
            for layer in self.layers[2 * size :]:
                x = layer(x)
            return x.pow(2).mean()

    torch.manual_seed(0)
    return Stack()


def broken(num_layers: int, hidden: int, rows: int, budget: int) -> tuple[Any, Any, Any]:
    """Three pieces between graph breaks."""
    import torch

    torch.set_num_threads(1)
    model = stack(num_layers, hidden, num_parts=3)
    return model, torch.compile(model, **memo_settings(budget)), torch.randn(rows, hidden)


def parallel(num_layers: int, hidden: int, rows: int, budget: int) -> tuple[Any, Any, Any]:
    """DistributedDataParallel, compiled as it is by default."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(stack(num_layers, hidden), bucket_cap_mb=BUCKET_MB)
    return model, torch.compile(model, **memo_settings(budget)), torch.randn(rows, hidden)


def sharded(num_layers: int, hidden: int, rows: int, budget: int) -> tuple[Any, Any, Any]:
    """FSDP2, block by block."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = stack(num_layers, hidden), init_device_mesh("cpu", (2,))
    for layer in model.layers:
        layer.compile(**memo_settings(budget))
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, model, torch.randn(rows, hidden)


if __name__ == "__main__":
    raise SystemExit(main())
