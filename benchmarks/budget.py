"""A bound in bytes, kept: ``python -m benchmarks.budget``.

1. Peers, each in a process of its own: torch.compile's inductor, the same at twelve
   ``activation_memory_budget`` ratios, activation checkpointing, and checkpointing inside inductor
   alone and with three ratios. First the physical peak of a step; then memo at that memory beside
   the peer, steps interleaved, median of the ratios of pairs.
2. memo at twelve budgets from its floor to no bound: the measured peak of every step, the first
   included, must obey the budget; later peaks must be the plan's, and never grow when the budget
   shrinks.

memo runs twice each time: with host memory to copy to (``auto``), and with ``host_budget=0``. On a
CPU the host's memory is the device's. So all memory of the process (anonymous and shared) is
measured as well, and without host memory memo gets all that a peer takes, its host copies included.

All of it for both ways to write a step: ``held`` (``out = model(...); out.loss.backward()`` in a
loop, so that the logits are there throughout) and ``dropped`` (the output goes before the backward,
which memo is told). ``--memory-only`` measures part 2 alone, at four budgets and without times;
``--ways``, ``--hosts`` and ``--rows`` run a part of it. Whole it takes three hours of a quiet
machine: ``--kept FILE`` writes each measurement there at once, and takes from there what the same
code has measured before.

Peaks are what a step holds on the device: parameters, inputs, and the growth of anonymous resident
memory. What compiling leaves behind or gives back is no part of a step: memo's steps are measured
from the planned forward's entry. What a step leaves behind for the next is measured as well, from
the second one on, whose forward may be planned and compiled anew because the results of the first
are there: hardly anything. Gradients are new in every step. The
host store of offloaded activations is shared memory, which the kernel counts apart, and which all
memory includes, also while no step runs. In all arms
every core that the process may use has one intra-op thread, so memo's two copy threads find no core
of their own: they take their time from its compute.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
HOSTS = ("auto", "0")
"""Values of memo's ``host_budget``: what is left of the host's memory, or none of it."""
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
        runner = Runner(MODULE, options, cache)
        hardware = harness.hardware()
        measured = {way: measure(runner, options, way) for way in options.ways.split(",")}
    settings = ("layers", "hidden", "tokens", "vocab", "memory_only", "ways", "hosts", "rows")
    payload = {
        "hardware": hardware,
        "settings": {key: getattr(options, key) for key in settings},
        **measured,
        "failures": [f"{way}: {text}" for way in measured for text in measured[way]["failures"]],
    }
    for way, parts in measured.items():
        for host, rows in parts["memo"].items():
            show_budgets(f"outputs {way}, host_budget={host}", rows)
        show_peers(f"outputs {way}", parts["peers"], options.hosts.split(","))
    name = "budget_memory" if options.memory_only else "budget"
    return harness.conclude(name, payload, save=not options.no_save)


def measure(runner: "Runner", options: argparse.Namespace, way: str) -> dict[str, Any]:
    """Both parts for one way to write the step, or the second alone."""
    written = f"--way={way}"
    names = [] if options.memory_only else options.peers.split(",")
    floors = runner.floors(options.hosts.split(","), written)
    shared = (written, *told(floors))
    peers = {name: runner("peer", f"--name={name}", *shared) for name in names}
    rows = {
        host: memo_rows(runner, options, (written, f"--host={host}"), floor)
        for host, floor in floors.items()
    }
    return {"peers": peers, "memo": rows, "failures": judge(rows, peers)}


def memo_rows(
    runner: "Runner", options: argparse.Namespace, written: tuple[str, ...], floor: int
) -> list[dict[str, Any]]:
    """Memo at budgets from ``floor`` to what it takes unbounded, and without one."""
    unbounded = runner("memo", "--budget=0", *written)
    span, last = unbounded["planned_bytes"] - floor, options.budgets - 1
    budgets = [floor + span * step // last for step in range(last)]
    wanted = [int(text) for text in options.rows.split(",")] if options.rows else range(last)
    return [runner("memo", f"--budget={budgets[at]}", *written) for at in wanted] + [unbounded]


def arguments() -> argparse.Namespace:
    """The command line; the defaults start 90 processes, each for a minute or two."""
    sizes = {"layers": 4, "hidden": 512, "tokens": 2048, "vocab": 4096}
    parser = harness.parser(__doc__, sizes=sizes)
    add_shared(parser, peers=PEERS)
    parser.add_argument("--memory-only", action="store_true", help="memo's budgets, no times")
    parser.add_argument("--budgets", type=int, help="from the floor to none; 12, or 4")
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated")
    parser.add_argument("--rows", default="", help="numbers of budgets; by default all")
    parser.add_argument("--name", default="inductor", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.budgets is None:
        options.budgets = 4 if options.memory_only else NUM_BUDGETS
    return options


class Runner:
    """Runs children that share one cache of compiled kernels: compile time is not measured here.

    With ``--kept`` each result goes to that file, and one of the same code is taken from there.
    """

    def __init__(self, module: str, options: argparse.Namespace, cache: str) -> None:
        names = ("layers", "hidden", "tokens", "vocab", "pairs")
        self._module = module
        self._shared = tuple(f"--{name}={getattr(options, name)}" for name in names)
        if getattr(options, "memory_only", False):
            self._shared += ("--memory-only",)
        self._environment = {"TORCHINDUCTOR_CACHE_DIR": cache, "TMPDIR": cache}
        self._file: Path | None = options.kept
        exists = self._file is not None and self._file.exists()
        self._kept: dict[str, Any] = json.loads(self._file.read_text()) if exists else {}

    def __call__(self, child: str, *arguments: str) -> dict[str, Any]:
        """What the child sends, or has sent before. Raises ChildFailed, as ``run_arm``."""
        print(f"{child} {' '.join(arguments)}", file=sys.stderr, flush=True)
        arm = harness.Arm(
            name=child,
            arguments=(f"--child={child}", *self._shared, *arguments),
            environment=self._environment,
        )
        key = " ".join((harness.code(), self._module, *arm.arguments))
        if key not in self._kept:
            load = round(os.getloadavg()[0], 1)
            self._kept[key] = {"load": load, **harness.run_arm(self._module, arm)}
            if self._file is not None:
                self._file.write_text(json.dumps(self._kept, indent=1))
        result: dict[str, Any] = self._kept[key]
        print(f"    {json.dumps(result)}", file=sys.stderr, flush=True)
        return result

    def floors(self, hosts: Iterable[str], *arguments: str) -> dict[str, int]:
        """Memo's floor for each host budget."""
        named = {host: self("floor", *arguments, f"--host={host}") for host in hosts}
        return {host: sent["floor_bytes"] for host, sent in named.items()}


