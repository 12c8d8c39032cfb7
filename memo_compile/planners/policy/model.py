"""The step as arithmetic: what a mode of each layer does to memory at every point, and to time.

The same model serves the greedy search and the program (``milp.py``). It differs from
``planners.moves`` and ``simulate`` in one thing: a copy holds its memory for the whole window that
the schedule's layers give it, where the real program frees memory as soon as the copy ends.
So its bytes are never too few for the schedule, and its seconds are those of the copy lanes.

A *point* is a place of the step at which bytes are counted. There is one for every call, with the
most bytes alive during it. Behind those come the points of every layer: the recomputations right
before the calls that are the first to read one of its slots.

``chosen`` is a plan as numbers: layer i takes mode ``modes[i][chosen[i]]``.
"""

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from memo_compile.planners.begin_order import gathers_of
from memo_compile.planners.least_seconds import least_of_step
from memo_compile.planners.move_rules import (
    RecomputeOf,
    StepFacts,
    facts_of,
    recompute_keys,
    recompute_rows,
)
from memo_compile.planners.policy.modes import ModeCost
from memo_compile.planners.transfers import at_once, late
from memo_compile.step.movable import (
    Action,
    Layer,
    Mode,
    MovableStep,
    Moves,
    Schedule,
    StepCosts,
    once_per_step,
)
from memo_compile.step.problem import CallKind, Problem, call_starts
from memo_compile.step.residency import step_constant_bytes
from memo_compile.step.simulate import memory_level, most_per_call

COPY_WEIGHT = 1e-4
"""A second of hidden copying costs this many seconds of the step, so that of two equally fast plans
the one that moves less is taken: copies take bandwidth from the kernels."""

