"""Even pipeline stages beside memo's split: ``python -m benchmarks.pipeline_split``.

A language model with a large vocabulary on two gloo ranks, one thread each, 1F1B. Both splits train
in the same processes and take turns, step by step: once without a budget, and once under one of
BUDGET times the peak of the split without. Printed are what ``memo_compile.pipeline_split``
predicts of the slowest stage, the processor seconds of the slowest rank for a microbatch, what a
step takes, and the ratios. Processor seconds do not count what a rank waits for others, on the
network or for a core; a step is shorter only where each rank has a core of its own.

It passes when the slowest rank of memo's split takes no longer than that of the even split, and
when the prediction says so too. An even split that the budget does not allow is said, and no ratio
counts.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import harness
from memo_compile.units import format_bytes, format_seconds

MODULE = "benchmarks.pipeline_split"
SIZES = {
    "layers": 6,
    "hidden": 256,
    "tokens": 256,
    "vocab": 8192,
    "microbatches": 8,
    "turns": 9,
}
NUM_RANKS = 2
WARM_UP = 3
BUDGET = 0.95
"""Of the larger peak without a budget: parameters and what torch keeps fit, and some more."""


def main() -> int:
    """Both rows, the table, the results, the verdict."""
    parser = harness.parser(__doc__, sizes=SIZES)
    parser.add_argument("--budget", type=int, default=0, help=argparse.SUPPRESS)
    return harness.run_benchmark("pipeline_split", parser.parse_args(), measure, run_child)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both rows, and what does not hold."""
    rows: list[dict[str, Any]] = []
    budget = 0
    for name in ("no budget", "budget"):
        print(name, file=sys.stderr, flush=True)
        shared = harness.passed_on(options, *SIZES)
        arm = harness.Arm(name=name, arguments=("--child=row", *shared, f"--budget={budget}"))
        found = harness.run_arm(MODULE, arm)
        if "floor_bytes" in found:
            print(f"no split fits {format_bytes(budget)}: {format_bytes(found['floor_bytes'])} do")
            continue
        rows.append({"name": name, "budget_bytes": budget, **found})
        budget = int(BUDGET * max(found["peaks"]["memo"]))
        show(rows[-1])
    settings = {name: getattr(options, name) for name in SIZES}
    return {"settings": settings, "rows": rows, "failures": judge(rows)}


def judge(rows: list[dict[str, Any]]) -> list[str]:
    """What does not hold."""
    failures = []
    for row in rows:
        for what in ("predicted_s", "processor_s"):
            ours, even = row[what]["memo"], row[what].get("even")
            if even is not None and ours > even:
                failures.append(f"{row['name']}: {what} {ours:.4f} of memo's split > {even:.4f}")
    return failures


def show(row: dict[str, Any]) -> None:
    """One row as a table."""
    budget = format_bytes(row["budget_bytes"]) if row["budget_bytes"] else "no budget"
    lines = []
    for name in ("even", "memo"):
        if name not in row["step_s"]:
            lines.append([name, str(row["layers"][name]), "does not fit", "", "", ""])
            continue
        lines.append(
            [
                name,
                str(row["layers"][name]),
                *(format_seconds(row[key][name]) for key in _SECONDS),
                ", ".join(map(format_bytes, row["peaks"][name])),
            ]
        )
    columns = ("split", "layers", "slowest, predicted", "processor", "step", "peaks, planned")
    harness.print_table(f"two ranks, {budget}", columns, lines)
    if "even" in row["step_s"]:
        ratios = (row[key]["memo"] / row[key]["even"] for key in _SECONDS)
        text = "memo's over the even one: predicted {:.3f}, processor {:.3f}, step {:.3f}"
        print(text.format(*ratios))


_SECONDS = ("predicted_s", "processor_s", "step_s")


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """One row: all ranks, each a process; what rank 0 found."""
    return dict(harness.result_of_ranks(run_rank, options)["ranks"][0])


def run_rank(rank: int, folder: str, options: argparse.Namespace) -> None:
    """Writes what one rank measured."""
    with harness.joined_ranks(rank, folder):
        found = splits_in_turns(options)
        (Path(folder) / f"found{rank}.json").write_text(json.dumps(found))


