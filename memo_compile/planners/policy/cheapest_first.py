"""Plans without a solver: from save-all, one cheapest move after another, down to the floor.

A move gives another mode to the first layers of a class that share one mode. The first layers go
first because their copies have the longest window. Where the host has no room for all of them, it
gives the mode to the first one alone. The price of a move is the seconds that it adds
to the step, per byte that it takes off the points above the floor.

``chosen`` is a plan as numbers: layer i takes mode ``chosen[i]`` of ``model.modes[i]``.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from memo_compile.planners.policy.model import StepModel
from memo_compile.planners.policy.modes import are_few_ways

MAX_WAYS = 2
"""Most ways to recompute that the layers of a class take in one plan: each is compiled."""

NUM_CHUNKS = 16
"""A class's layers move in at most about this many chunks, so that deep models take few moves."""


def greedy_sequence(
    model: StepModel, *, host_budget_bytes: int | None = None
) -> list[tuple[int, ...]]:
    """Plans as numbers, save-all first, each with fewer bytes above the floor than the one before.

    Where no chunk of layers can move, because their class would recompute in too many ways, all
    layers that share a mode move together. Deterministic. Cost: moves x modes x layers; 80 layers
    take half a second.
    """
    chosen = (0,) * model.num_layers
    floor = _uniform_floor(model)
    sequence = [chosen]
    while True:
        best = _cheapest_move(model, chosen, floor, host_budget_bytes, in_chunks=True)
        best = best or _cheapest_move(model, chosen, floor, host_budget_bytes, in_chunks=False)
        if best is None:
            return sequence
        chosen = best
        sequence.append(chosen)


def _cheapest_move(
    model: StepModel,
    chosen: tuple[int, ...],
    floor: int,
    host_budget_bytes: int | None,
    *,
    in_chunks: bool,
) -> tuple[int, ...] | None:
    """``chosen`` after the cheapest move; None where no move takes bytes off."""
    bytes_now, cost_now_s = model.bytes_at(chosen), model.cost_s(chosen)
    bytes_over = _bytes_over(bytes_now, floor)
    best: tuple[float, float, tuple[int, ...]] | None = None
    for layers, mode, candidate in _moves(model, chosen, in_chunks=in_chunks):
        if exceeds_host(model, candidate, host_budget_bytes):  # the first layer alone may fit
            layers, candidate = layers[:1], with_mode(chosen, layers[:1], mode)
            if exceeds_host(model, candidate, host_budget_bytes):
                continue
        changes = (model.deltas[at][mode] - model.deltas[at][chosen[at]] for at in layers)
        bytes_less = bytes_over - _bytes_over(sum(changes, start=bytes_now), floor)
        if bytes_less <= 0:
            continue
        price = (model.cost_s(candidate) - cost_now_s) / bytes_less
        if best is None or (price, -bytes_less) < best[:2]:
            best = (price, -bytes_less, candidate)
    return None if best is None else best[2]


def exceeds_host(model: StepModel, chosen: Sequence[int], host_budget_bytes: int | None) -> bool:
    """True where the host has no room for the copies."""
    return host_budget_bytes is not None and model.host_bytes(chosen) > host_budget_bytes


def _uniform_floor(model: StepModel) -> int:
    """The peak where every layer takes its mode of fewest bytes; at most that of save-all."""
    lowest = [int(delta.sum(axis=1).argmin()) for delta in model.deltas]
    return min(model.peak_bytes(lowest), model.peak_bytes((0,) * model.num_layers))


def refilled(model: StepModel, chosen: tuple[int, ...], host_budget_bytes: int) -> tuple[int, ...]:
    """``chosen`` with quicker modes of single layers, the first ones first, within its peak.

    The host budget holds as well. A sequence of moves fills the host with what is cheapest at
    first, and at its end all layers may recompute though the host has room for some copies.
    """
    bytes_now, cost_s = model.bytes_at(chosen), model.cost_s(chosen)
    peak = bytes_now.max()
    for layer, class_key in enumerate(model.class_keys):
        modes, deltas, current = model.modes[layer], model.deltas[layer], chosen[layer]
        fits = (bytes_now - deltas[current] + deltas).max(axis=1) <= peak
        best = current
        for mode in range(len(modes)):
            if not fits[mode] or modes[mode].recompute_s >= modes[current].recompute_s:
                continue
            other = with_mode(chosen, [layer], mode)
            if exceeds_host(model, other, host_budget_bytes):
                continue
            if has_few_ways(model, other, class_key) and (other_s := model.cost_s(other)) < cost_s:
                best, cost_s = mode, other_s
        chosen = with_mode(chosen, [layer], best)
        bytes_now = bytes_now - deltas[current] + deltas[best]
    return chosen


def _bytes_over(bytes_at: Any, floor: int) -> float:
    """Bytes above ``floor``, on average over the points; the highest point counts once more."""
    over = np.maximum(bytes_at - floor, 0)
    return float(over.mean()) + float(over.max())


def with_mode(chosen: Sequence[int], layers: Sequence[int], mode: int) -> tuple[int, ...]:
    """``chosen`` with ``mode`` for ``layers``."""
    changed = list(chosen)
    for layer in layers:
        changed[layer] = mode
    return tuple(changed)


_Move = tuple[list[int], int, tuple[int, ...]]
"""Layers that change, the mode that they take, and what ``chosen`` becomes."""


def _moves(model: StepModel, chosen: tuple[int, ...], *, in_chunks: bool) -> Iterator[_Move]:
    """Every move of a chunk of layers, or of all that share a mode, with few ways to recompute."""
    groups: dict[tuple[str, int], list[int]] = {}  # (class, mode) -> the layers that take it
    for layer, (key, mode) in enumerate(zip(model.class_keys, chosen, strict=True)):
        groups.setdefault((key, mode), []).append(layer)
    for (class_key, mode), layers in groups.items():
        size = max(1, model.class_keys.count(class_key) // NUM_CHUNKS)
        movable = layers[:size] if in_chunks else layers
        other_ways = {
            model.modes[layer][chosen[layer]].keys
            for layer, key in enumerate(model.class_keys)
            if key == class_key and layer not in movable
        }
        for other in range(1, len(model.modes[movable[0]])):
            ways = other_ways.union(model.modes[layer][other].keys for layer in movable)
            if other != mode and are_few_ways(ways, MAX_WAYS):
                yield movable, other, with_mode(chosen, movable, other)


def has_few_ways(model: StepModel, chosen: Sequence[int], class_key: str) -> bool:
    """True when the layers of the class recompute in at most MAX_WAYS ways."""
    ways = {
        model.modes[layer][mode].keys
        for layer, mode in enumerate(chosen)
        if model.class_keys[layer] == class_key
    }
    return are_few_ways(ways, MAX_WAYS)
