"""The step as arithmetic: what a mode of each layer does to memory at every point, and to time.

The same model serves the greedy search and the program (``milp.py``). It is that of
``planners.moves`` and ``simulate`` but for one thing: copies have the whole window that the
schedule's lag and lead give them, where the real program frees memory as soon as a copy has ended.
So its bytes are never too few for the schedule, and its seconds are those of the copy lanes.

Points: one for every call, with the most bytes alive during it; then one for every layer, the
recomputation right before its backward.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from memo_compile.planners.move_rules import facts_of
from memo_compile.planners.policy.modes import ModeCost
from memo_compile.step.movable import Action, Layer, Mode, MovableStep, Schedule, StepCosts
from memo_compile.step.problem import Phase, Problem, call_starts
from memo_compile.step.residency import step_constant_bytes
from memo_compile.step.simulate import memory_levels, most_per_call

COPY_WEIGHT = 1e-4
"""Cost of a second of copying that hides completely, in seconds of the step: of two plans that are
equally fast the one that moves less is taken, since copies take bandwidth from the kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """A step with the modes that each layer may choose, under one schedule."""

    base_bytes: Any
    """Per point (int64): device bytes when everything is saved."""
    deltas: tuple[Any, ...]
    """Per layer, an array (modes, points) of what each mode adds to ``base_bytes``."""
    modes: tuple[tuple[ModeCost, ...], ...]
    """Per layer."""
    seconds: tuple[float, ...]
    """Per call."""
    forward_at: tuple[int, ...]
    """Per layer, the index of its forward call; ascending."""
    backward_at: tuple[int, ...]
    """Per layer, the index of its backward call."""
    freed_at: tuple[int, ...]
    """Per layer, the index of the call before which its copies to the host have ended."""
    reload_at: tuple[int, ...]
    """Per layer, the index of the call before which its copies back are issued."""
    class_keys: tuple[str, ...]
    """Per layer."""
    costs: StepCosts
    schedule: Schedule
    stops: "tuple[_Stop, ...]"

    @property
    def num_layers(self) -> int:
        """How many layers may move something."""
        return len(self.modes)

    def bytes_at(self, chosen: Sequence[int]) -> Any:
        """Device bytes at every point when layer i takes its mode number ``chosen[i]``."""
        total = self.base_bytes.copy()
        for delta, mode in zip(self.deltas, chosen, strict=True):
            total += delta[mode]
        return total

    def peak_bytes(self, chosen: Sequence[int]) -> int:
        """The most of ``bytes_at``."""
        return int(self.bytes_at(chosen).max())

    def host_bytes(self, chosen: Sequence[int]) -> int:
        """What is copied to the host."""
        return sum(modes[mode].host_bytes for modes, mode in zip(self.modes, chosen, strict=True))

    def cost_s(self, chosen: Sequence[int]) -> float:
        """Seconds of the step, and COPY_WEIGHT of the seconds of its copies."""
        copy_s = sum(
            modes[mode].d2h_s(self.costs) + modes[mode].h2d_s(self.costs)
            for modes, mode in zip(self.modes, chosen, strict=True)
        )
        return self.step_s(chosen) + COPY_WEIGHT * copy_s

    def step_s(self, chosen: Sequence[int]) -> float:
        """Seconds of the step: every call in order, stalled where a copy has not ended.

        Layer i's copy to the host follows those of earlier layers on its lane, and begins when its
        forward has ended; its copies back follow those of later layers and begin when they are
        issued, before the call ``reload_at``.
        """
        modes = [some[mode] for some, mode in zip(self.modes, chosen, strict=True)]
        now = out_lane = back_lane = 0.0
        out_end, back_end = [0.0] * len(modes), [0.0] * len(modes)
        for stop in self.stops:
            now += stop.before_s
            for layer in stop.freed:
                now = max(now, out_end[layer])
            for layer in stop.reloaded:
                if modes[layer].num_copies:
                    back_lane = max(back_lane, now) + modes[layer].h2d_s(self.costs)
                    back_end[layer] = back_lane
            for layer in stop.in_backward:
                now = max(now, back_end[layer]) + modes[layer].recompute_s
            now += stop.call_s
            for layer in stop.in_forward:
                if modes[layer].num_copies:
                    out_lane = max(out_lane, now) + modes[layer].d2h_s(self.costs)
                    out_end[layer] = out_lane
        return now

    def chosen_modes(self, chosen: Sequence[int]) -> tuple[Mode, ...]:
        """The modes by their numbers."""
        return tuple(some[mode].mode for some, mode in zip(self.modes, chosen, strict=True))


class _Stop(NamedTuple):
    """A call at which a copy or a recomputation of a layer may begin or end."""

    before_s: float
    """Seconds of the calls since the last stop."""
    freed: Sequence[int]
    """Layers whose copies to the host have ended before the call."""
    reloaded: Sequence[int]
    """Layers whose copies back are issued before it."""
    in_backward: Sequence[int]
    """Layers whose backward it is."""
    call_s: float
    in_forward: Sequence[int]
    """Layers whose forward it is."""


