"""Heights, seconds and proofs of the placement planner. Run: python -m benchmarks.placement.

Prints, by ``--parts``: ``graphs``, the steps of real transformers models at 2 to 80 layers as the
backend plans them, saved and with offload and recompute, then an ablation of the solvers on the
same; ``challenging``, the public challenging instances. Every placement is checked by the
independent checker before its row is printed. Capturing the graphs takes half an hour the first
time; ``--cache`` keeps them. ``--problems DIR`` reads minimalloc CSV or JSON problems instead;
``--plain`` is without numba.
"""

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.graphs import CONFIGS, Graph, captured
from benchmarks.moved import moved_step
from memo_compile.planners.place_step import placement_problem
from memo_compile.planners.placement import (
    Buffer,
    Placement,
    PlacementProblem,
    check_placement,
    place,
)
from memo_compile.planners.placement.compiled import has_numba
from memo_compile.planners.placement.files import read_problem
from memo_compile.planners.solver import SolveStatus

CHALLENGING = Path(__file__).parent.parent / "tests" / "data" / "minimalloc"
CAPACITY_BYTES = 1048576
LAYERS = (2, 8, 32, 80)
LIMIT_S = {2: 2.0, 8: 2.0, 32: 5.0, 80: 10.0}
"""Seconds that a plan may take at each depth."""
PARTS = ("graphs", "challenging")
MOST_RATIO = {False: 1.001, True: 1.01}
"""Arena over lower bound that is asked for: saved only, and with offload and recompute."""

BACKEND_LIMIT_S = 5.0
"""The backend's default time limit for placement."""
VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"solver": "greedy"},
    "MIP": {"solver": "mip"},
    "search": {"solver": "search"},
    "auto": {},
}


def timed(problem: PlacementProblem, **options: Any) -> tuple[Placement, float]:
    """The checked placement and its wall time."""
    begin = time.perf_counter()
    found = place(problem, **options)
    seconds = time.perf_counter() - begin
    fits = found.status in (SolveStatus.OPTIMAL, SolveStatus.FEASIBLE)
    check_placement(problem, found, capacity=fits)
    return found, seconds


def ratio(found: Placement) -> float:
    return found.height_bytes / max(found.lower_bound_bytes, 1)


def graph_problems(
    layers: tuple[int, ...],
    cache: Path,
    models: tuple[str, ...],
    seeds: tuple[int, ...] = (0, 1),
) -> Iterator[tuple[int, str, str, PlacementProblem]]:
    """(layers, model, variant, problem) of every captured graph, saved first, then moved.

    The one graph with the Inductor lowering is the backend's default; its regions are fused.
    """
    for depth in layers:
        graphs = [Graph(model=model, num_layers=depth) for model in models]
        if depth == 8 and "llama" in models:
            graphs.append(Graph(model="llama", num_layers=8, lowering="inductor"))
        for graph in graphs:
            name = graph.model if graph.lowering == "aten" else f"{graph.model}, inductor"
            try:
                step = captured(graph, cache)
            except harness.ChildFailed as failure:
                print(f"{depth:6} {name:15} not captured: {str(failure).splitlines()[0]}")
                continue
            yield depth, name, "saved", placement_problem(step)
            for seed in seeds:
                yield depth, name, f"moved {seed}", placement_problem(moved_step(step, seed))
                mixed = moved_step(step, seed, by_layer=True)
                yield depth, name, f"mixed {seed}", placement_problem(mixed)


def run_graphs(
    layers: tuple[int, ...], cache: Path, models: tuple[str, ...], use_numba: bool | None
) -> None:
    print("\nreal training graphs, solver auto: arena / lower bound, seconds (best of 3)")
    print("moved: offload and recompute drawn for each class; mixed: for each layer anew")
    print("layers model           variant buffers    ratio seconds status")
    for depth, model, variant, problem in graph_problems(layers, cache, models):
        limit_s = min(LIMIT_S[depth], BACKEND_LIMIT_S)
        runs = [timed(problem, time_limit_s=limit_s, use_numba=use_numba) for _ in range(3)]
        found, seconds = min(runs, key=lambda run: run[1])
        bad = ratio(found) > MOST_RATIO[variant != "saved"] or seconds > LIMIT_S[depth]
        print(
            f"{depth:6} {model:15} {variant} {len(problem.buffers):7} "
            f"{ratio(found):8.5f} {seconds:7.3f} {found.status.value}{'  MISSED' if bad else ''}",
            flush=True,
        )


