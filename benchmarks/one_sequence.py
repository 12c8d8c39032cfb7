"""Ulysses over a slow link, beside Inductor: ``python -m benchmarks.one_sequence``.

A Llama whose sequence is split over two ranks (gloo, CPU, one thread each): an all-to-all before
and after attention. Both arms, ``memo`` and ``inductor``, are the same model in the same two
processes, and take turns step by step.

The slow link is simulated, on a clock that other work on the machine does not move: a rank's is the
processor time of its thread, and what it has waited for the link. Tensors go through gloo as ever,
but an all-to-all is over when a link of so many bytes a second has carried it on that clock, after
those before it. What a rank waits for that is exposed. Both ranks compute as much, and each counts
a link of its own; it is busy for ``--part`` percent of Inductor's computation. While memo measures
it, the waits are slept through.

memo has ``--share`` percent of the memory that keeping everything takes, and nothing goes to the
host. It passes where it exposes at most 0.6 of what Inductor does: the median over pairs of steps.
Gradients are not reduced among ranks.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import harness
from memo_compile.units import format_bytes, format_seconds

MAX_EXPOSED, WARMUP = 0.6, 3
SIZES = {"layers": 4, "hidden": 256, "tokens": 1024, "samples": 15, "share": 80, "part": 25}
ARMS = ("memo", "inductor")
FIGURES = ("exposed_comm_s", "hidden_comm_s", "peak_bytes", "recomputed_bytes")


def main() -> int:
    """Run both arms in one pair of processes, print and judge what rank 0 saw."""
    options = harness.parser(__doc__, sizes=SIZES).parse_args()
    return harness.run_benchmark("one_sequence", options, measure, lambda _: {})


def measure(options: argparse.Namespace) -> dict[str, Any]:
    settings = {key: getattr(options, key) for key in SIZES}
    ranks = harness.result_of_ranks(run_rank, options)["ranks"]
    return {"settings": settings, "ranks": ranks, "failures": judge(ranks[0]), "note": ""}


def run_rank(rank: int, folder: str, options: argparse.Namespace) -> None:
    harness.register_memo()
    with harness.joined_ranks(rank, folder, backend=throttled_gloo()):
        measured = steps_in_turns(options, rank)
        (Path(folder) / f"found{rank}.json").write_text(json.dumps(measured))


class Link:
    """The slow link of this rank, and the clock that it goes by: the same for both arms."""

    bytes_per_s, sleeps = float("inf"), True  # on the wall's clock as well
    free_s, waited_s, num_bytes = 0.0, 0.0, 0

    @classmethod
    def now_s(cls) -> float:
        """Processor time of the thread that computes, and what it has waited for the link."""
        return time.thread_time() + cls.waited_s


def throttled_gloo() -> str:
    """Registers gloo, its all-to-alls behind ``Link``, as a backend; returns its name."""
    import torch.distributed as dist

    class SlowWork(dist.Work):
        def __init__(self, work: Any, num_bytes: int) -> None:
            super().__init__()
            Link.num_bytes += num_bytes
            Link.free_s = max(Link.free_s, Link.now_s()) + num_bytes / Link.bytes_per_s
            self.work, self.carried_s = work, Link.free_s

        def wait(self, *_timeout: Any) -> bool:
            self.work.wait()
            exposed_s = max(0.0, self.carried_s - Link.now_s())
            Link.waited_s += exposed_s
            if Link.sleeps:
                time.sleep(exposed_s)
            return True

    class SlowGroup(dist.ProcessGroup):
        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            super().__init__(rank, size)
            self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

        @property
        def group_name(self) -> str:
            return str(dist.distributed_c10d._get_process_group_name(self))

        def getBackendName(self) -> str:
            return "throttled_gloo"

        def alltoall_base(self, result: Any, x: Any, arriving: Any, leaving: Any, _: Any) -> Any:
            return SlowWork(self.gloo.alltoall_base(result, x, arriving, leaving), x.nbytes)

        def barrier(self, opts: Any = None) -> Any:
            return self.gloo.barrier()

    dist.Backend.register_backend("throttled_gloo", SlowGroup, devices=["cpu"])
    return "throttled_gloo"


def steps_in_turns(options: argparse.Namespace, rank: int) -> dict[str, Any]:
    """This rank's steps by arm, (seconds in all, exposed seconds), and what memo planned."""
    import torch

    given: dict[str, Any] = {"strict": True, "host_budget": 0, "cache": False}
    step, models = step_of(options, rank), {name: ulysses_llama(options) for name in ARMS}
    compiled = {"inductor": torch.compile(models["inductor"], fullgraph=True)}
    fast_s = statistics.median([step(compiled["inductor"])[0] for _ in range(2 * WARMUP)][WARMUP:])
    comm_bytes = Link.num_bytes // (2 * WARMUP)
    comm_s = fast_s * options.part / 100
    Link.bytes_per_s = comm_bytes / comm_s
    step(torch.compile(models["memo"], backend="memo", fullgraph=True, options=given))
    whole_bytes = harness.memo_plan().peak_bytes
    given = {**given, "memory_budget": whole_bytes * options.share // 100}
    compiled["memo"] = torch.compile(models["memo"], backend="memo", fullgraph=True, options=given)
    for _ in range(WARMUP):  # memo measures the slow link
        step(compiled["memo"])
    Link.sleeps = False
    steps: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    for number in range(options.samples):
        for arm in ARMS if number % 2 else reversed(ARMS):
            steps[arm].append(step(compiled[arm]))
    exposed = zip(*([exposed_s for _, exposed_s in steps[arm]] for arm in ARMS), strict=True)
    return {
        "comm_s": comm_s,
        "exposed_ratio": statistics.median(memo_s / inductor_s for memo_s, inductor_s in exposed),
        "gradient_error": harness.gradient_error(*models.values()),
        "whole_bytes": whole_bytes,
        **{key: getattr(harness.memo_plan(), key) for key in FIGURES},
        "steps_s": steps,
    }


def step_of(options: argparse.Namespace, rank: int) -> Callable[[Any], tuple[float, float]]:
    """Returns what runs a step of this rank's tokens: it returns its seconds, and those exposed."""
    import torch
    import torch.distributed as dist

    whole = torch.randint(1024, (1, options.tokens), generator=torch.Generator().manual_seed(1))
    ids = whole.chunk(2, dim=1)[rank].contiguous()
    positions = torch.arange(options.tokens)[None].chunk(2, dim=1)[rank].contiguous()

    def step(model: Any) -> tuple[float, float]:
        model.zero_grad()
        dist.barrier()
        start_s, waited_s = Link.now_s(), Link.waited_s
        model(ids, labels=ids, position_ids=positions).loss.backward()
        return Link.now_s() - start_s, Link.waited_s - waited_s

    return step


def ulysses_llama(options: argparse.Namespace) -> Any:
    """An unmodified Llama; only the core of its attention swaps tokens for heads."""
    import torch.distributed as dist
    from transformers import AttentionInterface, AttentionMaskInterface

    from tests.distributed.one_sequence import Ulysses

    core = Ulysses([options.tokens // 2] * 2, dist.group.WORLD, causal=True)
    core.group = dist.group.WORLD.group_name  # Dynamo knows no group that is written in Python

    def attention(_module: Any, q: Any, k: Any, v: Any, _mask: Any, **_: Any) -> Any:
        return core(q, k, v).transpose(1, 2), None

    AttentionInterface.register("ulysses", attention)
    AttentionMaskInterface.register("ulysses", lambda *_, **__: None)
    sizes = {key: getattr(options, key) for key in ("layers", "hidden", "tokens")}
    model = harness.llama(**sizes, vocab=1024)
    model.set_attn_implementation("ulysses")
    return model


def judge(measured: dict[str, Any]) -> list[str]:
    """Prints what was measured; returns the promises that do not hold, as sentences."""
    for arm, steps in measured["steps_s"].items():
        medians = (format_seconds(statistics.median(each)) for each in zip(*steps, strict=True))
        print("{:9} step {}, of which {} exposed".format(arm, *medians))
    busy, ratio = format_seconds(measured["comm_s"]), measured["exposed_ratio"]
    peak, whole = (format_bytes(measured[key]) for key in ("peak_bytes", "whole_bytes"))
    print(f"exposed: {ratio:.2f} of Inductor's; link busy {busy} a step; peak {peak} of {whole}")
    checks = {
        f"memo exposes more than {MAX_EXPOSED} of Inductor": ratio > MAX_EXPOSED,
        "nothing is recomputed": not measured["recomputed_bytes"],
        "gradients differ": measured["gradient_error"] > 1e-4,
    }
    return [failure for failure, fails in checks.items() if fails]


if __name__ == "__main__":
    sys.exit(main())
