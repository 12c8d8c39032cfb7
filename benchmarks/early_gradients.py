"""Gradients that leave while the backward runs: ``python -m benchmarks.early_gradients``.

A stack of equal layers on few rows, so that its gradients are most of what a step needs. For each
way to use gradients, with ``early_gradients`` on and off, in processes of their own: the floor that
memo names, and the physical peak of a step under it as budget.

* accumulate: every step adds to gradients that exist
* in-hooks: SGD in ``register_post_accumulate_grad_hook``, which frees each gradient

Then DistributedDataParallel on two gloo ranks over a link that is slowed down by a sleep, with
``optimize_ddp=False``; steps with and without early gradients take turns.

It passes when floor and measured peak fall by all gradients but the largest part's, less 2 % of the
gradients (a floor falls by more, since the slack for the heap is a share of it); when no measured
peak exceeds its budget by more than 1 %; and when a step over the slowed link is shorter by 0.6 of
the communication.
"""

import argparse
import json
import queue
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.pieces import memo_settings, stack
from memo_compile.units import format_bytes

MODULE = "benchmarks.early_gradients"
SIZES = {"layers": 32, "hidden": 384, "rows": 64, "ddp-layers": 12, "ddp-rows": 1024}
WAYS = ("accumulate", "in-hooks")
NUM_STEPS = 3
NUM_TURNS = 5
COMMUNICATION_OF_BACKWARD = 0.5
"""How long all gradients are on the link, as a part of a backward's seconds."""
MAX_OFF = 0.02
MAX_OVER_BUDGET = 1.01
MIN_HIDDEN = 0.6


