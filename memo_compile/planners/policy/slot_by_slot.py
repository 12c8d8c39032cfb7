"""A plan near the floor with single slots moved otherwise: each change is simulated.

Greedy's model counts every copy as hidden by the same share, and its layers take few modes. Where
few bytes are free, what a copy costs depends on the call that needs its bytes: a change may save
the wait that the model did not see.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from memo_compile.planners.move_rules import recompute_keys
from memo_compile.planners.policy.candidate import Candidate
from memo_compile.planners.policy.modes import ModeCost, Rights, layer_rights
from memo_compile.step.movable import Action, LayerClass, Mode, MovableStep, Moves

MIN_GAIN = 2e-4
"""The least share of a step that a change gains."""

MIN_SIZE = 0.02
"""Slots of a smaller share of their layer's largest stay as they are."""

MAX_WAYS = 4
"""Most ways to recompute that the layers of a class take in one plan: each is compiled."""

Change = tuple[tuple[int, ...], Callable[[Mode], Mode]]
"""Layers of a class, and what becomes of their modes."""


def slot_by_slot(
    step: MovableStep,
    start: Candidate,
    modes: Sequence[Sequence[ModeCost]],
    evaluated: Callable[[Moves, float], Candidate | None],
    fits: Callable[[Candidate], bool],
    most_simulated: int,
) -> tuple[Candidate, int]:
    """``start`` with changes that make it faster, one after the other; how many were simulated.

    A change gives some layers another of their ``modes``, or moves one slot of theirs otherwise.
    ``evaluated`` simulates a plan, or tells without that it does not fit, or cannot cost less
    than so many seconds.
    """
    changes = list(_changes(step, modes))
    best, num_idle, num_simulated = start, 0, 0
    for change in itertools.cycle(changes):
        if num_idle == len(changes) or num_simulated == most_simulated:
            break  # none of them helps any more, or it takes too long
        num_idle += 1
        moves = _changed(best.moves, change)
        if moves is None or not _are_few(step, moves):
            continue
        candidate = evaluated(moves, best.cost_s)
        if candidate is None:
            continue
        num_simulated += 1
        if fits(candidate) and candidate.cost_s < best.cost_s * (1 - MIN_GAIN):
            best, num_idle = candidate, 0
    return best, num_simulated


def _changes(step: MovableStep, modes: Sequence[Sequence[ModeCost]]) -> Iterator[Change]:
    """Of all layers of a class that may, then of each by itself; whole modes first."""
    layers_of: dict[tuple[object, ...], tuple[list[int], Callable[[Mode], Mode]]] = {}
    for number, layer in enumerate(step.layers):
        for cost in modes[number]:
            taken = functools.partial(_taken, cost.mode)
            layers_of.setdefault((layer.class_key, cost.mode), ([], taken))[0].append(number)
    for number, (layer, rights) in enumerate(zip(step.layers, layer_rights(step), strict=True)):
        for slot, action in _actions(step.class_of(layer), rights):
            moved = functools.partial(_moved, slot, action)
            layers_of.setdefault((layer.class_key, slot, action), ([], moved))[0].append(number)
    for layers, change in layers_of.values():
        if len(layers) > 1:
            yield tuple(layers), change
    for layers, change in layers_of.values():
        yield from (((number,), change) for number in layers)


def _actions(cls: LayerClass, rights: Rights) -> Iterator[tuple[int, Action]]:
    least = MIN_SIZE * max((slot.size_bytes for slot in cls.slots), default=0)
    for slot in sorted(rights.offload | rights.recompute):
        if cls.slots[slot].size_bytes < least or cls.slots[slot].pinned is not None:
            continue
        yield slot, Action.SAVE
        if slot in rights.offload:
            yield slot, Action.OFFLOAD
        if slot in rights.recompute:
            yield slot, Action.RECOMPUTE


def _taken(mode: Mode, _: Mode) -> Mode:
    return mode


def _moved(slot: int, action: Action, mode: Mode) -> Mode:
    """``mode`` as it is where it recomputes some rows only."""
    if mode.recompute_rows is not None:
        return mode
    return replace(mode, actions=(*mode.actions[:slot], action, *mode.actions[slot + 1 :]))


def _changed(moves: Moves, change: Change) -> Moves | None:
    """``moves`` with that change; None where it is none."""
    layers, made = change
    modes = list(moves.modes)
    for layer in layers:
        modes[layer] = made(modes[layer])
    changed = replace(moves, modes=tuple(modes))
    return None if changed == moves else changed


def _are_few(step: MovableStep, moves: Moves) -> bool:
    ways: dict[str, set[object]] = {}
    for layer, mode in zip(step.layers, moves.modes, strict=True):
        ways.setdefault(layer.class_key, set()).add(_way(step.class_of(layer), mode))
    return all(len(class_ways - {()}) <= MAX_WAYS for class_ways in ways.values())


def _way(cls: LayerClass, mode: Mode) -> tuple[object, ...]:
    return tuple(recompute_keys(cls, mode))
