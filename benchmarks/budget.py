"""A bound in bytes, kept: ``python -m benchmarks.budget``.

1. Peers, each in a process of its own: torch.compile's inductor, the same at twelve
   ``activation_memory_budget`` ratios, activation checkpointing, and checkpointing inside inductor
   alone and with three ratios. First the physical peak of a step; then memo at that memory beside
   the peer, steps interleaved, median of the ratios of pairs.
2. memo at twelve budgets from its floor to no bound: the measured peak of every step, the first
   included, must obey the budget; later peaks must be the plan's, and never grow when the budget
   shrinks.

All of it for both ways to write a step: ``held`` (``out = model(...); out.loss.backward()`` in a
loop, so that the logits are there throughout) and ``dropped`` (the output goes before the backward,
which memo is told). ``--memory-only`` measures part 2 alone, at four budgets and without times;
``--ways`` and ``--rows`` run a part of it. Whole it takes an hour and a half of a quiet machine:
``--kept FILE`` writes each measurement there at once, and takes from there what the same code has
measured before.

Peaks are what a step holds on the device: parameters, inputs, and the growth of anonymous resident
memory. What compiling leaves behind or gives back is no part of a step: memo's steps are measured
from the planned forward's entry. What a step leaves behind for the next is measured as well, from
the second one on, whose forward may be planned and compiled anew because the results of the first
are there: hardly anything. Gradients are new in every step. The
host store of offloaded activations is shared memory, which the kernel counts apart. In all arms
every core that the process may use has one intra-op thread, so memo's two copy threads find no core
of their own: they take their time from its compute.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import harness
from memo_compile.units import format_bytes

MODULE = "benchmarks.budget"
NUM_BUDGETS = 12
RATIOS = tuple(round(i / NUM_BUDGETS, 3) for i in range(NUM_BUDGETS))
"""Of activation_memory_budget; 1.0 is the plain inductor arm."""
PEERS = (
    "inductor",
    "checkpointing",
    "inductor+checkpointing",
    *(f"ratio-{ratio}" for ratio in RATIOS),
    *(f"ratio+checkpointing-{ratio}" for ratio in (0.1, 0.3, 0.5)),
)
WAYS = ("held", "dropped")
MAX_STEP_RATIO = 1.0
MAX_PEAK_OVER_BUDGET = 1.005
MAX_LEFT_BYTES = 2 * 2**20
"""Between the second step's entry and a later one's."""
NUM_FIRST_STEPS = 4
"""Measured one by one: from the second on a step finds the results of the one before. Four, because
what a step leaves shows from the second to the third, and from the third to the fourth."""
MAX_PEAK_OVER_PLAN = 1.01
MIN_PEAK_OF_PLAN = 0.95
"""A plan that reserves much more than is used wastes the budget."""
MAX_FLOOR_RATIO = 0.6
"""memo's smallest peak over the smallest of any peer, both above parameters and inputs."""
NUM_PEAK_STEPS = 3


def main() -> int:
    """Run both parts, print the tables, write the results; 1 when a promise breaks."""
    options = arguments()
    if options.child:
        harness.send_result(CHILDREN[options.child](options))
        return 0
    with tempfile.TemporaryDirectory(prefix="memo-bench-kernels-") as cache:
        runner = _Runner(options, cache)
        hardware = harness.hardware()
        found = {way: measure(runner, options, way) for way in options.ways.split(",")}
    settings = ("layers", "hidden", "tokens", "vocab", "memory_only", "ways", "rows")
    payload = {
        "hardware": hardware,
        "settings": {key: getattr(options, key) for key in settings},
        **found,
        "failures": [
            f"{way}: {text}" for way, measured in found.items() for text in measured["failures"]
        ],
    }
    for way, measured in found.items():
        show(way, measured["memo"], measured["peers"])
    name = "budget_memory" if options.memory_only else "budget"
    return harness.conclude(name, payload, save=not options.no_save)


