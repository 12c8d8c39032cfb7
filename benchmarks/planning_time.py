"""How long planning takes: ``python -m benchmarks.planning_time``.

A 32-layer and an 80-layer model (Llama-3-8B and 70B) on fake tensors, so that only planning
counts: deciding what moves, placing and checking, solver included; not tracing and lowering. The
budget is halfway between the floor and what policy save needs, where there is most to decide.

Passes when the 32-layer model takes under 10 s and the 80-layer one under 15 s, on two cores. Each
model is planned again under a profiler, which tells where the time goes. Then ``memo plan`` as a
user calls it, from the start of the process to its end; what it remembers is empty at first, and
its modules and the placement search are compiled, as once on each machine. Judged are processor
seconds, which others on the machine change less than seconds.
"""

import argparse
import compileall
import cProfile
import json
import math
import os
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import harness
from memo_compile.units import format_bytes

MODULE = "benchmarks.planning_time"
MAX_PLANNING_S = {32: 10.0, 80: 15.0}
"""By the number of layers."""
MODELS = ("llama3-8b", "llama3-70b")
LLAMA = "llama3-8b --seq 131072"
LARGE = "llama3-70b --seq 16384 --tp 8"
COMMANDS = (
    (LLAMA, 15.0),
    (LLAMA, 5.0),
    *((f"{LLAMA} --budget {size}GiB", 25.0) for size in (120, 105, 100, 95, 90, 85, 80, 75)),
    *((f"{LLAMA} --budget {size}GiB", 25.0) for size in (70, 64)),
    (f"{LLAMA} --budget 90GiB", 5.0),
    (f"{LLAMA} --host-budget 400GiB", 25.0),
    ("llama3-8b --seq 65536", 15.0),
    (LARGE, 25.0),
    *((f"{LARGE} --budget {size}GiB", 30.0) for size in (100, 80, 60)),
    ("llama3-8b --max-seq", 60.0),
    (f"{LLAMA} --sweep budget", math.inf),
)
"""Arguments of ``memo plan`` and its most processor seconds; each may use what those before
recorded. 70 and 64 GiB, and 60 of the large one, fit nothing: the answer is the smallest plan.
Another length, 65,536 tokens, is traced."""
STAGES = (
    ("lowering", "lower.py", "lower_regions"),
    ("choosing", "decide.py", "decide"),
    ("simulating", "simulate.py", "simulate"),
    ("peaks of candidates", "simulate.py", "peak_live_bytes"),
    ("step programs of candidates", "moves.py", "apply_moves"),
    ("solver", "solver.py", "solve"),
    ("placing", "place_step.py", "placed_step"),
    ("checking", "check_plan.py", "check"),
)
"""(what, file, function) of the profile's lines; a later stage may be inside an earlier one."""