def main() -> int:
    """Run every arm, print the table, write the results, judge."""
    options = harness.parser(__doc__, sizes=SIZES).parse_args()
    return harness.run_benchmark("early_gradients", options, measure, run_child)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All arms, and the verdict."""
    shared = harness.passed_on(options, *SIZES)
    results = {}
    for name in [f"{way}-{switch}" for way in WAYS for switch in ("on", "off")] + ["ddp"]:
        print(name, file=sys.stderr, flush=True)
        arm = harness.Arm(name=name, arguments=(f"--child={name}", *shared))
        results[name] = harness.run_arm(MODULE, arm)
    show(results)
    settings = {name: getattr(options, name.replace("-", "_")) for name in SIZES}
    return {"settings": settings, "arms": results, "failures": judge(results)}


def judge(results: dict[str, dict[str, Any]]) -> list[str]:
    """What does not hold."""
    failures = []
    for way in WAYS:
        on, off = results[f"{way}-on"], results[f"{way}-off"]
        expected = on["gradient_bytes"] - on["largest_part_bytes"]
        for what in ("floor_bytes", "peak_bytes"):
            gained = off[what] - on[what]
            if not expected - MAX_OFF * on["gradient_bytes"] <= gained <= on["gradient_bytes"]:
                failures.append(f"{way}: {what} falls by {gained}, expected {expected}")
        for name, arm in ((f"{way}-on", on), (f"{way}-off", off)):
            if arm["peak_bytes"] > MAX_OVER_BUDGET * arm["floor_bytes"]:
                failures.append(f"{name}: peak {arm['peak_bytes']} > budget {arm['floor_bytes']}")
    if results["ddp"]["hidden"] < MIN_HIDDEN:
        failures.append(f"ddp: {results['ddp']['hidden']:.2f} of the communication is hidden")
    return failures


def show(results: dict[str, dict[str, Any]]) -> None:
    """The tables."""
    harness.print_table(
        "peaks",
        ("arm", "gradients", "largest part", "floor = budget", "measured"),
        [
            [name, *(format_bytes(arm[key]) for key in _BYTES)]
            for name, arm in results.items()
            if name != "ddp"
        ],
    )
    ddp = results["ddp"]
    harness.print_table(
        "two ranks over a slowed link",
        ("step, at the end", "step, early", "communication", "hidden"),
        [[*(f"{ddp[key]:.3f} s" for key in ("off_s", "on_s", "link_s")), f"{ddp['hidden']:.2f}"]],
    )


_BYTES = ("gradient_bytes", "largest_part_bytes", "floor_bytes", "peak_bytes")


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """One arm."""
    if options.child == "ddp":
        return run_ddp(options)
    way, _, switch = options.child.rpartition("-")
    import torch

    torch.set_num_threads(1)
    model = stack(options.layers, options.hidden)
    gradient_bytes = sum(p.nbytes for p in model.parameters())
    early = switch == "on"
    x = torch.randn(options.rows, options.hidden)
    if way == "in-hooks":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step_and_free)
    else:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    floor = harness.floor_of(lambda: compiled(model, early, "1MiB")(x))
    torch._dynamo.reset()
    run = compiled(model, early, floor)
    for _ in range(2):
        run(x).backward()
    held = harness.held_bytes(model, None, [x])
    with harness.physical_peak("cpu", held) as peak:
        for _ in range(NUM_STEPS):
            run(x).backward()
    return {
        "gradient_bytes": gradient_bytes,
        "largest_part_bytes": sum(p.nbytes for p in model.layers[0].parameters()),
        "floor_bytes": floor,
        "planned_bytes": harness.memo_plan().peak_bytes,
        "peak_bytes": peak.peak_bytes,
    }


def step_and_free(parameter: Any) -> None:
    """SGD without state, which needs no memory of its own."""
    import torch

    with torch.no_grad():
        parameter.add_(parameter.grad, alpha=-1e-3)
    parameter.grad = None


def compiled(model: Any, early: bool, budget: Any) -> Any:
    """``model`` through memo."""
    import torch

    settings = memo_settings(budget)
    settings["options"]["early_gradients"] = early
    return torch.compile(model, **settings)


def run_ddp(options: argparse.Namespace) -> dict[str, Any]:
    """Two ranks, each a process; what rank 0 found."""
    sizes = (options.ddp_layers, options.hidden, options.ddp_rows)
    return dict(harness.result_of_ranks(run_rank, *sizes)["ranks"][0])


def run_rank(rank: int, folder: str, *sizes: int) -> None:
    """Writes what one rank measured."""
    with harness.joined_ranks(rank, folder):
        found = steps_in_turns(*sizes)
        (Path(folder) / f"found{rank}.json").write_text(json.dumps(found))


def steps_in_turns(num_layers: int, hidden: int, rows: int) -> dict[str, Any]:
    """Steps of this rank with and without early gradients in turns: medians, and all seconds."""
    import torch
    import torch.distributed as dist

    torch._dynamo.config.optimize_ddp = False
    link, x = SlowLink(), torch.randn(rows, hidden)
    models = {}
    for early in (True, False):
        model = stack(num_layers, hidden)
        parallel = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=2)
        parallel.register_comm_hook(None, lambda state, bucket: link.reduce(bucket))
        models["on_s" if early else "off_s"] = compiled(parallel, early, None)
    times: dict[str, list[float]] = {name: [] for name in (*models, "backward_s")}
    for turn in range(-4, NUM_TURNS):  # warm up; set the link's speed; then measure
        for name, model in models.items():
            model.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            loss = model(x)
            forward_s = time.perf_counter() - start
            loss.backward()
            step_s = time.perf_counter() - start
            if turn >= 0:
                times[name].append(step_s)
            elif turn >= -2 and not link.s_per_byte:
                times["backward_s"].append(step_s - forward_s)
        if turn == -2:
            link.set_speed(min(times["backward_s"]), sum(p.nbytes for p in model.parameters()))
    found = {name: statistics.median(times[name]) for name in models}
    link_s = link.s_per_byte * sum(p.nbytes for p in model.parameters())
    found |= {"link_s": link_s, "hidden": (found["off_s"] - found["on_s"]) / link_s}
    dist.barrier()
    link.close()
    return {**found, "rounds": times}


class SlowLink:
    """All-reduces buckets one after the other, on a thread that sleeps as long as a link takes."""

    def __init__(self) -> None:
        self.s_per_byte = 0.0
        self._waiting: queue.Queue[Any] = queue.Queue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def set_speed(self, backward_s: float, num_bytes: int) -> None:
        """All ranks agree on one speed, by which ``num_bytes`` take a part of a backward."""
        import torch
        import torch.distributed as dist

        seconds = torch.tensor([COMMUNICATION_OF_BACKWARD * backward_s])
        dist.broadcast(seconds, 0)
        self.s_per_byte = float(seconds) / num_bytes

    def reduce(self, bucket: Any) -> Any:
        """What a communication hook of DistributedDataParallel returns."""
        import torch

        done: Any = torch.futures.Future()
        self._waiting.put((bucket.buffer(), done))
        return done

    def close(self) -> None:
        """Nothing is reduced any more."""
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        import torch.distributed as dist

        while (found := self._waiting.get()) is not None:
            buffer, done = found
            time.sleep(buffer.nbytes * self.s_per_byte)
            dist.all_reduce(buffer.div_(2))
            done.set_result(buffer)


if __name__ == "__main__":
    raise SystemExit(main())
