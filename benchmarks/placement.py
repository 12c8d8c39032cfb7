"""Heights, seconds and proofs of the placement planner. Run: python -m benchmarks.placement.

Prints: the public challenging instances; training steps at 2 to 80 layers, saved and with offload
and recompute; the same with irregular sizes; the two levels against flat; and an ablation of the
solvers. Every placement is checked by the independent checker before its row is printed.
``--problems DIR`` reads minimalloc CSV or JSON problems instead; ``--plain`` is without numba.
"""

import argparse
import platform
import time
from pathlib import Path
from typing import Any

from benchmarks.training_steps import MODELS, make_irregular_step, make_step
from memo_compile.planners.placement import (
    Placement,
    PlacementProblem,
    PlacementStatus,
    check_placement,
    place,
)
from memo_compile.planners.placement.bilevel import bilevel_offsets
from memo_compile.planners.placement.compiled import has_numba
from memo_compile.planners.placement.files import read_problem
from memo_compile.planners.placement.instance import build_instance
from memo_compile.planners.placement.search import SearchOptions

CHALLENGING = Path(__file__).parent.parent / "tests" / "data" / "minimalloc"
CAPACITY_BYTES = 1048576
LAYERS = (2, 8, 32, 80)
LIMIT_S = {2: 2.0, 8: 2.0, 32: 5.0, 80: 10.0}
"""Seconds that a plan may take at each depth."""
MOST_RATIO = {False: 1.001, True: 1.01}
"""Arena over lower bound that is asked for: saved only, and with offload and recompute."""


def timed(problem: PlacementProblem, **options: Any) -> tuple[Placement, float]:
    """The checked placement and its wall time."""
    begin = time.perf_counter()
    found = place(problem, **options)
    seconds = time.perf_counter() - begin
    fits = found.status in (PlacementStatus.OPTIMAL, PlacementStatus.FEASIBLE)
    check_placement(problem, found, capacity=fits)
    return found, seconds


def ratio(found: Placement) -> float:
    return found.height_bytes / max(found.lower_bound_bytes, 1)


def run_challenging(options: SearchOptions) -> None:
    print(f"\nchallenging instances, capacity {CAPACITY_BYTES}, best of 3")
    total = 0.0
    for path in sorted(CHALLENGING.glob("*.csv")):
        problem = read_problem(path, capacity=CAPACITY_BYTES)
        runs = [timed(problem, time_limit_s=120, options=options) for _ in range(3)]
        found, seconds = min(runs, key=lambda run: run[1])
        total += seconds
        print(f"{path.stem:12} {len(problem.buffers):5} {found.status.value:10} {seconds:8.3f} s")
    print(f"{'together':29} {total:8.3f} s")


def run_steps(layers: tuple[int, ...], options: SearchOptions) -> None:
    print("\ntraining steps, solver auto: arena / lower bound, seconds (best of 3)")
    print("layers model            moved buffers    ratio seconds status")
    for depth in layers:
        for model in MODELS:
            for moved in (False, True):
                problem = make_step(model, depth, moved=moved)
                limit_s = LIMIT_S[depth]
                runs = [timed(problem, time_limit_s=limit_s, options=options) for _ in range(3)]
                found, seconds = min(runs, key=lambda run: run[1])
                bad = ratio(found) > MOST_RATIO[moved] or seconds > LIMIT_S[depth]
                print(
                    f"{depth:6} {model:16} {moved!s:5} {len(problem.buffers):7} "
                    f"{ratio(found):8.5f} {seconds:7.3f} {found.status.value}"
                    f"{'  MISSED' if bad else ''}"
                )


def run_irregular(layers: tuple[int, ...], options: SearchOptions) -> None:
    print("\nirregular steps (random sizes, random offload and recompute), arena / lower bound")
    print("layers model            seed buffers     auto seconds   greedy two-level")
    for depth in layers:
        for model in MODELS:
            for seed in range(2):
                problem = make_irregular_step(model, depth, seed)
                found, seconds = timed(problem, time_limit_s=LIMIT_S[depth], options=options)
                greedy, _ = timed(problem, solver="greedy")
                two, _ = timed(problem, solver="search", levels="bilevel", time_limit_s=1.0)
                print(
                    f"{depth:6} {model:16} {seed:4} {len(problem.buffers):7} {ratio(found):8.5f} "
                    f"{seconds:7.3f} {ratio(greedy):8.5f} {ratio(two):9.5f}"
                    f"{'  MISSED' if ratio(found) > MOST_RATIO[True] else ''}"
                )


