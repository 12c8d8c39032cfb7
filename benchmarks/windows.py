"""Recomputation hides behind a slow link between ranks: ``python -m benchmarks.windows``.

A Llama with tensor parallel layers on two ranks (gloo, CPU). The link is slowed so that the
collectives of a step take ``--part`` of its computation. Six ways to train it, each in two
processes of its own, take turns step by step:

    windows       all that layers save is recomputed, in the windows of collectives where it fits
    on demand     the same, and every collective is waited for at once
    save          nothing is recomputed: as fast as it gets, with more memory
    lynx-heu      the policy of that name, which copies nothing
    budget        the fastest plan that memo finds
    at once       the same, every collective waited for at once

All but ``save`` have a budget of ``--room`` times the memory of full recomputation: what a window
makes early is alive for longer.

It passes when ``windows`` waits for ranks at most half as long as ``on demand``, and its step is
shorter by at least 0.7 of the recompute seconds that its plan has in windows. Every arm hands over
its own step program: two arms with one program measured nothing.
"""

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import harness
from memo_compile.units import format_bytes, format_seconds

MODULE = "benchmarks.windows"
MAX_WAIT_PART = 0.5
MIN_GAIN = 0.7
SIZES = {"layers": 4, "hidden": 256, "tokens": 512, "samples": 9}
WARMUP = 3
"""Steps before the first sample: the first compiles, the next plans again with gradients."""

RECOMPUTE: dict[str, Any] = {"policy": "full-recompute"}
ARMS: dict[str, dict[str, Any]] = {
    "windows": RECOMPUTE,
    "on demand": {**RECOMPUTE, "comm_windows": False},
    "save": {"policy": "save"},
    "lynx-heu": {"policy": "lynx-heu"},
    "budget": {},
    "at once": {"comm_windows": False},
}
UNBOUNDED = "save"


def main() -> int:
    """Run the arms, print the table, write the results, judge."""
    made = harness.parser(__doc__, sizes=SIZES)
    made.add_argument("--part", type=float, default=0.6, help="communication over computation")
    made.add_argument("--room", type=float, default=1.15, help="budget over full recomputation")
    made.add_argument("--lowering", default="inductor", choices=("inductor", "aten"))
    made.add_argument("--arms", type=int, default=len(ARMS), help="only the first so many")
    made.add_argument("--link", type=float, default=0.0, help=argparse.SUPPRESS)
    made.add_argument("--bound", type=int, default=0, help=argparse.SUPPRESS)
    made.add_argument("--meet", default="", help=argparse.SUPPRESS)
    return harness.run_benchmark("windows", made.parse_args(), measure, run_child)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Find the link's speed and the budget, then run all arms in turns."""
    free = harness.run_arm(MODULE, _arm("windows", options, samples=1))
    link = free["comm_bytes"] / (options.part * free["compute_s"])
    bound = int(options.room * free["peak_bytes"])
    names = list(ARMS)[: options.arms]
    arms = [_arm(name, options, link=link, bound=bound) for name in names]
    found = harness.run_in_turns(MODULE, arms)
    result = {
        "settings": {key: getattr(options, key) for key in (*SIZES, "part", "room", "lowering")},
        "link_bytes_per_s": link,
        "arms": found,
    }
    show(result)
    return {**result, "failures": judge(result), "note": ""}


def _arm(name: str, options: argparse.Namespace, **changed: Any) -> harness.Arm:
    given = {**vars(options), **changed, "child": name}
    names = (*SIZES, "part", "lowering", "link", "bound", "child")
    return harness.Arm(name=name, arguments=tuple(f"--{key}={given[key]}" for key in names))


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """Rank 0 of an arm, which starts the other; or, told where to meet, the other one."""
    if options.meet:
        return train(options, rank=1)
    with tempfile.TemporaryDirectory() as folder:
        options.meet = str(Path(folder) / "meet")
        other = subprocess.Popen([sys.executable, "-m", MODULE, *_passed(options)])
        try:
            return train(options, rank=0)
        finally:
            try:
                other.wait(timeout=60)
            finally:
                other.kill()


def _passed(options: argparse.Namespace) -> list[str]:
    names = (*SIZES, "part", "lowering", "link", "bound", "child", "meet")
    return [f"--{name}={getattr(options, name)}" for name in names]