MAX_LAST_LAYER_MODES = 3
"""Most other modes of the last layer that a plan near the floor is tried with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """A step with the modes that each layer may choose, under one schedule."""

    base_bytes: Any
    """Per point (int64): device bytes when everything is saved."""
    deltas: tuple[Any, ...]
    """Per layer, an array (modes, points) of what each mode adds to ``base_bytes``."""
    modes: tuple[tuple[ModeCost, ...], ...]
    """Per layer, the modes that it may take."""
    facts: StepFacts
    freed_at: tuple[int, ...]
    """Per layer, the index of the call before which its copies to the host have ended."""
    reload_at: tuple[int, ...]
    """Per layer, the index of the call before which its copies back are issued."""
    class_keys: tuple[str, ...]
    """Per layer, the key of its class."""
    costs: StepCosts
    schedule: Schedule
    stops: "tuple[_Stop, ...]"
    """The calls that matter to copies or recomputation, in order."""
    out_s: tuple[tuple[float, ...], ...]
    """Per layer and mode the seconds of its copies to the host."""
    back_s: tuple[tuple[float, ...], ...]
    """Likewise of its copies back."""
    copy_price: float = 0.0
    """Where copies are made at once: seconds of the step for each second of a copy that fits beside
    the computation. Some of them hide once waits and reloads are moved to where bytes allow it."""

    @property
    def num_layers(self) -> int:
        """How many layers may move something."""
        return len(self.modes)

    def bytes_at(self, chosen: Sequence[int]) -> Any:
        """Device bytes at every point under ``chosen``."""
        total = self.base_bytes.copy()
        for delta, mode in zip(self.deltas, chosen, strict=True):
            total += delta[mode]
        return total

    def peak_bytes(self, chosen: Sequence[int]) -> int:
        """The most of ``bytes_at``."""
        return int(self.bytes_at(chosen).max())

    def _modes_of(self, chosen: Sequence[int]) -> list[ModeCost]:
        """Per layer the mode that it takes under ``chosen``."""
        return [layer_modes[mode] for layer_modes, mode in zip(self.modes, chosen, strict=True)]

    def host_bytes(self, chosen: Sequence[int]) -> int:
        """Bytes that are copied to the host."""
        return sum(mode.host_bytes for mode in self._modes_of(chosen))

    def cost_s(self, chosen: Sequence[int]) -> float:
        """Seconds of the step, and COPY_WEIGHT of the seconds of its copies."""
        out_s = sum(map(operator.getitem, self.out_s, chosen))
        back_s = sum(map(operator.getitem, self.back_s, chosen))
        if not self.schedule.layers:
            recompute_s = sum(mode.recompute_s for mode in self._modes_of(chosen))
            return self._at_once_s(recompute_s, out_s, back_s)
        return self.step_s(chosen) + COPY_WEIGHT * (out_s + back_s)

    def _at_once_s(self, recompute_s: float, out_s: float, back_s: float) -> float:
        """Seconds of a step whose copies are made at once, once waits and reloads are moved.

        That is its computation, what a lane takes beyond it, and ``copy_price`` of all copies.
        """
        forward_s, backward_s = self.facts.halves_s
        backward_s += recompute_s
        beyond_s = max(0.0, out_s - forward_s) + max(0.0, back_s - backward_s)
        return forward_s + backward_s + beyond_s + self.copy_price * (out_s + back_s)

    def step_s(self, chosen: Sequence[int]) -> float:
        """Seconds of the step: every call in order, stalled where a copy has not ended.

        Layer i's copy to the host follows those of earlier layers on its lane, and begins when its
        forward has ended; its copies back follow those of later layers and begin when they are
        issued, before the call ``reload_at``.
        """
        modes = self._modes_of(chosen)
        now = out_lane = back_lane = 0.0
        out_end, back_end = [0.0] * len(modes), [0.0] * len(modes)
        for stop in self.stops:
            now += stop.before_s
            for layer in stop.freed:
                now = max(now, out_end[layer])
            for layer in stop.reloaded:
                if modes[layer].num_copies:
                    back_lane = max(back_lane, now) + self.back_s[layer][chosen[layer]]
                    back_end[layer] = back_lane
            for layer in stop.in_backward:
                now = max(now, back_end[layer]) + modes[layer].recompute_s
            now += stop.call_s
            for layer in stop.in_forward:
                if modes[layer].num_copies:
                    out_lane = max(out_lane, now) + self.out_s[layer][chosen[layer]]
                    out_end[layer] = out_lane
        return now

    def moves(self, chosen: Sequence[int], policy: str) -> Moves:
        """The moves of ``chosen``, as ``policy`` proposes them."""
        modes = tuple(cost.mode for cost in self._modes_of(chosen))
        schedule = replace(self.schedule, layers=0) if self.schedule.widen else self.schedule
        return Moves(modes=modes, schedule=schedule, policy=policy)


class _Stop(NamedTuple):
    """A call at which a copy or a recomputation of a layer may begin or end."""

    before_s: float
    """Seconds of the calls since the last stop."""
    call_s: float
    freed: Sequence[int]
    """Layers whose copies to the host have ended before the call."""
    reloaded: Sequence[int]
    """Layers whose copies back are issued before it."""
    in_backward: Sequence[int]
    """Layers whose backward it is."""
    in_forward: Sequence[int]
    """Layers whose forward it is."""


def _stops(facts: StepFacts, freed_at: Sequence[int], reload_at: Sequence[int]) -> Iterator[_Stop]:
    """The calls of the step that matter to copies; the last one in any case."""
    layers = range(len(freed_at))
    tables = (
        _layers_at(freed_at, layers),
        _layers_at(reload_at, facts.following),
        _layers_at(facts.backward_at, layers),
        _layers_at(facts.forward_at, layers),
    )
    before_s = 0.0
    for call, call_s in enumerate(facts.call_s):
        layers_at_call = [table.get(call, []) for table in tables]
        if any(layers_at_call) or call == len(facts.call_s) - 1:
            yield _Stop(before_s, call_s, *layers_at_call)
            before_s = 0.0
        else:
            before_s += call_s


def _layers_at(calls: Sequence[int], layers: Iterable[int]) -> dict[int, list[int]]:
    """Call -> those of ``layers`` of which ``calls``, one per layer, names that call."""
    layers_at: dict[int, list[int]] = {}
    for layer in layers:
        layers_at.setdefault(calls[layer], []).append(layer)
    return layers_at


def build_model(
    step: MovableStep,
    modes: Sequence[Sequence[ModeCost]],
    schedule: Schedule,
    copy_price: float = 0.0,
) -> StepModel:
    """The model of ``step`` whose layer i may take ``modes[i]``; mode 0 saves everything."""
    facts = facts_of(step)
    num_calls = len(facts.call_s)
    behind = facts.forward_at[schedule.layers + 1 :]  # per layer the forward that ends its copies
    freed_at = tuple(map(min, (*behind, *facts.turn_at[len(behind) :]), facts.turn_at))
    reload_at = tuple(_reload_calls(facts, schedule.layers))
    during, before = call_bytes(step)
    reads = [_first_reads(facts, owner) for owner in step.layers]
    # Points: all calls, and behind them (layer, call before which that may recompute).
    points = [(layer, at) for layer, calls in enumerate(reads) for at in sorted({*calls.values()})]
    point_calls = [at for _, at in points]
    point_of = {point: number for number, point in enumerate(points, start=len(during))}
    base = np.concatenate([during, before[point_calls]])
    deltas = []
    for layer, costs in enumerate(modes):
        delta = np.zeros((len(costs), len(base)), dtype=np.int64)
        window = (freed_at[layer], reload_at[layer]) if schedule.layers else (0, num_calls)
        for row, cost in zip(delta, costs, strict=True):
            parts = list(_parts(cost, reads[layer]))
            needed = _first_needs(parts)
            for start, end, size_bytes in _away(step, layer, cost.mode, window, needed):
                row[start:end] -= size_bytes
            row[len(during) :] = row[point_calls]
            for part in parts:
                row[point_of[layer, part.at]] += part.peak_bytes
                if cost.mode.recompute_rows is None:  # what save-all counts is not there yet
                    slots = step.class_of(step.layers[layer]).slots
                    made_bytes = sum(slots[slot].size_bytes for slot in part.slots)
                    row[point_of[layer, part.at]] -= made_bytes
        deltas.append(delta)
    return StepModel(
        base_bytes=base,
        deltas=tuple(deltas),
        modes=tuple(map(tuple, modes)),
        facts=facts,
        freed_at=freed_at,
        reload_at=reload_at,
        class_keys=tuple(layer.class_key for layer in step.layers),
        costs=step.costs,
        schedule=schedule,
        stops=tuple(_stops(facts, freed_at, reload_at)),
        out_s=tuple(tuple(cost.d2h_s(step.costs) for cost in costs) for costs in modes),
        back_s=tuple(tuple(cost.h2d_s(step.costs) for cost in costs) for costs in modes),
        copy_price=copy_price,
    )


def _reload_calls(facts: StepFacts, num_layers: int) -> Iterator[int]:
    """Per layer the call before which its copies back are issued, ``num_layers`` ahead of it."""
    place = {layer: at for at, layer in enumerate(facts.following)}
    for layer, turn in enumerate(facts.turn_at):
        before = place[layer] - num_layers - 1
        if before < 0:
            yield turn
        else:
            ended = facts.backward_at[facts.following[before]] + 1
            yield min(facts.backward_at[layer], max(turn, ended))


class _Part(NamedTuple):
    """What one region recomputes for a layer."""

    at: int
    """The call right before which it runs."""
    slots: tuple[int, ...]
    sources: tuple[int, ...]
    """The slots that it reads."""
    peak_bytes: int
    """In the arena, and what its kernels allocate themselves."""


def _first_needs(parts: Iterable[_Part]) -> dict[int, int]:
    """Slot -> the first call before which one of ``parts`` makes it or reads it."""
    first_use: dict[int, int] = {}
    for part in parts:
        for slot in (*part.slots, *part.sources):
            first_use[slot] = min(part.at, first_use.get(slot, part.at))
    return first_use


def _first_reads(facts: StepFacts, layer: Layer) -> dict[int, int]:
    """Slot -> the first call of the backward that reads it, where one does."""
    readers = facts.backward_readers
    return {slot: readers[value][0] for slot, value in enumerate(layer.values) if value in readers}


def _parts(cost: ModeCost, reads: Mapping[int, int]) -> Iterator[_Part]:
    """The recomputations of a mode; those that nothing reads do not run."""
    peaks = map(operator.add, cost.recompute_peaks, cost.recompute_outside)
    for key, sources, peak_bytes in zip(cost.keys, cost.recompute_sources, peaks, strict=True):
        calls = [reads[slot] for slot in key.slots if slot in reads]
        if calls:
            yield _Part(min(calls), key.slots, sources, peak_bytes)


def _away(
    step: MovableStep, layer: int, mode: Mode, window: tuple[int, int], needed: Mapping[int, int]
) -> Iterator[tuple[int, int, int]]:
    """(first call, end call, bytes) for which each slot that ``mode`` moves is off the device.

    Copies to the host have ended when ``window`` begins, and copies back begin when it ends.
    ``needed`` is what ``_first_needs`` gives.
    """
    facts, owner = facts_of(step), step.layers[layer]
    kinds = zip(step.class_of(owner).slots, mode.actions, owner.values, strict=True)
    for number, (slot, action, value) in enumerate(kinds):
        if action is Action.SAVE or value not in facts.backward_readers:
            continue
        start = facts.last_use[value] + 1
        end = facts.backward_readers[value][0]
        end = min(end, needed.get(number, end))
        if action is Action.OFFLOAD or mode.recompute_rows is not None:
            start, end = max(start, window[0]), min(end, window[1])
        if start < end:
            yield start, end, slot.size_bytes


def ever_smaller(
    model: StepModel, sequence: Iterable[tuple[int, ...]]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(peak, chosen) of those in ``sequence`` that have a smaller peak than all before them."""
    least: float = math.inf
    for chosen in sequence:
        peak = model.peak_bytes(chosen)
        if peak < least:
            least = peak
            yield peak, chosen