def _stops(
    seconds: Sequence[float],
    forward_at: Sequence[int],
    backward_at: Sequence[int],
    windows: "_Windows",
) -> Iterator[_Stop]:
    """The calls of the step that matter to copies; the last one in any case."""
    layers = range(len(forward_at))
    freed, in_backward, in_forward = (
        _layers_at(calls, layers) for calls in (windows.freed_at, backward_at, forward_at)
    )
    reloaded = _layers_at(windows.reload_at, reversed(layers))
    before_s = 0.0
    for call, call_s in enumerate(seconds):
        tables = freed, reloaded, in_backward, in_forward
        ended, issued, read, made = (table.get(call, ()) for table in tables)
        if ended or issued or read or made or call == len(seconds) - 1:
            yield _Stop(before_s, ended, issued, read, call_s, made)
            before_s = 0.0
        else:
            before_s += call_s


def _layers_at(calls: Sequence[int], layers: Iterable[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for layer in layers:
        found.setdefault(calls[layer], []).append(layer)
    return found


def build_model(
    step: MovableStep, modes: Sequence[Sequence[ModeCost]], schedule: Schedule
) -> StepModel:
    """The model of ``step`` whose layer i may take ``modes[i]``; mode 0 saves everything.

    ``schedule`` names a lag and a lead.
    """
    assert schedule.offload_lag is not None, "the model needs a lag"
    assert schedule.reload_lead is not None, "the model needs a lead"
    windows, facts = _Windows.of(step, schedule), facts_of(step)
    during, border = call_bytes(step.problem)
    num_calls = len(step.problem.calls)
    before_backward = [border[at] for at in facts.backward_at]
    base = np.array([*during, *before_backward], dtype=np.int64)
    deltas = []
    for layer, some in enumerate(modes):
        delta = np.zeros((len(some), len(base)), dtype=np.int64)
        for row, mode in enumerate(some):
            for start, end, size_bytes in windows.absences(layer, mode.mode):
                delta[row, start:end] -= size_bytes
            delta[row, num_calls:] = delta[row, list(facts.backward_at)]
            if mode.key is not None:
                again_bytes = windows.recomputed_bytes(layer, mode.mode)
                delta[row, num_calls + layer] += mode.recompute_peak_bytes - again_bytes
        deltas.append(delta)
    return StepModel(
        base_bytes=base,
        deltas=tuple(deltas),
        modes=tuple(map(tuple, modes)),
        seconds=facts.call_s,
        forward_at=facts.forward_at,
        backward_at=facts.backward_at,
        freed_at=windows.freed_at,
        reload_at=windows.reload_at,
        class_keys=tuple(layer.class_key for layer in step.layers),
        costs=step.costs,
        schedule=schedule,
        stops=tuple(_stops(facts.call_s, facts.forward_at, facts.backward_at, windows)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Windows:
    """From which call to which a moved value of each layer is not on the device."""

    step: MovableStep
    freed_at: tuple[int, ...]
    reload_at: tuple[int, ...]
    last_forward_use: Mapping[str, int]
    first_backward_use: Mapping[str, int]

    @staticmethod
    def of(step: MovableStep, schedule: Schedule) -> "_Windows":
        facts = facts_of(step)
        forward_at, backward_at = facts.forward_at, facts.backward_at
        first_backward = facts.first_backward
        lag, lead = schedule.offload_lag or 0, schedule.reload_lead or 0
        count = len(step.layers)
        last, first = _uses(step.problem)
        return _Windows(
            step=step,
            freed_at=tuple(
                forward_at[i + lag + 1] if i + lag + 1 < count else first_backward
                for i in range(count)
            ),
            reload_at=tuple(
                min(backward_at[i], backward_at[i + lead + 1] + 1)
                if i + lead + 1 < count
                else first_backward
                for i in range(count)
            ),
            last_forward_use=last,
            first_backward_use=first,
        )

    def absences(self, layer: int, mode: Mode) -> list[tuple[int, int, int]]:
        """(first call, end, bytes) of every slot that ``mode`` takes off the device."""
        owner = self.step.layers[layer]
        found = []
        for slot, action in enumerate(mode.actions):
            value = owner.values[slot]
            if action is Action.SAVE or value not in self.first_backward_use:
                continue
            start = self.last_forward_use[value] + 1
            end = self.first_backward_use[value]
            if action is Action.OFFLOAD or mode.recompute_rows is not None:
                start = max(start, self.freed_at[layer])
                end = min(end, self.reload_at[layer])
            if start < end:
                found.append((start, end, self._size(owner, slot)))
        return found

    def recomputed_bytes(self, layer: int, mode: Mode) -> int:
        """Bytes that save-all counts before the backward and that are yet to be recomputed."""
        if mode.recompute_rows is not None:
            return 0
        owner = self.step.layers[layer]
        return sum(self._size(owner, slot) for slot in mode.slots(Action.RECOMPUTE))

    def _size(self, layer: Layer, slot: int) -> int:
        return self.step.class_of(layer).slots[slot].size_bytes


def _uses(problem: Problem) -> tuple[dict[str, int], dict[str, int]]:
    """Value -> its maker's or last reader's forward call; value -> its first backward reader."""
    last: dict[str, int] = {}
    first: dict[str, int] = {}
    for at, call in enumerate(problem.calls):
        if call.phase is Phase.FORWARD:
            last.update(dict.fromkeys((*call.inputs, *call.outputs), at))
        else:
            for value in call.inputs:
                first.setdefault(value, at)
    return last, first


def call_bytes(problem: Problem) -> tuple[list[int], list[int]]:
    """Per call the most device bytes during it, and the device bytes at the border before it."""
    constant = step_constant_bytes(problem)
    held = sum(memory_levels(problem)) + constant
    before = [start - 1 for start in call_starts(problem)[1:-1]]
    during = sum(most_per_call(problem)) + constant
    return during.tolist(), [constant, *held[before].tolist()]