def train(options: argparse.Namespace, rank: int) -> dict[str, Any]:
    """Steps of one rank; only rank 0 waits for its turns, since the other one follows it."""
    import torch
    import torch.distributed as dist

    import memo_compile

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{options.meet}", rank=rank, world_size=2)
    dump = tempfile.mkdtemp()
    given: dict[str, Any] = {**ARMS[options.child], "lowering": options.lowering}
    given |= {"strict": True, "dump": dump}
    if options.link:
        given["comm_bytes_per_s"] = options.link
    if options.child != UNBOUNDED and options.bound:
        given["memory_budget"] = options.bound
    model, ids = _parallel_llama(options)
    compiled = torch.compile(model, backend="memo", options=given)
    steps: list[float] = []
    waits: list[float] = []
    for number in range(WARMUP + options.samples):
        if rank == 0 and number >= WARMUP:
            harness.wait_turn()
        dist.barrier()
        start_s = time.perf_counter()
        compiled(ids, labels=ids).loss.backward()
        dist.barrier()
        steps.append(time.perf_counter() - start_s)
        waits.append(memo_compile.report().plans[-1].comm_wait_s)
    plan = memo_compile.report().plans[-1]
    dist.destroy_process_group()
    spans = plan.timeline.spans
    programs = sorted(Path(dump).glob("rank*/*/*-step-program.txt"))
    return {
        "step_s": steps[WARMUP:],
        "comm_wait_s": waits[WARMUP:],
        "compute_s": float(sum(own.end_s - own.start_s for own in spans if own.lane == "compute")),
        "comm_bytes": _comm_bytes(next(Path(dump).glob("rank*/*/problem.json"))),
        "num_collectives": plan.num_collectives,
        "window_recompute_s": plan.window_recompute_s,
        "hidden_comm_s": plan.hidden_comm_s,
        "exposed_comm_s": plan.exposed_comm_s,
        "simulated_s": plan.step_s,
        "recomputed_bytes": plan.recomputed_bytes,
        "offloaded_bytes": plan.offloaded_bytes,
        "peak_bytes": plan.peak_bytes,
        "program": hashlib.sha256(programs[-1].read_bytes()).hexdigest(),
    }


def _comm_bytes(path: Path) -> int:
    """What the collectives of a dumped step carry."""
    from memo_compile.step.communication import comm_bytes
    from memo_compile.step.problem import CallKind, Problem
    from memo_compile.step.serialise import from_json

    problem = from_json(path.read_text(), Problem)
    return sum(comm_bytes(problem, own) for own in problem.calls if own.kind is CallKind.ISSUE)


def _parallel_llama(options: argparse.Namespace) -> tuple[Any, Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = harness.llama(
        layers=options.layers, hidden=options.hidden, tokens=options.tokens, vocab=1024
    )
    plan: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    ids = torch.randint(1024, (1, options.tokens), generator=torch.Generator().manual_seed(1))
    return model, ids


def judge(result: Mapping[str, Any]) -> list[str]:
    """The promises that do not hold, as sentences."""
    arms, failures = result["arms"], []
    for pair in (("windows", "on demand"), ("windows", "save"), ("budget", "at once")):
        if set(pair) <= arms.keys() and len({arms[name]["program"] for name in pair}) < 2:
            failures.append(f"{pair[0]} and {pair[1]} ran one program")
    hidden, waiting = arms["windows"], arms["on demand"]
    waits = {name: statistics.median(arms[name]["comm_wait_s"]) for name in arms}
    if waits["windows"] > MAX_WAIT_PART * waits["on demand"]:
        part = waits["windows"] / waits["on demand"]
        failures.append(f"windows wait {part:.2f} x of on demand, at most {MAX_WAIT_PART}")
    gain_s = statistics.median(waiting["step_s"]) - statistics.median(hidden["step_s"])
    planned_s = hidden["window_recompute_s"]
    if not planned_s:
        failures.append("nothing is recomputed in windows")
    elif gain_s < MIN_GAIN * planned_s:
        failures.append(f"the step gains {gain_s / planned_s:.2f} of what runs in windows")
    return failures


def show(result: Mapping[str, Any]) -> None:
    """The table of arms."""
    arms = result["arms"]
    fastest = statistics.median(arms["save"]["step_s"])
    rows = []
    for name, arm in arms.items():
        step_s = statistics.median(arm["step_s"])
        rows.append(
            (
                name,
                format_seconds(step_s),
                f"{step_s / fastest:.3f}",
                format_seconds(statistics.median(arm["comm_wait_s"])),
                format_seconds(arm["exposed_comm_s"]),
                format_seconds(arm["window_recompute_s"]),
                format_bytes(arm["peak_bytes"]),
            )
        )
    columns = ("arm", "step", "/ save", "waits", "simulated", "in windows", "peak")
    harness.print_table("recomputation beside collectives, two ranks", columns, rows)


if __name__ == "__main__":
    sys.exit(main())