def last_layer_kept(
    model: StepModel, chosen: tuple[int, ...], below_bytes: int
) -> Iterator[tuple[int, ...]]:
    """``chosen`` with faster modes of the last layer that repeats, all peaks under ``below_bytes``.

    The fastest first, at most ``MAX_LAST_LAYER_MODES``, each with a smaller peak than the one
    before. The backward of that layer comes first, when all other layers' values are away: where
    the floor is near, it alone can be faster.
    """
    keys = model.class_keys
    repeating = [at for at in range(len(chosen)) if keys.count(keys[at]) > 1]
    if not repeating:
        return
    last = repeating[-1]
    others = [(*chosen[:last], mode, *chosen[last + 1 :]) for mode in range(len(model.modes[last]))]
    priced = sorted((model.cost_s(other), model.peak_bytes(other), other) for other in others)
    cost_s, num_others = model.cost_s(chosen), 0
    for other_s, peak, other in priced:
        if other_s < cost_s and peak < below_bytes and num_others < MAX_LAST_LAYER_MODES:
            num_others, below_bytes = num_others + 1, peak
            yield other


def least_bytes(step: MovableStep, moves: Moves) -> int:
    """A lower bound of the bytes alive of the plans of ``moves``, wherever their copies end.

    What is copied counts as gone from its last use in the forward to its first read in the
    backward. What is recomputed counts as gone to the end: a region may make it in fewer bytes.
    """
    facts, during = facts_of(step), least_alive(step)[0]
    gone = [0] * (len(during) + 1)
    for layer, mode in zip(step.layers, moves.modes, strict=True):
        for value, action in zip(layer.values, mode.actions, strict=True):
            readers = facts.backward_readers.get(value)
            if action is not Action.SAVE and readers:
                size_bytes = facts.size_of.get(value, 0)
                used, made = facts.last_use[value], facts.written_at[value]
                gone[used + (made == used)] += size_bytes
                gone[readers[0] if action is Action.OFFLOAD else -1] -= size_bytes
    return int((during - np.cumsum(gone)[:-1]).max())


