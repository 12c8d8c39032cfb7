"""Lynx's answers to this step, by name, for ablation (arXiv 2406.08756, docs/many-gpus.md).

    lynx-heu    all layers of a class recompute the same, wherever they stand.
    lynx-opt    each layer recomputes what suits its place; what lynx-heu tries is tried too.

Nothing is copied. What hides behind collectives is found in the step's own program: each plan is
simulated with its recomputations in windows (``planners.recompute_windows``), within
``ROOM_FACTORS`` times its peak. The papers' programs on instances of their own are ``memo lynx``.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from memo_compile.errors import UnsupportedGraph
from memo_compile.planners.move_rules import RecomputeOf
from memo_compile.planners.policy.milp import lowest_peak, solve_modes
from memo_compile.planners.policy.model import build_model
from memo_compile.planners.policy.modes import (
    ModeCost,
    Rights,
    layer_rights,
    make_mode,
    mode_cost,
    restricted,
)
from memo_compile.planners.policy.named import repeating_layers
from memo_compile.planners.policy.subsets import recompute_sets
from memo_compile.step.movable import LayerClass, Mode, MovableStep, Moves, Schedule
from memo_compile.step.simulate import STALL, simulate

LYNX = ("lynx-heu", "lynx-opt")

ROOM_FACTORS = (1.0, 1.1, 1.5)
"""A plan is tried within so many times its peak: what a window makes early is alive for longer."""

MAX_PRODUCT = 64
"""Most combinations of the sets of several classes; beyond, all classes take their n-th set."""

BOUND_SHARES = (0.0, 0.05, 0.15, 0.3, 0.5, 0.75)
"""Bounds in bytes for which layers are solved apart, from the smallest peak (0) to save-all (1)."""

HIDDEN_PRICE = 0.01
"""A second of recomputation that hides costs this much, so that of equal plans the lesser wins."""


def lynx_moves(step: MovableStep, policy: str, recompute: RecomputeOf) -> list[Moves]:
    """The plans among which ``policy``, one of LYNX, takes the fastest that fits."""
    modes = _modes_without_copies(step, recompute)
    plans = list(_plans_by_class(step, modes))
    if policy == "lynx-opt":
        plans += _plans_by_place(step, modes)
    return [
        Moves(modes=plan, schedule=Schedule(widen=room), policy=policy)
        for plan in dict.fromkeys(plans)
        for room in ROOM_FACTORS
    ]


def _modes_without_copies(step: MovableStep, recompute: RecomputeOf) -> list[tuple[ModeCost, ...]]:
    """Per layer its modes without copies, alike for a class; the first, or only one, keeps all."""
    repeating = set(repeating_layers(step))
    sets = {key: _possible_modes(cls, recompute) for key, cls in step.classes.items()}
    shared: dict[tuple[str, Rights, bool], tuple[ModeCost, ...]] = {}
    modes_of_layers = []
    for index, (layer, rights) in enumerate(zip(step.layers, layer_rights(step), strict=True)):
        key = layer.class_key, rights, index in repeating
        if key not in shared:
            cls = step.class_of(layer)
            modes = sets[layer.class_key] if index in repeating else sets[layer.class_key][:1]
            allowed = (restricted(cls, mode, rights) for mode in modes)
            shared[key] = tuple(mode_cost(cls, mode, recompute) for mode in allowed)
        modes_of_layers.append(shared[key])
    return modes_of_layers


def _possible_modes(cls: LayerClass, recompute: RecomputeOf) -> list[Mode]:
    """The modes of a class that only recompute, ascending in bytes freed; the first keeps all."""
    modes = []
    for slots in recompute_sets(cls):
        mode = make_mode(cls, recompute=slots)
        try:
            mode_cost(cls, mode, recompute)
        except UnsupportedGraph:
            continue
        modes.append(mode)
    return modes


def _plans_by_class(
    step: MovableStep, modes: Sequence[tuple[ModeCost, ...]]
) -> Iterator[tuple[Mode, ...]]:
    """Plans in which all layers of a class recompute the same (see ``MAX_PRODUCT``)."""
    num_modes = {  # of the classes that have a choice
        layer.class_key: len(costs)
        for layer, costs in zip(step.layers, modes, strict=True)
        if len(costs) > 1
    }
    product = itertools.product(*map(range, num_modes.values()))
    combinations = list(itertools.islice(product, MAX_PRODUCT + 1))
    if len(combinations) > MAX_PRODUCT:
        counts = num_modes.values()
        combinations = [tuple(min(n, count - 1) for count in counts) for n in range(max(counts))]
    for chosen in combinations:
        number_of = dict(zip(num_modes, chosen, strict=True))
        yield tuple(
            costs[min(number_of.get(layer.class_key, 0), len(costs) - 1)].mode
            for layer, costs in zip(step.layers, modes, strict=True)
        )


def _plans_by_place(
    step: MovableStep, modes: Sequence[tuple[ModeCost, ...]]
) -> Iterator[tuple[Mode, ...]]:
    """Plans of the integer program, for which seconds within a layer's windows are nearly free."""
    window_s = _window_s(step)
    priced: dict[int, tuple[ModeCost, ...]] = {}  # layers that share modes must share these too
    for costs in modes:
        priced.setdefault(id(costs), tuple(_with_window(cost, window_s) for cost in costs))
    model = build_model(step, [priced[id(costs)] for costs in modes], Schedule(layers=0))
    lowest = lowest_peak(model)
    if not lowest.status.has_solution:
        return
    floor, top = model.peak_bytes(lowest.chosen), model.peak_bytes([0] * model.num_layers)
    for share in BOUND_SHARES:
        solved = solve_modes(model, bound_bytes=int(floor + share * (top - floor)))
        if solved.status.has_solution:
            yield model.moves(solved.chosen, "lynx-opt").modes


def _window_s(step: MovableStep) -> float:
    """Seconds for which the backward of a layer waits for other ranks, on average."""
    problem = step.problem
    backward = {call.name for call in problem.calls[problem.first_backward :]}
    spans = simulate(problem, step.costs).spans
    waits = sum(
        span.end_s - span.start_s for span in spans if span.lane == STALL and span.name in backward
    )
    return waits / max(1, len(repeating_layers(step)))


def _with_window(cost: ModeCost, window_s: float) -> ModeCost:
    """``cost`` where as much of its recomputation as fits a layer's windows is nearly free."""
    beyond_s = max(0.0, cost.recompute_s - window_s)
    return replace(cost, recompute_s=beyond_s + HIDDEN_PRICE * (cost.recompute_s - beyond_s))