def add_shared(parser: argparse.ArgumentParser, *, peers: Sequence[str]) -> None:
    """What both benchmarks of peers ask, and what a child of theirs is told."""
    parser.add_argument("--pairs", type=int, default=7, help="interleaved pairs of steps; 0: none")
    parser.add_argument("--peers", default=",".join(peers), help="comma-separated")
    parser.add_argument("--hosts", default=",".join(HOSTS), help="memo's host budgets")
    parser.add_argument("--kept", type=Path, help="file of measurements, to go on from")
    parser.add_argument("--floors", default="", help=argparse.SUPPRESS)
    parser.add_argument("--way", default="held", help=argparse.SUPPRESS)
    parser.add_argument("--host", default="auto", help=argparse.SUPPRESS)


def told(floors: Mapping[str, int]) -> tuple[str, str]:
    """``floors`` as arguments for the child of a peer."""
    return f"--hosts={','.join(floors)}", f"--floors={','.join(map(str, floors.values()))}"


def run_peer(options: argparse.Namespace) -> dict[str, Any]:
    """One peer: its physical peak, and memo at that memory, one step each in turn.

    Every peer gets its pairs: which are the fastest for their memory is not known before.
    """
    model, ids = make_model(options)
    kept: dict[str, Any] = {}
    theirs = make_step(model, compiled(model, options.name), ids, options.way, kept)
    for _ in range(2):
        theirs()
    peak = measured_peak(model, ids, theirs, kept)
    return {**peak, "memo": memo_rows_at(options, theirs, peak)}