def main() -> int:
    """Plan every model in a process of its own, print where the time goes, judge."""
    parser = harness.parser(__doc__, sizes={"tokens": 16384})
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated names")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--no-commands", action="store_true", help="planning alone")
    parser.add_argument("--without", default="", help="commands left out: max-seq,sweep")
    parser.add_argument("--repeats", type=int, default=3, help="plans; the median counts")
    return harness.run_benchmark("planning_time", parser.parse_args(), measure, run_child)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All models, and the verdict."""
    rows = []
    shared = harness.passed_on(options, "tokens", "policy", "repeats")
    for name in filter(None, options.models.split(",")):
        arm = harness.Arm(name=name, arguments=(f"--child={name}", *shared))
        rows.append(harness.run_arm(MODULE, arm, timeout_s=2 * harness.CHILD_TIMEOUT_S))
        show(rows[-1])
    for room in ("memo_compile", "runtime"):
        compileall.compile_dir(harness.ROOT / room, quiet=1)
    compile_search()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        commands = [run_command(*command, cache) for command in asked_commands(options)]
    late = [row for row in commands if row["most_s"] and row["cpu_s"] > row["most_s"]]
    return {
        "rows": rows,
        "commands": commands,
        "failures": [
            *(failure for row in rows for failure in judge(row)),
            *(f"{row['command']}: {row['cpu_s']:.1f} s of {row['most_s']:.0f} s" for row in late),
        ],
    }


def compile_search() -> None:
    """The search for placements is compiled, as once on each machine."""
    from memo_compile.planners.placement import Buffer, PlacementProblem, place

    buffers = tuple(Buffer(id=str(at), lower=at, upper=at + 3, size=3 + at % 5) for at in range(60))
    place(PlacementProblem(buffers=buffers), solver="search", use_numba=True)


def asked_commands(options: argparse.Namespace) -> list[tuple[str, float]]:
    """Those of COMMANDS that are not left out."""
    left_out = [word for word in options.without.split(",") if word]
    asked = () if options.no_commands else COMMANDS
    return [command for command in asked if not any(word in command[0] for word in left_out)]


def run_command(arguments_: str, most_s: float, cache: str) -> dict[str, Any]:
    """``memo plan`` with these arguments in a process of its own.

    ``cache`` is the folder of what it remembers.

    Raises:
        CalledProcessError: it did not answer.
    """
    call = [sys.executable, "-m", "memo_compile.cli.main", "plan"]
    begin, before_s = time.perf_counter(), children_cpu_s()
    done = subprocess.run(
        [*call, *arguments_.split(), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
        env={**os.environ, "XDG_CACHE_HOME": cache},
    )
    if done.returncode not in (0, 1):  # 1: the smallest plan is over the budget
        raise subprocess.CalledProcessError(done.returncode, call)
    seconds, cpu_s = time.perf_counter() - begin, children_cpu_s() - before_s
    command = f"memo plan {arguments_}"
    print(f"{command}: {seconds:.1f} s, {cpu_s:.1f} of a processor (at most {most_s:.0f})")
    body = json.loads(done.stdout)
    return {
        "command": command,
        "seconds": seconds,
        "cpu_s": cpu_s,
        "most_s": most_s if most_s < math.inf else None,
        **{name: body.get(name) for name in ("fits", "max_seq", "step_s")},
    }


def children_cpu_s() -> float:
    """Processor seconds of all processes that have ended: less than their time if others run."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """Plan one model: seconds, and those of its stages."""
    import statistics

    planner = Planner(options.child, options.tokens)
    floor = harness.floor_of(lambda: planner(memory_budget=1))
    save = planner(policy="save").peak_bytes
    under = {"memory_budget": (floor + save) // 2, "policy": options.policy}
    planner.cpu_s.clear()
    plans = [planner(**under) for _ in range(options.repeats)]
    cpu_s = statistics.median(planner.cpu_s)
    profile = cProfile.Profile()
    profile.enable()
    planner(**under)
    profile.disable()
    stats = pstats.Stats(profile)
    return {
        "model": options.child,
        "layers": planner.shape.num_layers,
        "tokens": options.tokens,
        "floor_bytes": floor,
        "save_bytes": save,
        "budget_bytes": under["memory_budget"],
        "peak_bytes": plans[-1].peak_bytes,
        "policy": plans[-1].policy,
        "planning_s": statistics.median(plan.planning_s for plan in plans),
        "planning_cpu_s": cpu_s,
        "all_planning_s": [plan.planning_s for plan in plans],
        "lowering_s": plans[-1].lowering_s,
        "stages": stages(stats),
    }


class Planner:
    """Plans one named model again and again, as on an H200."""

    def __init__(self, name: str, tokens: int) -> None:
        from memo_compile.costs.models import find_model

        self.shape = find_model(name)
        self.tokens = tokens
        self.cpu_s: list[float] = []
        """Of every planning that succeeded: on a busy machine less than its seconds."""
        self._time_plans()

    def _time_plans(self) -> None:
        from memo_compile.driver.step_planner import plan_known
        from memo_compile.offline import offline_step

        def timed(*arguments_: Any) -> Any:
            begin = time.process_time()
            planned = plan_known(*arguments_)
            self.cpu_s.append(time.process_time() - begin)
            return planned

        mock.patch.object(offline_step, "plan_known", timed).start()

    def __call__(self, **options: Any) -> Any:
        """The plan under ``options``."""
        import memo_compile

        model, inputs = harness.fake_stage(self.shape.name, layers=None, tokens=self.tokens)
        options = {"lowering": "aten", "host_budget": 2**42, **options}
        return memo_compile.plan(model, *inputs, options=options, hardware="h200")


def stages(stats: pstats.Stats) -> dict[str, dict[str, float]]:
    """Calls and seconds, what they call included, of each of STAGES."""
    found: dict[str, dict[str, float]] = {}
    for (path, _line, function), row in stats.stats.items():  # type: ignore[attr-defined]
        for what, file, wanted in STAGES:
            if Path(path).name == file and function == wanted and "memo_compile" in path:
                before = found.get(what, {"calls": 0, "seconds": 0.0})
                calls, seconds = before["calls"] + row[1], before["seconds"] + row[3]
                found[what] = {"calls": calls, "seconds": seconds}
    return found


def judge(row: dict[str, Any]) -> list[str]:
    """What takes too long, or was not planned under its budget, in words."""
    failures = []
    limit = MAX_PLANNING_S.get(row["layers"])
    if limit is not None and row["planning_s"] >= limit:
        failures.append(
            f"{row['model']}, {row['layers']} layers: planning takes {row['planning_s']:.1f} s, "
            f"expected under {limit:.0f} s"
        )
    if row["peak_bytes"] > row["budget_bytes"]:
        failures.append(f"{row['model']}: peak {row['peak_bytes']} over {row['budget_bytes']}")
    return failures


def show(row: dict[str, Any]) -> None:
    """One model's seconds and stages."""
    print(
        f"{row['model']}, {row['layers']} layers, {row['tokens']} tokens, budget "
        f"{format_bytes(row['budget_bytes'])} between {format_bytes(row['floor_bytes'])} and "
        f"{format_bytes(row['save_bytes'])}: planning {row['planning_s']:.2f} s "
        f"({row['planning_cpu_s']:.2f} s of processor time), lowering "
        f"{row['lowering_s']:.2f} s (aten); chosen: {row['policy']}"
    )
    table = [
        (what, f"{stage['calls']:.0f}", f"{stage['seconds']:.2f} s")
        for what, stage in row["stages"].items()
    ]
    harness.print_table(
        "under a profiler, about twice as slow", ("stage", "calls", "with what it calls"), table
    )


if __name__ == "__main__":
    sys.exit(main())
