"""Plans without a solver: from save-all, one cheapest move after another, down to the floor.

A move gives another mode to the first layers of a class that share one mode. The first layers go
first because their copies have the longest window. Where the host has no room for all of them, it
gives the mode to the first one alone. The price of a move is the seconds that it adds
to the step, per byte that it takes off the points above the floor.
"""

from collections.abc import Iterator, Sequence, Set
from typing import Any

import numpy as np

from memo_compile.planners.policy.model import StepModel
from memo_compile.step.movable import RecomputeKey

MAX_KEYS = 2
"""Most ways to recompute that the layers of a class take in one plan: each is compiled."""

NUM_CHUNKS = 16
"""A class's layers move in at most about this many chunks, so that deep models take few moves."""


def greedy_sequence(
    model: StepModel, *, host_budget_bytes: int | None = None
) -> list[tuple[int, ...]]:
    """Choices of a mode per layer, save-all first, each with fewer bytes above the floor.

    Where no layers can move, because their class would recompute in too many ways, all layers that
    share a mode move together. Deterministic. Cost: steps x modes x layers; 80 layers take half a
    second.
    """
    chosen = (0,) * model.num_layers
    floor = _uniform_floor(model)
    sequence = [chosen]
    while True:
        best = _cheapest(model, chosen, floor, host_budget_bytes, few=True)
        best = best or _cheapest(model, chosen, floor, host_budget_bytes, few=False)
        if best is None:
            return sequence
        chosen = best
        sequence.append(chosen)


def _cheapest(
    model: StepModel,
    chosen: tuple[int, ...],
    floor: int,
    host_budget_bytes: int | None,
    *,
    few: bool,
) -> tuple[int, ...] | None:
    """``chosen`` after the cheapest move, of few layers or of all that share a mode; None: none."""
    now, cost = model.bytes_at(chosen), model.cost_s(chosen)
    over = _bytes_over(now, floor)
    best: tuple[float, float, tuple[int, ...]] | None = None
    for layers, mode, candidate in _moves(model, chosen, few=few):
        if exceeds(model, candidate, host_budget_bytes):
            layers, candidate = layers[:1], moved(chosen, layers[:1], mode)
            if exceeds(model, candidate, host_budget_bytes):
                continue
        changes = (model.deltas[at][mode] - model.deltas[at][chosen[at]] for at in layers)
        less = over - _bytes_over(sum(changes, start=now), floor)
        if less <= 0:
            continue
        price = (model.cost_s(candidate) - cost) / less
        if best is None or (price, -less) < best[:2]:
            best = (price, -less, candidate)
    return None if best is None else best[2]


def exceeds(model: StepModel, chosen: Sequence[int], host_budget_bytes: int | None) -> bool:
    """True where the host has no room for the copies."""
    return host_budget_bytes is not None and model.host_bytes(chosen) > host_budget_bytes


def _uniform_floor(model: StepModel) -> int:
    """The peak where every layer takes its mode of fewest bytes; at most that of save-all."""
    lowest = [int(delta.sum(axis=1).argmin()) for delta in model.deltas]
    return min(model.peak_bytes(lowest), model.peak_bytes((0,) * model.num_layers))


def refilled(model: StepModel, chosen: tuple[int, ...], host_budget_bytes: int) -> tuple[int, ...]:
    """``chosen`` with quicker modes of single layers, the first ones first, in the same bytes.

    A sequence of moves fills the host with what is cheapest at first, and at its end all layers may
    recompute though there is room for the copies of some.
    """
    now, cost = model.bytes_at(chosen), model.cost_s(chosen)
    peak = now.max()
    for layer, key in enumerate(model.class_keys):
        modes, deltas, current = model.modes[layer], model.deltas[layer], chosen[layer]
        fits = (now - deltas[current] + deltas).max(axis=1) <= peak
        best = current
        for mode in range(len(modes)):
            if not fits[mode] or modes[mode].recompute_s >= modes[current].recompute_s:
                continue
            other = moved(chosen, [layer], mode)
            if exceeds(model, other, host_budget_bytes) or not few_keys(model, other, key):
                continue
            if (other_s := model.cost_s(other)) < cost:
                best, cost = mode, other_s
        chosen, now = moved(chosen, [layer], best), now - deltas[current] + deltas[best]
    return chosen


def _bytes_over(at: Any, floor: int) -> float:
    """Bytes above ``floor``, on average over the points; the highest point counts once more."""
    return float(np.maximum(at - floor, 0).mean()) + float(max(int(at.max()) - floor, 0))


def moved(chosen: Sequence[int], layers: Sequence[int], mode: int) -> tuple[int, ...]:
    """``chosen`` with ``mode`` for ``layers``."""
    changed = list(chosen)
    for layer in layers:
        changed[layer] = mode
    return tuple(changed)


def _moves(
    model: StepModel, chosen: tuple[int, ...], *, few: bool
) -> Iterator[tuple[list[int], int, tuple[int, ...]]]:
    """Every move: some layers of a class, another mode for them, and what ``chosen`` becomes."""
    groups: dict[tuple[str, int], list[int]] = {}
    for layer, (key, mode) in enumerate(zip(model.class_keys, chosen, strict=True)):
        groups.setdefault((key, mode), []).append(layer)
    for (class_key, mode), layers in groups.items():
        size = max(1, model.class_keys.count(class_key) // NUM_CHUNKS)
        movable = layers[:size] if few else layers
        stay = {
            model.modes[layer][chosen[layer]].keys
            for layer, key in enumerate(model.class_keys)
            if key == class_key and layer not in movable
        }
        for other in range(1, len(model.modes[movable[0]])):
            keys = stay.union(model.modes[layer][other].keys for layer in movable)
            if other != mode and _are_few(keys):
                yield movable, other, moved(chosen, movable, other)


def few_keys(model: StepModel, chosen: Sequence[int], class_key: str) -> bool:
    """True when the layers of the class use at most MAX_KEYS ways to recompute."""
    keys = {
        model.modes[layer][mode].keys
        for layer, mode in enumerate(chosen)
        if model.class_keys[layer] == class_key
    }
    return _are_few(keys)


def _are_few(keys: Set[tuple[RecomputeKey, ...]]) -> bool:
    return len(keys - {()}) <= MAX_KEYS