def splits_in_turns(options: argparse.Namespace) -> dict[str, Any]:
    """Steps of both splits in turns on this rank; the floor where no split fits the budget."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy

    import memo_compile
    from memo_compile.errors import Infeasible

    ids = torch.randint(options.vocab, (options.microbatches, options.tokens))

    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits.flatten(0, 1), target.flatten())

    budget: dict[str, Any] = {"optimizer_state_bytes_per_parameter": 0}
    if options.budget:
        budget["memory_budget"] = options.budget
    try:
        split = memo_compile.pipeline_split(
            model_of(options),
            NUM_RANKS,
            (ids[:1],),
            num_microbatches=options.microbatches,
            loss_fn=loss,
            mb_target=ids[:1],
            **budget,
        )
    except Infeasible as error:
        return {"floor_bytes": error.floor_bytes}
    stages = {"memo": split.stages, "even": split.even}
    fitting = [name for name, split in stages.items() if all(stage.seconds for stage in split)]
    schedules = {
        name: scheduled(options, loss, [int(stage.begins_at) for stage in stages[name][1:]], budget)
        for name in fitting
    }
    times = in_turns(schedules, ids, options.turns)
    of_ranks: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(of_ranks, times)
    return {
        "step_s": {name: statistics.median(split["step"]) for name, split in times.items()},
        "processor_s": {
            name: max(statistics.median(rank[name]["processor"]) for rank in of_ranks)
            / options.microbatches
            for name in fitting
        },
        "rounds": of_ranks,
        "predicted_s": {
            name: max(stage.seconds or 0.0 for stage in stages[name]) for name in fitting
        },
        "layers": {name: [stage.num_layers for stage in split] for name, split in stages.items()},
        "peaks": {name: [stage.peak_bytes for stage in stages[name]] for name in fitting},
    }


def in_turns(
    schedules: dict[str, Any], ids: Any, num_turns: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of the steps of each schedule, all ranks together, and of this rank's processor."""
    import torch.distributed as dist

    is_first, is_last = dist.get_rank() == 0, dist.get_rank() == NUM_RANKS - 1
    times: dict[str, dict[str, list[float]]] = {
        name: {"step": [], "processor": []} for name in schedules
    }
    for turn in range(-WARM_UP, num_turns):
        for name, schedule in schedules.items():
            dist.barrier()
            start, began = time.perf_counter(), time.process_time()
            schedule.step(*((ids,) if is_first else ()), **({"target": ids} if is_last else {}))
            processor_s = time.process_time() - began
            dist.barrier()
            if turn >= 0:
                times[name]["step"].append(time.perf_counter() - start)
                times[name]["processor"].append(processor_s)
    return times


def scheduled(
    options: argparse.Namespace, loss: Any, points: list[int], budget: dict[str, Any]
) -> Any:
    """This rank's stage of the model that is cut at ``points``, under memo."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    import memo_compile

    model, rank = model_of(options), dist.get_rank()
    borders = [0, *points, len(model)]
    part = model[borders[rank] : borders[rank + 1]]
    stage = PipelineStage(part, rank, NUM_RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, options.microbatches, loss_fn=loss)
    return memo_compile.pipeline(schedule, **budget)


def model_of(options: argparse.Namespace) -> Any:
    """An embedding, residual layers of attention and MLP, a norm and a head: a Sequential."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Layer(nn.Module):
        """One layer; heads of 64."""

        def __init__(self, hidden: int) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
            self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
            self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows, tokens, hidden = x.shape
            heads = self.qkv(self.norms[0](x)).view(rows, tokens, 3, hidden // 64, 64)
            q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, hidden))
            return x + self.down(functional.gelu(self.up(self.norms[1](x))))

    torch.manual_seed(0)
    hidden = options.hidden
    layers = (Layer(hidden) for _ in range(options.layers))
    head = (nn.LayerNorm(hidden), nn.Linear(hidden, options.vocab, bias=False))
    return nn.Sequential(nn.Embedding(options.vocab, hidden), *layers, *head)


if __name__ == "__main__":
    sys.exit(main())
