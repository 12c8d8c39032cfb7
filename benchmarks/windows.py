"""Recomputation hides behind a slow link between ranks: ``python -m benchmarks.windows``.

A Llama with tensor parallel layers on two ranks (gloo, CPU). The link is slowed so that the
collectives of a step take ``--part`` of its computation. Each way to train it, in two processes of
its own, takes turns with the others step by step:

    windows            all that layers save is recomputed, in windows of collectives where it fits
    on demand          the same, and every collective is waited for at once
    selective          the core of attention is recomputed, as Megatron-LM does it; waits at once
    none               nothing is recomputed; waits at once
    lynx-heu           the policy of that name, which copies nothing
    memo as ...        the fastest plan that memo finds in the memory of one of those that wait

``windows``, ``on demand`` and ``lynx-heu`` have a budget of ``--room`` times the memory of full
recomputation: what a window makes early is alive for longer.

It passes when ``windows`` waits for ranks at most half as long as ``on demand``, its step is
shorter by at least 0.7 of the recompute seconds that its plan has in windows, and no plan of memo
is slower than what it has the memory of (figure 8 of arXiv 2406.08756, in small). Every arm hands
over its own step program: two arms with one program measured nothing.

Attention is computed operator by operator (``--attention``), as in the paper: what its core saves
grows with the square of the tokens, and is what selective recomputation is for.
"""

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import harness
from memo_compile.units import format_bytes, format_seconds

MODULE = "benchmarks.windows"
MAX_WAIT_PART = 0.5
MIN_GAIN = 0.7
MAX_RATIO = 1.03
"""memo's step over another's at its memory: beyond, it is slower by more than what a run differs
from the next."""
PART, ROOM, LOWERING, ATTENTION = 0.6, 1.15, "inductor", "eager"
SIZES = {"layers": 4, "hidden": 256, "tokens": 512, "samples": 9}
WARMUP = 3
"""Steps before the first sample: the first compiles, the next plans again with gradients."""

RECOMPUTE: dict[str, Any] = {"policy": "full-recompute"}
AT_ONCE: dict[str, Any] = {"comm_windows": False}
RIVALS: dict[str, dict[str, Any]] = {
    "on demand": {**RECOMPUTE, **AT_ONCE},
    "selective": {"policy": "save", **AT_ONCE},
    "none": {"policy": "save", **AT_ONCE},
}
ARMS: dict[str, dict[str, Any]] = {
    "windows": RECOMPUTE,
    **RIVALS,
    **{f"memo as {name}": {} for name in RIVALS},
    "lynx-heu": {"policy": "lynx-heu"},
}
SELECTIVE = "selective"
PASSED_ON = ("part", "lowering", "attention", "link", "bound", "child")


def main() -> int:
    """Run the arms, print the table, write the results, judge."""
    made = harness.parser(__doc__, sizes=SIZES)
    made.add_argument("--part", type=float, default=PART, help="communication over computation")
    made.add_argument("--room", type=float, default=ROOM, help="budget over full recomputation")
    made.add_argument("--lowering", default=LOWERING, choices=("inductor", "aten"))
    made.add_argument("--attention", default=ATTENTION, choices=("eager", "sdpa"))
    made.add_argument("--arms", type=int, default=len(ARMS), help="only the first so many")
    made.add_argument("--link", type=float, default=0.0, help=argparse.SUPPRESS)
    made.add_argument("--bound", type=int, default=0, help=argparse.SUPPRESS)
    made.add_argument("--meet", default="", help=argparse.SUPPRESS)
    options = made.parse_args()
    return harness.run_benchmark(result_name(options), options, measure, run_child)