def least_cost_s(step: MovableStep, moves: Moves, recompute: RecomputeOf) -> float:
    """A lower bound of what plans of ``moves`` cost: they compute, recompute, talk and copy."""
    facts, costs = facts_of(step), step.costs
    recompute_s, copies_s = [], []
    for layer, mode in zip(step.layers, moves.modes, strict=True):
        cls = step.class_of(layer)
        for key in recompute_keys(cls, mode):
            if any(layer.values[slot] in facts.backward_readers for slot in key.slots):
                recompute_s.append(recompute(key).seconds)
        rows = recompute_rows(cls, mode)
        for slot, value, action in zip(cls.slots, layer.values, mode.actions, strict=True):
            if action is Action.SAVE or value not in facts.backward_readers:
                continue
            if action is Action.OFFLOAD:
                num_bytes = facts.size_of.get(value, 0)
            else:  # the rows that are not made again
                num_bytes = 0 if rows is None else (slot.num_rows - rows) * slot.row_bytes
            if num_bytes:
                copies_s += [costs.d2h_s(num_bytes), costs.h2d_s(num_bytes)]
    more_s = math.fsum(recompute_s)
    step_s = least_of_step(step).with_more_s(more_s) if facts.talks else sum(facts.call_s) + more_s
    return step_s + COPY_WEIGHT * math.fsum(copies_s)


