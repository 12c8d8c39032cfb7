"""A second process with warm caches: ``python -m benchmarks.warm_start``.

An unmodified Llama, memo and plain Inductor. Each runs twice, in two processes one after the other
that share one cache folder, empty at first: what is judged is the second. Printed are the seconds
from the first call to the end of the first backward, compilation included; what is judged is the
processor time of the process and its children, which other work on the machine does not lengthen.
The second process's first step must take no more of it with memo than with Inductor, memo's plan
must be the first process's byte for byte, times aside, the captured step and every region must come
from the cache, and the gradients must equal eager's.
"""

import argparse
import copy
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import harness

MODULE = "benchmarks.warm_start"
SIZES = {"hidden": 256, "tokens": 256, "batch": 2, "vocab": 1024, "rounds": 1}
DEPTHS = "8"
ARMS = ("inductor", "memo")
MAX_FIRST_STEP_RATIO = 1.0
"""First step of the second process, memo over Inductor."""
MAX_GRADIENT_ERROR = 1e-4
"""Second process against eager, of a parameter's own largest entry, in float32."""
CLOCK_FIELDS = ("lowering_s", "planning_s", "measured_s")
"""Of a plan: how long it took to make, which no second process repeats."""

Pair = tuple[dict[str, Any], dict[str, Any]]
"""What the first process of an arm found, and the second."""


def main() -> int:
    """Run every arm at every depth, print the table, write the results, judge."""
    parser = harness.parser(__doc__, sizes=SIZES)
    parser.add_argument("--depths", default=DEPTHS, help="layers, with commas: 8,32")
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    return harness.run_benchmark("warm_start", parser.parse_args(), measure, run_child)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All arms at all depths, and the verdict."""
    depths = [int(depth) for depth in options.depths.split(",")]
    pairs: dict[str, list[Pair]] = {f"{arm}-{depth}": [] for depth in depths for arm in ARMS}
    for number in range(options.rounds):
        for depth in depths:
            for arm in ARMS if number % 2 == 0 else reversed(ARMS):
                pairs[f"{arm}-{depth}"].append(run_pair(options, arm, depth))
    results = {
        name: tuple(harness.medians(found) for found in zip(*rounds, strict=True))
        for name, rounds in pairs.items()
    }
    show(results, depths)
    return {
        "settings": {name: getattr(options, name) for name in SIZES},
        "results": results,
        "rounds": pairs,
        "failures": judge(results, depths) + changed_plans(pairs),
    }


def run_pair(options: argparse.Namespace, arm: str, depth: int) -> Pair:
    """One arm in two processes, one after the other, with the same caches."""
    shared = harness.passed_on(options, *SIZES)
    with tempfile.TemporaryDirectory(prefix="memo-warm-") as folder:
        # TMPDIR too: Inductor's precompiled C++ headers ignore its own cache folder.
        names = ("TORCHINDUCTOR_CACHE_DIR", "TMPDIR", "XDG_CACHE_HOME")
        child = harness.Arm(
            name=f"{arm}-{depth}",
            arguments=(f"--child={arm}", f"--layers={depth}", *shared),
            environment=dict.fromkeys(names, folder),
        )
        print(f"{child.name}: empty caches, then warm ones", file=sys.stderr, flush=True)
        return harness.run_arm(MODULE, child), harness.run_arm(MODULE, child)


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds from the first call to the end of the first backward; memo's parts and its plan."""
    import torch

    sizes = {name: getattr(options, name) for name in ("layers", "hidden", "tokens", "vocab")}
    model = harness.llama(**sizes)
    eager = copy.deepcopy(model)
    ids = torch.randint(options.vocab, (options.batch, options.tokens))
    step = torch.compile(model, backend=options.child)
    begin, begin_cpu = time.perf_counter(), harness.processor_s()
    step(input_ids=ids, labels=ids).loss.backward()
    result: dict[str, Any] = {
        "first_step_s": time.perf_counter() - begin,
        "first_step_cpu_s": harness.processor_s() - begin_cpu,
    }
    if options.child == "memo":
        from memo_compile.backends import capture_memory
        from memo_compile.lowering import region_cache
        from memo_compile.step.serialise import to_json

        plan = harness.memo_plan()
        result["lowering_s"], result["planning_s"] = plan.lowering_s, plan.planning_s
        result["num_regions"], result["num_hits"] = plan.num_regions, region_cache.counts.hits
        result["num_recalled"] = capture_memory.counts.recalled
        result["plan_sha256"] = digest(json.loads(to_json(plan)))
        eager(input_ids=ids, labels=ids).loss.backward()
        result["gradient_error"] = harness.gradient_error(model, eager)
    return result


def digest(plan: Mapping[str, Any]) -> str:
    """The content of a plan, without its CLOCK_FIELDS."""
    content = {name: value for name, value in plan.items() if name not in CLOCK_FIELDS}
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def judge(results: Mapping[str, Sequence[Mapping[str, Any]]], depths: Sequence[int]) -> list[str]:
    """What misses its bound, in words."""
    found = []
    for depth in depths:
        memo, inductor = results[f"memo-{depth}"][1], results[f"inductor-{depth}"][1]
        ratio = memo["first_step_cpu_s"] / inductor["first_step_cpu_s"]
        if ratio > MAX_FIRST_STEP_RATIO:
            found.append(
                f"{depth} layers: the second process's first step is {ratio:.2f} x Inductor's"
            )
        if not memo["num_recalled"]:
            found.append(f"{depth} layers: the second process traced the step again")
        if memo["num_hits"] < memo["num_regions"]:
            found.append(
                f"{depth} layers: {memo['num_hits']} of {memo['num_regions']} regions came from "
                "the cache"
            )
        if not memo["gradient_error"] <= MAX_GRADIENT_ERROR:
            found.append(f"{depth} layers: gradients differ by {memo['gradient_error']:.2g}")
    return found


def changed_plans(pairs: Mapping[str, Sequence[Pair]]) -> list[str]:
    """Rounds in which the second process planned otherwise than the first, in words."""
    return [
        f"{name}, round {number}: the second process made another plan"
        for name, rounds in pairs.items()
        for number, (first, second) in enumerate(rounds, start=1)
        if first.get("plan_sha256") != second.get("plan_sha256")
    ]


def show(results: Mapping[str, Sequence[Mapping[str, Any]]], depths: Sequence[int]) -> None:
    """The table: the second processes, and beside them the first ones."""
    rows = []
    for depth in depths:
        inductor, memo = results[f"inductor-{depth}"], results[f"memo-{depth}"]
        cells = [str(depth)]
        for key in ("first_step_s", "first_step_cpu_s"):
            theirs, ours = inductor[1][key], memo[1][key]
            cells += [f"{theirs:.1f} s", f"{ours:.1f} s", f"{ours / theirs:.3f}"]
        cells += [f"{memo[1]['lowering_s']:.1f} s", f"{memo[1]['planning_s']:.2f} s"]
        rows.append([*cells, *(f"{arm[0]['first_step_s']:.1f} s" for arm in (inductor, memo))])
    columns = ["layers", "inductor", "memo", "ratio", "processor", "memo's", "ratio"]
    columns += ["lowering", "planning"]
    columns += ["inductor, empty", "memo, empty"]
    harness.print_table("first step of a second process, warm caches", columns, rows)


if __name__ == "__main__":
    sys.exit(main())