def result_name(options: argparse.Namespace) -> str:
    """``windows``, and what differs from the defaults: such runs of one day stand side by side."""
    own = [options.lowering] if options.lowering != LOWERING else []
    own += [options.attention] if options.attention != ATTENTION else []
    own += [f"part{options.part:g}"] if options.part != PART else []
    own += [f"room{options.room:g}"] if options.room != ROOM else []
    own += [f"{key}{getattr(options, key)}" for key in SIZES if getattr(options, key) != SIZES[key]]
    return "_".join(["windows", *own])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Find the link's speed and the others' memory, then run all arms in turns."""
    names = list(ARMS)[: options.arms]
    free = {name: harness.run_arm(MODULE, _arm(name, options, samples=1)) for name in RIVALS}
    full = free["on demand"]
    link = full["comm_bytes"] / (options.part * full["compute_s"])
    bounds = dict.fromkeys(("windows", "on demand", "lynx-heu"), options.room * full["peak_bytes"])
    bounds |= {f"memo as {name}": found["peak_bytes"] for name, found in free.items()}
    arms = [_arm(name, options, link=link, bound=int(bounds.get(name, 0))) for name in names]
    found = harness.run_in_turns(MODULE, arms)
    settings = (*SIZES, "part", "room", "lowering", "attention")
    result = {
        "settings": {key: getattr(options, key) for key in settings},
        "link_bytes_per_s": link,
        "arms": found,
    }
    show(result)
    return {**result, "failures": judge(result), "note": ""}


def _arm(name: str, options: argparse.Namespace, **changed: Any) -> harness.Arm:
    given = argparse.Namespace(**{**vars(options), **changed, "child": name})
    return harness.Arm(name=name, arguments=harness.passed_on(given, *SIZES, *PASSED_ON))


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """Rank 0 of an arm, which starts the other; or, told where to meet, the other one."""
    if options.meet:
        return train(options, rank=1)
    with tempfile.TemporaryDirectory() as folder:
        options.meet = str(Path(folder) / "meet")
        passed = harness.passed_on(options, *SIZES, *PASSED_ON, "meet")
        other = subprocess.Popen([sys.executable, "-m", MODULE, *passed])
        try:
            return train(options, rank=0)
        finally:
            try:
                other.wait(timeout=60)
            finally:
                other.kill()


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
    if options.bound:
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
    model.set_attn_implementation(_attention(options))
    ids = torch.randint(1024, (1, options.tokens), generator=torch.Generator().manual_seed(1))
    return model, ids


def _attention(options: argparse.Namespace) -> str:
    """The name of the arm's attention; its core is recomputed where the arm is ``selective``."""
    if options.child != SELECTIVE:
        return str(options.attention)
    from torch.utils.checkpoint import checkpoint
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import eager_mask, sdpa_mask
    from transformers.models.llama.modeling_llama import eager_attention_forward

    core, mask = {
        "eager": (eager_attention_forward, eager_mask),
        "sdpa": (sdpa_attention_forward, sdpa_mask),
    }[options.attention]

    def recomputed(*tensors: Any, **given: Any) -> Any:
        return checkpoint(core, *tensors, use_reentrant=False, **given)

    AttentionInterface.register(SELECTIVE, recomputed)
    AttentionMaskInterface.register(SELECTIVE, mask)
    return SELECTIVE


def judge(result: Mapping[str, Any]) -> list[str]:
    """The promises that do not hold, as sentences; of arms that did not run there are none."""
    arms, failures = result["arms"], []
    pairs = [("windows", "on demand"), *((f"memo as {name}", name) for name in RIVALS)]
    for ours, other in pairs:
        if not {ours, other} <= arms.keys():
            continue
        if arms[ours]["program"] == arms[other]["program"]:
            failures.append(f"{ours} and {other} ran one program")
        ratio = _median(arms[ours], "step_s") / _median(arms[other], "step_s")
        if ratio > MAX_RATIO:
            failures.append(f"{ours} takes {ratio:.3f} x as long as {other}")
    if {"windows", "on demand"} <= arms.keys():
        failures += _judge_windows(arms["windows"], arms["on demand"])
    return failures


def _judge_windows(hidden: Mapping[str, Any], waiting: Mapping[str, Any]) -> Iterator[str]:
    part = _median(hidden, "comm_wait_s") / _median(waiting, "comm_wait_s")
    if part > MAX_WAIT_PART:
        yield f"windows wait {part:.2f} x of on demand, at most {MAX_WAIT_PART}"
    gain_s = _median(waiting, "step_s") - _median(hidden, "step_s")
    planned_s = hidden["window_recompute_s"]
    if not planned_s:
        yield "nothing is recomputed in windows"
    elif gain_s < MIN_GAIN * planned_s:
        yield f"the step gains {gain_s / planned_s:.2f} of what runs in windows"


def _median(arm: Mapping[str, Any], figure: str) -> float:
    return float(statistics.median(arm[figure]))


def show(result: Mapping[str, Any]) -> None:
    """The table of arms, and that of equal memory."""
    arms = result["arms"]
    rows = [
        (
            name,
            format_seconds(_median(arm, "step_s")),
            format_seconds(_median(arm, "comm_wait_s")),
            format_seconds(arm["exposed_comm_s"]),
            format_seconds(arm["window_recompute_s"]),
            format_bytes(arm["peak_bytes"]),
        )
        for name, arm in arms.items()
    ]
    columns = ("arm", "step", "waits", "simulated", "in windows", "peak")
    harness.print_table("recomputation beside collectives, two ranks", columns, rows)
    equal = [
        (
            name,
            *(format_bytes(arm["peak_bytes"]) for arm in (other, ours)),
            *(format_seconds(_median(arm, "step_s")) for arm in (other, ours)),
            f"{_median(ours, 'step_s') / _median(other, 'step_s'):.3f}",
            f"{ours['simulated_s'] / other['simulated_s']:.3f}",
        )
        for name in RIVALS
        if (other := arms.get(name)) and (ours := arms.get(f"memo as {name}"))
    ]
    columns = ("at its memory", "peak", "memo's", "step", "memo's", "ratio", "simulated")
    harness.print_table("figure 8 in small: memo at the memory of others", columns, equal)


if __name__ == "__main__":
    sys.exit(main())