def run_levels(layers: tuple[int, ...]) -> None:
    print("\ntwo levels against flat: height over the lower bound, seconds; level 1 alone")
    print("layers model            moved     flat seconds two-level seconds level-1 s    loss")
    for depth in layers:
        for model in MODELS:
            for moved in (False, True):
                problem = make_step(model, depth, moved=moved)
                flat, flat_s = timed(problem, levels="flat", time_limit_s=LIMIT_S[depth])
                two, two_s = timed(
                    problem, solver="search", levels="bilevel", time_limit_s=LIMIT_S[depth]
                )
                loss = two.height_bytes / flat.height_bytes - 1
                print(
                    f"{depth:6} {model:16} {moved!s:5} {ratio(flat):8.5f} {flat_s:7.3f} "
                    f"{ratio(two):9.5f} {two_s:7.3f} {level1_seconds(problem):9.3f} {loss:8.3%}"
                )


def level1_seconds(problem: PlacementProblem) -> float:
    """Seconds of level 1: the transients of the first block of each class and nothing else."""
    first = {block.class_key: block.id for block in reversed(problem.blocks)}
    chosen = set(first.values())
    part = PlacementProblem(
        buffers=tuple(b for b in problem.buffers if b.block in chosen),
        blocks=tuple(b for b in problem.blocks if b.id in chosen),
        alignment=problem.alignment,
    )
    instance = build_instance(part)
    begin = time.perf_counter()
    bilevel_offsets(instance, 0, begin)
    return time.perf_counter() - begin


def run_ablation(depth: int) -> None:
    print(f"\nablation at {depth} layers, offload and recompute: arena / lower bound (seconds)")
    variants = {
        "greedy": {"solver": "greedy", "levels": "flat"},
        "greedy 2-level": {"solver": "greedy", "levels": "bilevel"},
        "MIP per layer": {"solver": "mip", "levels": "bilevel"},
        "MIP flat": {"solver": "mip", "levels": "flat"},
        "search flat": {"solver": "search", "levels": "flat"},
        "search 2-level": {"solver": "search", "levels": "bilevel"},
        "auto": {},
    }
    print("model            " + " ".join(f"{name:>17}" for name in variants))
    for model in MODELS:
        problem = make_step(model, depth, moved=True)
        cells = []
        for options in variants.values():
            found, seconds = timed(problem, time_limit_s=10, **options)
            cells.append(f"{ratio(found):8.5f} ({seconds:5.2f}s)")
        print(f"{model:16} " + " ".join(f"{cell:>17}" for cell in cells))


def run_problems(folder: Path, options: SearchOptions, time_limit_s: float) -> None:
    print("file                                  buffers blocks    ratio  2-level seconds status")
    for path in sorted([*folder.glob("*.csv"), *folder.glob("*.json")]):
        problem = read_problem(path)
        found, seconds = timed(problem, options=options, time_limit_s=time_limit_s)
        two = ratio(timed(problem, solver="search", levels="bilevel")[0]) if problem.blocks else 0
        print(
            f"{path.name:37} {len(problem.buffers):7} {len(problem.blocks):6} {ratio(found):8.5f} "
            f"{two:8.5f} {seconds:7.3f} {found.status.value}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=Path, help="folder of .csv and .json problems")
    parser.add_argument("--plain", action="store_true", help="the search without numba")
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS), choices=LAYERS)
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds, with --problems")
    arguments = parser.parse_args()
    options = SearchOptions(use_numba=False) if arguments.plain else SearchOptions()
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, "
        f"numba {'off' if arguments.plain or not has_numba() else 'on'}"
    )
    if arguments.problems:
        run_problems(arguments.problems, options, arguments.time_limit)
        return
    run_challenging(options)
    run_steps(tuple(arguments.layers), options)
    run_irregular(tuple(arguments.layers), options)
    run_levels(tuple(arguments.layers))
    run_ablation(8)


if __name__ == "__main__":
    main()