@once_per_step
def call_bytes(step: MovableStep) -> tuple[Any, Any]:
    """Per call (int64) the most device bytes during it, and those at the border before it."""
    problem = step.problem
    constant = step_constant_bytes(problem)
    held = memory_level(problem) + constant
    before = [start - 1 for start in call_starts(problem)[1:-1]]  # the line ahead of each call
    during = most_per_call(problem, facts_of(step).tables) + constant
    return during, np.array([constant, *held[before]], dtype=np.int64)


@once_per_step
def least_alive(step: MovableStep) -> tuple[Any, int]:
    """Lower bounds of the bytes alive in plans that keep everything: of calls, and of a border.

    The former are (int64) of each call; the latter is before the backward, 0 where calls say as
    much. What only the loss needs is gone on the backward's first line. Where that line is a
    copy's, it was never there together with what the first call makes.
    """
    problem, facts = step.problem, facts_of(step)
    first = problem.first_backward
    if not problem.loss_bytes or first == len(problem.calls):
        return call_bytes(step)[0] if not facts.talks else _kept_bytes(step, facts, problem), 0
    region = problem.regions[problem.calls[first].region]
    begun_bytes = sum(
        sum(made.size_bytes for made in kind if not made.start)
        for kind in (region.buffers, region.outside, region.outputs)
    )
    alive = _kept_bytes(step, facts, problem)
    without = _kept_bytes(step, facts, replace(problem, loss_bytes=0))
    if not problem.releases_pages:
        return np.maximum(without, alive - begun_bytes), 0
    return without, int(alive[first]) - begun_bytes if alive[first] > without[first] else 0


def _kept_bytes(step: MovableStep, facts: StepFacts, problem: Problem) -> Any:
    """Per call (int64) the device bytes with everything kept, collectives in the plans' order.

    0 for a call that plans put at another place, where other values are alive.
    """
    if not facts.talks:
        return most_per_call(problem, facts.tables) + step_constant_bytes(problem)
    plan = late(problem) if step.waits_late else at_once(problem)
    alive = most_per_call(plan) + step_constant_bytes(plan)
    bytes_of = {call.name: size for call, size in zip(plan.calls, alive, strict=True)}
    gathers = {call.name for gather in gathers_of(problem).values() for call in gather.calls}
    stays = [call.kind is CallKind.RUN and call.name not in gathers for call in problem.calls]
    return np.where(stays, [bytes_of[call.name] for call in problem.calls], 0)