def measure(runner: "_Runner", options: argparse.Namespace, way: str) -> dict[str, Any]:
    """Both parts for one way to write the step, or the second alone."""
    written = f"--way={way}"
    names = [] if options.memory_only else options.peers.split(",")
    floor = runner("floor", written)["floor_bytes"]
    peers = {name: runner("peer", f"--name={name}", f"--budget={floor}", written) for name in names}
    unbounded = runner("memo", "--budget=0", written)
    span, last = unbounded["planned_bytes"] - floor, options.budgets - 1
    budgets = [floor + span * step // last for step in range(last)]
    wanted = [int(text) for text in options.rows.split(",")] if options.rows else range(last)
    rows = [runner("memo", f"--budget={budgets[at]}", written) for at in wanted] + [unbounded]
    return {"peers": peers, "memo": rows, "failures": judge(rows, peers)}


def arguments() -> argparse.Namespace:
    """The command line; the defaults start 60 processes, each for a minute."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--pairs", type=int, default=7, help="interleaved pairs of steps; 0: none")
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated")
    parser.add_argument("--memory-only", action="store_true", help="memo's budgets, no times")
    parser.add_argument("--budgets", type=int, help="from the floor to none; 12, or 4")
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated")
    parser.add_argument("--rows", default="", help="numbers of budgets; by default all")
    parser.add_argument("--kept", type=Path, help="file of measurements, to go on from")
    parser.add_argument("--no-save", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="inductor", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--way", default="held", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.budgets is None:
        options.budgets = 4 if options.memory_only else NUM_BUDGETS
    return options


class _Runner:
    """Runs children that share one cache of compiled kernels: compile time is not measured here."""

    def __init__(self, options: argparse.Namespace, cache: str) -> None:
        names = ("layers", "hidden", "tokens", "vocab", "pairs")
        self._shared = tuple(f"--{name}={getattr(options, name)}" for name in names)
        if options.memory_only:
            self._shared += ("--memory-only",)
        self._environment = {"TORCHINDUCTOR_CACHE_DIR": cache}
        self._file: Path | None = options.kept
        exists = self._file is not None and self._file.exists()
        self._kept: dict[str, Any] = json.loads(self._file.read_text()) if exists else {}

    def __call__(self, child: str, *arguments: str) -> dict[str, Any]:
        print(f"{child} {' '.join(arguments)}", file=sys.stderr, flush=True)
        arm = harness.Arm(
            name=child,
            arguments=(f"--child={child}", *self._shared, *arguments),
            environment=self._environment,
        )
        key = " ".join((harness.code(), *arm.arguments))
        if key not in self._kept:
            self._kept[key] = harness.run_arm(MODULE, arm)
            if self._file is not None:
                self._file.write_text(json.dumps(self._kept, indent=1))
        result: dict[str, Any] = self._kept[key]
        print(f"    {json.dumps(result)}", file=sys.stderr, flush=True)
        return result


def run_peer(options: argparse.Namespace) -> dict[str, Any]:
    """One peer: its physical peak, and memo at that memory, one step each in turn.

    Every peer gets its pairs: which are the fastest for their memory is not known before.
    """
    import torch._functorch.config as functorch_config

    model, ids = make_model(options)
    kept: dict[str, Any] = {}
    theirs = make_step(model, compiled(model, options.name), ids, options.way, kept)
    for _ in range(2):
        theirs()
    found: dict[str, Any] = measured_peak(model, ids, theirs, kept)
    if options.pairs:
        functorch_config.activation_memory_budget = 1.0  # the peer is compiled; memo has its own
        found |= run_pairs(options, theirs, max(options.budget, found["peak_bytes"]))
    return found


def run_pairs(
    options: argparse.Namespace, theirs: Callable[[], None], budget: int
) -> dict[str, Any]:
    """Steps of memo under ``budget`` bytes and of a peer in turn: the median of the ratios."""
    import memo_compile

    model, ids = make_model(options)
    ours = make_step(model, memo(model, budget, options.way), ids, options.way)
    for _ in range(2):
        ours()
    pairs = [(timed(ours), timed(theirs)) for _ in range(options.pairs)]
    return {
        "memo_budget_bytes": budget,
        "memo_planned_bytes": memo_compile.report().plans[-1].peak_bytes,
        "ratio": statistics.median(mine / other for mine, other in pairs),
        "memo_s": statistics.median(mine for mine, _ in pairs),
        "step_s": statistics.median(other for _, other in pairs),
    }


def run_floor(options: argparse.Namespace) -> dict[str, Any]:
    """The smallest budget that memo can keep: what its refusal of one byte names."""
    model, ids = make_model(options)
    step = make_step(model, memo(model, 1, options.way), ids, options.way)
    return {"floor_bytes": harness.floor_of(step)}


def run_memo(options: argparse.Namespace) -> dict[str, Any]:
    """One budget (0: none) under memo: planned and physical peak, what moved."""
    import memo_compile

    model, ids = make_model(options)
    kept: dict[str, Any] = {}
    compiled = memo(model, options.budget or None, options.way)
    run = make_step(model, compiled, ids, options.way, kept)
    steps, plans = [], []
    for _ in range(NUM_FIRST_STEPS):
        steps.append(first_peak(model, ids, kept, run))
        plans.append(memo_compile.report().plans[-1].peak_bytes)
    first = [step.peak_bytes for step in steps]
    others = [step.others_bytes for step in steps]
    peak = {
        "peak_bytes": max(first[1:]),
        "first_peaks_bytes": first,
        "first_plans_bytes": plans,
        "compiled_bytes": others[1] - others[0],
        "left_bytes": max(later - others[1] for later in others[2:]),
    }
    times = [0.0]
    if not options.memory_only:
        times = [timed(run) for _ in range(NUM_PEAK_STEPS)]
        peak |= measured_peak(model, ids, run, kept)
    plan = harness.memo_plan()
    return {
        **peak,
        "budget_bytes": options.budget or None,
        "planned_bytes": plan.peak_bytes,
        "arena_bytes": plan.arena_bytes,
        "offloaded_bytes": plan.offloaded_bytes,
        "recomputed_bytes": plan.recomputed_bytes,
        "policy": plan.policy,
        "dropping_saves_bytes": plan.dropping_saves_bytes,
        "step_s": statistics.median(times),
    }


CHILDREN: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "peer": run_peer,
    "floor": run_floor,
    "memo": run_memo,
}


def make_model(options: argparse.Namespace) -> tuple[Any, Any]:
    """An unmodified Llama of the sizes in ``options``, and its token ids."""
    return harness.llama_with_ids(options, vocab=options.vocab)


def memo(model: Any, budget: int | None, way: str) -> Any:
    """``model`` compiled by memo under ``budget`` bytes."""
    import torch

    options = {
        "memory_budget": budget,
        "optimizer_state_bytes_per_parameter": 0,
        "strict": True,
        "outputs": way,
    }
    return torch.compile(model, backend="memo", options=options)


def compiled(model: Any, peer: str) -> Any:
    """``model`` as ``peer`` runs it."""
    import torch
    import torch._functorch.config as functorch_config

    if "checkpointing" in peer:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if peer == "checkpointing":
        return model
    if peer.startswith("ratio"):
        functorch_config.activation_memory_budget = float(peer.rsplit("-", 1)[1])
    return torch.compile(model, backend="inductor")


def make_step(
    model: Any, step: Any, ids: Any, way: str, kept: dict[str, Any] | None = None
) -> Callable[[], None]:
    """A forward and backward with new gradients; ``held`` keeps the output in ``kept``."""
    names: dict[str, Any] = {} if kept is None else kept

    def hold() -> None:
        model.zero_grad(set_to_none=True)
        names["out"] = step(input_ids=ids, labels=ids)
        names["out"].loss.backward()

    def drop() -> None:
        model.zero_grad(set_to_none=True)
        step(input_ids=ids, labels=ids).loss.backward()

    return hold if way == "held" else drop


def first_peak(model: Any, ids: Any, kept: dict[str, Any], run: Callable[[], None]) -> harness.Peak:
    """Physical peak of one of memo's steps, measured from its planned forward's entry."""
    import contextlib
    import gc
    from unittest import mock

    from memo_compile.driver import assemble

    run_forward = assemble.run_forward
    seen: list[harness.Peak] = []
    with contextlib.ExitStack() as watch:

        def watched(*args: Any) -> Any:
            gc.collect()
            held = harness.held_bytes(model, None, [ids, *kept.get("out", {}).values()])
            seen.append(watch.enter_context(harness.physical_peak("cpu", held)))
            return run_forward(*args)

        with mock.patch.object(assemble, "run_forward", watched):
            run()
    return seen[0]


def timed(run: Callable[[], None]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measured_peak(
    model: Any, ids: Any, run: Callable[[], None], kept: dict[str, Any]
) -> dict[str, int]:
    """Physical peak of a step: what is held between steps and the growth above it."""
    model.zero_grad(set_to_none=True)
    held = harness.held_bytes(model, None, [ids, *kept.get("out", {}).values()])
    with harness.physical_peak("cpu", held) as peak:
        for _ in range(NUM_PEAK_STEPS):
            run()
    return {"peak_bytes": peak.peak_bytes, "growth_bytes": peak.growth_bytes, "held_bytes": held}


def judge_row(row: dict[str, Any]) -> Iterator[str]:
    """The promises that one budget does not keep."""
    budget, peak, planned = row["budget_bytes"], row["peak_bytes"], row["planned_bytes"]
    first, plans = row["first_peaks_bytes"], row["first_plans_bytes"]
    if budget is not None and max(peak, *first) > MAX_PEAK_OVER_BUDGET * budget:
        yield f"budget {budget}: measured {peak}, first steps {first}"
    if row["left_bytes"] > MAX_LEFT_BYTES:
        yield f"budget {budget}: a step leaves {row['left_bytes']} B behind"
    if budget is None:  # nothing is bounded, and the C library's heap may keep holes
        return
    if any(step > plan * MAX_PEAK_OVER_PLAN for step, plan in zip(first, plans, strict=True)):
        yield f"budget {budget}: measured {first}, over 1 % above the plans {plans}"
    if "growth_bytes" in row and peak < planned * MIN_PEAK_OF_PLAN:
        yield f"budget {budget}: measured {peak}, planned {planned}"


def judge(rows: list[dict[str, Any]], peers: dict[str, dict[str, Any]]) -> list[str]:
    """The promises that do not hold, as sentences."""
    failures = [text for row in rows for text in judge_row(row)]
    for low, high in itertools.pairwise(rows):
        for key in ("planned_bytes", "peak_bytes"):
            slack = 1.0 if key == "planned_bytes" else MAX_PEAK_OVER_PLAN
            if low[key] > high[key] * slack:
                failures.append(f"{key} {low[key]} at the smaller budget, {high[key]} above it")
    if peers:
        lowest = min(peer["growth_bytes"] for peer in peers.values())
        floor = rows[0]["growth_bytes"]
        if floor > MAX_FLOOR_RATIO * lowest:
            failures.append(f"floor {floor} > {MAX_FLOOR_RATIO} x the lowest peer's {lowest}")
    for name, peer in peers.items():
        if peer.get("ratio", 0.0) > MAX_STEP_RATIO:
            failures.append(f"at the memory of {name}: {peer['ratio']:.3f} x its time")
    return failures


def show(way: str, rows: list[dict[str, Any]], peers: dict[str, dict[str, Any]]) -> None:
    """Two tables: memo's budgets, and the peers with memo at their memory."""
    harness.print_table(
        f"memo under {len(rows)} budgets, outputs {way}",
        ("budget", "planned", "measured", "measured / planned", "offloaded", "recomputed", "step"),
        [
            (
                "none" if row["budget_bytes"] is None else format_bytes(row["budget_bytes"]),
                format_bytes(row["planned_bytes"]),
                format_bytes(row["peak_bytes"]),
                f"{row['peak_bytes'] / row['planned_bytes']:.4f}",
                format_bytes(row["offloaded_bytes"]),
                format_bytes(row["recomputed_bytes"]),
                f"{row['step_s']:.3f} s",
            )
            for row in rows
        ],
    )
    harness.print_table(
        "peers, and memo at their memory",
        ("peer", "measured", "above the model", "step", "memo / peer"),
        [
            (
                name,
                format_bytes(peer["peak_bytes"]),
                format_bytes(peer["growth_bytes"]),
                f"{peer['step_s']:.3f} s" if "step_s" in peer else "-",
                f"{peer['ratio']:.3f}" if "ratio" in peer else "-",
            )
            for name, peer in peers.items()
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