def memo_rows_at(
    options: argparse.Namespace, theirs: Callable[[], None], peak: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """Memo in the memory of a peer, or at its own floor above that, for each host budget.

    Without host memory it gets all memory of the peer, what the peer has on the host included.
    Without pairs of steps (``--pairs 0``) there is no row.
    """
    import torch._functorch.config as functorch_config

    functorch_config.activation_memory_budget = 1.0  # the peer is compiled; memo has its own
    floors = dict(zip(options.hosts.split(","), map(int, options.floors.split(",")), strict=True))
    rows = {}
    for host in sorted(floors) if options.pairs else ():  # a host frame stays: none comes first
        theirs_bytes = peak["all_bytes" if host == "0" else "peak_bytes"]
        rows[host] = run_pairs(options, theirs, max(floors[host], theirs_bytes), host)
    return rows


def run_pairs(
    options: argparse.Namespace, theirs: Callable[[], None], budget: int, host: str
) -> dict[str, Any]:
    """Steps of memo under ``budget`` bytes and of a peer in turn: the median of the ratios."""
    model, ids = make_model(options)
    kept: dict[str, Any] = {}
    ours = make_step(model, memo(model, budget, options.way, host), ids, options.way, kept)
    for _ in range(2):
        ours()
    pairs = [(timed(ours), timed(theirs)) for _ in range(options.pairs)]
    peak = measured_peak(model, ids, ours, kept)
    plan = harness.memo_plan()
    return {
        "budget_bytes": budget,
        "planned_bytes": plan.peak_bytes,
        "host_bytes": plan.host_bytes,
        "peak_bytes": peak["peak_bytes"],
        "all_bytes": peak["all_bytes"],
        "ratio": statistics.median(mine / other for mine, other in pairs),
        "memo_s": statistics.median(mine for mine, _ in pairs),
        "step_s": statistics.median(other for _, other in pairs),
    }


def run_floor(options: argparse.Namespace) -> dict[str, Any]:
    """The smallest budget that memo can keep: what its refusal of one byte names."""
    model, ids = make_model(options)
    step = make_step(model, memo(model, 1, options.way, options.host), ids, options.way)
    return {"floor_bytes": harness.floor_of(step)}


def run_memo(options: argparse.Namespace) -> dict[str, Any]:
    """One budget (0: none) under memo: planned and physical peak, what moved."""
    import memo_compile

    model, ids = make_model(options)
    kept: dict[str, Any] = {}
    compiled = memo(model, options.budget or None, options.way, options.host)
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
        "host_bytes": plan.host_bytes,
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


def memo(model: Any, budget: int | None, way: str, host: str) -> Any:
    """``model`` compiled by memo under ``budget`` bytes, and ``host`` (``auto``: what there is)."""
    import torch

    options = {
        "host_budget": None if host == "auto" else host,
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
    return {
        "peak_bytes": peak.peak_bytes,
        "all_bytes": peak.all_bytes,
        "growth_bytes": peak.growth_bytes,
        "held_bytes": held,
    }


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


def judge(
    rows_by_host: dict[str, list[dict[str, Any]]], peers: dict[str, dict[str, Any]]
) -> list[str]:
    """The promises that do not hold, as sentences."""
    failures = []
    for host, rows in rows_by_host.items():
        sentences = [text for row in rows for text in judge_row(row)]
        for low, high in itertools.pairwise(rows):
            for key in ("planned_bytes", "peak_bytes"):
                slack = 1.0 if key == "planned_bytes" else MAX_PEAK_OVER_PLAN
                if low[key] > high[key] * slack:
                    sentences.append(f"{key} {low[key]} at the smaller budget, {high[key]} above")
        failures += [f"host_budget={host}: {text}" for text in sentences]
    if peers and "auto" in rows_by_host:
        lowest = min(peer["growth_bytes"] for peer in peers.values())
        floor = rows_by_host["auto"][0]["growth_bytes"]
        if floor > MAX_FLOOR_RATIO * lowest:
            failures.append(f"floor {floor} > {MAX_FLOOR_RATIO} x the lowest peer's {lowest}")
    return failures + list(judge_times(peers))


def judge_times(peers: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The peers in whose memory memo's step takes longer than theirs."""
    for name, peer in peers.items():
        for host, row in peer.get("memo", {}).items():
            if row["ratio"] > MAX_STEP_RATIO and row["budget_bytes"] <= peer["all_bytes"]:
                yield f"at the memory of {name}, host_budget={host}: {row['ratio']:.3f} x its time"


def show_budgets(title: str, rows: list[dict[str, Any]]) -> None:
    """Memo's budgets."""
    harness.print_table(
        f"memo under {len(rows)} budgets, {title}",
        ("budget", "planned", "measured", "measured / planned", "all memory", "recomputed", "step"),
        [
            (
                "none" if row["budget_bytes"] is None else format_bytes(row["budget_bytes"]),
                format_bytes(row["planned_bytes"]),
                format_bytes(row["peak_bytes"]),
                f"{row['peak_bytes'] / row['planned_bytes']:.4f}",
                format_bytes(row["all_bytes"]),
                format_bytes(row["recomputed_bytes"]),
                f"{row['step_s']:.3f} s",
            )
            for row in rows
        ],
    )


def show_peers(title: str, peers: Mapping[str, Mapping[str, Any]], hosts: Sequence[str]) -> None:
    """The peers, and memo at their memory: a table for each host budget."""
    columns = ("peer", "its peak", "all", "its step", "memo's peak", "all", "memo / peer")
    for host in hosts:
        rows = []
        for name, peer in peers.items():
            row = peer.get("memo", {}).get(host)
            if row is None:
                rows.append((name, peer.get("missing", "no pairs"), *[""] * 5))
                continue
            sizes = [peer["peak_bytes"], peer["all_bytes"], row["peak_bytes"], row["all_bytes"]]
            theirs, their_all, ours, our_all = map(format_bytes, sizes)
            above = " (floor)" if row["budget_bytes"] > peer["all_bytes"] else ""
            step_s, ratio = f"{row['step_s']:.3f} s", f"{row['ratio']:.3f}{above}"
            rows.append((name, theirs, their_all, step_s, ours, our_all, ratio))
        harness.print_table(
            f"peers, and memo at their memory, {title}, host_budget={host}", columns, rows
        )


if __name__ == "__main__":
    sys.exit(main())