def run_graph_ablation(depth: int, cache: Path, models: tuple[str, ...]) -> None:
    print(f"\nreal training graphs, ablation at {depth} layers: arena / lower bound (seconds)")
    names = [*VARIANTS, "MIP on MIP"]
    print("model           variant " + " ".join(f"{name:>17}" for name in names))
    for _, model, variant, problem in graph_problems((depth,), cache, models, seeds=(0,)):
        cells = []
        for options in VARIANTS.values():
            found, seconds = timed(problem, time_limit_s=10, **options)
            cells.append(f"{ratio(found):8.5f} ({seconds:5.2f}s)")
        begin = time.perf_counter()
        height, bound = paper_height(problem, 10.0), found.lower_bound_bytes
        cells.append(f"{height / bound:8.5f} ({time.perf_counter() - begin:5.2f}s)")
        row = " ".join(f"{cell:>17}" for cell in cells)
        print(f"{model:15} {variant} {row}", flush=True)


def paper_height(problem: PlacementProblem, time_limit_s: float) -> int:
    """Arena in bytes as the paper plans it: a MIP for each class, then one where calls are boxes.

    A box is as high as its class's transients and lives as long. Where the upper program
    has too many pairs to be written down, its greedy start stands.
    """
    members: dict[str, list[Buffer]] = {}
    for buffer in problem.buffers:
        if buffer.block is not None:
            members.setdefault(buffer.block, []).append(buffer)
    heights: dict[tuple[object, ...], int] = {}
    boxes = []
    for name, inside in members.items():
        lower, upper = min(b.lower for b in inside), max(b.upper for b in inside)
        key = tuple((b.lower - lower, b.upper - lower, b.size) for b in inside)
        if key not in heights:
            part = PlacementProblem(buffers=tuple(inside), alignment=problem.alignment)
            heights[key] = place(part, solver="mip", time_limit_s=1.0).height_bytes
        boxes.append(Buffer(id=f"box {name}", lower=lower, upper=upper, size=heights[key]))
    rest = tuple(b for b in problem.buffers if b.block is None)
    top = PlacementProblem(buffers=(*rest, *boxes), alignment=problem.alignment)
    return place(top, solver="mip", time_limit_s=time_limit_s).height_bytes


def run_challenging(use_numba: bool | None) -> None:
    print(f"\nchallenging instances, capacity {CAPACITY_BYTES}, best of 3")
    total = 0.0
    for path in sorted(CHALLENGING.glob("*.csv")):
        problem = read_problem(path, capacity=CAPACITY_BYTES)
        runs = [timed(problem, time_limit_s=120, use_numba=use_numba) for _ in range(3)]
        found, seconds = min(runs, key=lambda run: run[1])
        total += seconds
        print(f"{path.stem:12} {len(problem.buffers):5} {found.status.value:10} {seconds:8.3f} s")
    print(f"{'together':29} {total:8.3f} s")


def run_problems(folder: Path, use_numba: bool | None, time_limit_s: float) -> None:
    print("file                                  buffers    ratio seconds status")
    for path in sorted([*folder.glob("*.csv"), *folder.glob("*.json")]):
        problem = read_problem(path)
        found, seconds = timed(problem, use_numba=use_numba, time_limit_s=time_limit_s)
        print(
            f"{path.name:37} {len(problem.buffers):7} {ratio(found):8.5f} "
            f"{seconds:7.3f} {found.status.value}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=Path, help="folder of .csv and .json problems")
    parser.add_argument("--plain", action="store_true", help="the search without numba")
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS), choices=LAYERS)
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds, with --problems")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--models", nargs="+", default=list(CONFIGS), choices=CONFIGS)
    parser.add_argument("--cache", type=Path, help="folder of the captured graphs")
    arguments = parser.parse_args()
    use_numba = False if arguments.plain else None
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, "
        f"numba {'off' if arguments.plain or not has_numba() else 'on'}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    if arguments.problems:
        run_problems(arguments.problems, use_numba, arguments.time_limit)
        return
    layers = tuple(arguments.layers)
    if "graphs" in arguments.parts:
        cache = arguments.cache or Path(tempfile.gettempdir()) / "memo-graphs"
        models = tuple(arguments.models)
        run_graphs(layers, cache, models, use_numba)
        run_graph_ablation(8, cache, models)
    if "challenging" in arguments.parts:
        run_challenging(use_numba)


if __name__ == "__main__":
    main()
