"""A plan near the floor with single slots moved otherwise: each change is simulated.

Greedy's model counts every copy as hidden by the same share, and its layers take few modes. Where
few bytes are free, what a copy costs depends on the call that needs its bytes: a change may save
the wait that the model did not see. For example the first layer's copy of a slot hides, and those
of the others would stall: then it alone copies the slot, and they recompute it.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from memo_compile.planners.move_rules import recompute_keys
from memo_compile.planners.policy.candidate import Candidate
from memo_compile.planners.policy.modes import ModeCost, Rights, are_few_ways, layer_rights
from memo_compile.step.movable import Action, LayerClass, Mode, MovableStep, Moves, RecomputeKey

MIN_GAIN = 2e-4
"""A change that gains less than this share of the step is not taken."""

MIN_SIZE_SHARE = 0.02
"""Slots of a smaller share of their layer's largest stay as they are."""

MAX_WAYS_BY_SLOT = 4
"""Most ways to recompute that the layers of a class take in one such plan: each is compiled."""

Change = tuple[tuple[int, ...], Callable[[Mode], Mode]]
"""Layers of one class, and the function that gives each its new mode for its old one."""


def slot_by_slot(
    step: MovableStep,
    start: Candidate,
    modes: Sequence[Sequence[ModeCost]],
    simulate_if_better: Callable[[Moves, float], Candidate | None],
    fits: Callable[[Candidate], bool],
    most_simulated: int,
) -> tuple[Candidate, int]:
    """``start`` with changes that make it faster, and how many plans were simulated.

    A change gives layers another of their ``modes``, or another action for one slot. It stays where
    the plan fits and is faster; changes are tried in turn until none helps any more, or
    ``most_simulated`` is reached. ``simulate_if_better`` simulates a plan; None: it surely does not
    fit, or cost less than the seconds given.
    """
    changes = list(_changes(step, modes))
    best, num_idle, num_simulated = start, 0, 0
    for change in itertools.cycle(changes):
        if num_idle == len(changes) or num_simulated == most_simulated:
            break
        num_idle += 1
        moves = _with_change(best.moves, change)
        if moves is None or not _has_few_ways(step, moves):
            continue
        candidate = simulate_if_better(moves, best.cost_s)
        if candidate is None:
            continue
        num_simulated += 1
        if fits(candidate) and candidate.cost_s < best.cost_s * (1 - MIN_GAIN):
            best, num_idle = candidate, 0
    return best, num_simulated


def _changes(step: MovableStep, modes: Sequence[Sequence[ModeCost]]) -> Iterator[Change]:
    """Every change, first of all layers of a class that can take it, then of each by itself."""
    layers_of: dict[tuple[object, ...], tuple[list[int], Callable[[Mode], Mode]]] = {}
    for number, layer in enumerate(step.layers):
        for cost in modes[number]:
            take = functools.partial(_take_mode, cost.mode)
            layers_of.setdefault((layer.class_key, cost.mode), ([], take))[0].append(number)
    for number, (layer, rights) in enumerate(zip(step.layers, layer_rights(step), strict=True)):
        for slot, action in _actions(step.class_of(layer), rights):
            move = functools.partial(_move_slot, slot, action)
            layers_of.setdefault((layer.class_key, slot, action), ([], move))[0].append(number)
    for layers, change in layers_of.values():
        if len(layers) > 1:
            yield tuple(layers), change
    for layers, change in layers_of.values():
        yield from (((number,), change) for number in layers)


def _actions(cls: LayerClass, rights: Rights) -> Iterator[tuple[int, Action]]:
    """(slot, action) for all that a layer with ``rights`` may do with slots that are not small."""
    least = MIN_SIZE_SHARE * max((slot.size_bytes for slot in cls.slots), default=0)
    for slot in sorted(rights.offload | rights.recompute):
        if cls.slots[slot].size_bytes < least or cls.slots[slot].pinned is not None:
            continue
        yield slot, Action.SAVE
        if slot in rights.offload:
            yield slot, Action.OFFLOAD
        if slot in rights.recompute:
            yield slot, Action.RECOMPUTE


def _take_mode(mode: Mode, _old: Mode) -> Mode:
    return mode


def _move_slot(slot: int, action: Action, mode: Mode) -> Mode:
    """``mode`` with ``action`` for ``slot``; a mix stays as it is."""
    if mode.recompute_rows is not None:
        return mode
    return replace(mode, actions=(*mode.actions[:slot], action, *mode.actions[slot + 1 :]))


def _with_change(moves: Moves, change: Change) -> Moves | None:
    """``moves`` with that change; None where it changes nothing."""
    layers, new_mode = change
    modes = list(moves.modes)
    for layer in layers:
        modes[layer] = new_mode(modes[layer])
    changed = replace(moves, modes=tuple(modes))
    return None if changed == moves else changed


def _has_few_ways(step: MovableStep, moves: Moves) -> bool:
    """True when the layers of every class recompute in at most MAX_WAYS_BY_SLOT ways."""
    ways: dict[str, set[tuple[RecomputeKey, ...]]] = {}
    for layer, mode in zip(step.layers, moves.modes, strict=True):
        ways.setdefault(layer.class_key, set()).add(recompute_keys(step.class_of(layer), mode))
    return all(are_few_ways(class_ways, MAX_WAYS_BY_SLOT) for class_ways in ways.values())
