"""Trains the demo's model with float8 activations: ``python -m benchmarks.saved_float8``.

Runs of 200 steps on Python's own source from three seeds, as they are and with
``saved_dtype="float8"`` under the smallest budget that keeps all saved activations. It passes if
float8 moves the mean loss of the last fifth by no more than seeds do.
"""

import argparse
import statistics
import sys
from typing import Any

from benchmarks import harness
from memo_compile.units import format_bytes

sys.path.insert(0, str(harness.ROOT / "examples"))

SIZES = {"layers": 4, "hidden": 128, "tokens": 256, "batch": 4, "steps": 200}
SEEDS = 3
LAST = 5
"""The last fifth of the steps is compared."""


def main() -> int:
    """Train all runs, print and write the losses, judge."""
    return harness.run_benchmark(
        "saved_float8", harness.parser(__doc__, sizes=SIZES).parse_args(), measure, None
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The losses of the runs, and the verdict."""
    rows: dict[str, list[dict[str, Any]]] = {"same": [], "float8": []}
    for seed in range(SEEDS):
        for dtype, runs in rows.items():
            run = train(options, seed=seed, saved_dtype=dtype)
            runs.append(run)
            arena = format_bytes(run["arena_bytes"])
            print(f"seed {seed} {dtype:7} loss {run['loss']:.4f}  arena {arena}", flush=True)
    exact, rounded = ([run["loss"] for run in runs] for runs in rows.values())
    moved = statistics.mean(rounded) - statistics.mean(exact)
    spread = max(exact) - min(exact)
    wrong = f"float8 moves the loss by {moved:.4f}, seeds by {spread:.4f}"
    return {
        "settings": {name: getattr(options, name) for name in SIZES},
        "rows": rows,
        "failures": [wrong] if moved > spread else [],
    }


def train(options: argparse.Namespace, *, seed: int, saved_dtype: str) -> dict[str, Any]:
    """Trains a model from ``seed``; every run sees the same text in the same order."""
    import torch
    from byte_llama import ByteLlama, ByteLlamaConfig
    from train_stdlib import batches, corpus

    import memo_compile
    from memo_compile.errors import Infeasible

    torch._dynamo.reset()
    torch.manual_seed(seed)
    config = ByteLlamaConfig(
        num_layers=options.layers, hidden=options.hidden, max_tokens=options.tokens
    )
    model, options.seed = ByteLlama(config), 0
    stream = batches(corpus(), options, torch.device("cpu"))
    settings = {"policy": "save", "saved_dtype": saved_dtype, "costs": "roofline"}
    first = next(stream)
    try:
        torch.compile(model, backend="memo", options={**settings, "memory_budget": 1})(*first)
    except Infeasible as error:
        settings["memory_budget"] = error.floor_bytes
    torch._dynamo.reset()
    step = torch.compile(model, backend="memo", options=settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(options.steps):
        loss = step(*next(stream))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    plan = memo_compile.report().plans[-1]
    return {
        "loss": statistics.mean(losses[-max(1, options.steps // LAST) :]),
        "arena_bytes": plan.arena_bytes,
        "rounded": [row.tensor for row in plan.decisions if "_float8" in row.tensor],
    }


if __name__ == "__main__":
    sys.exit(main())
