"""The seconds for which a backward waits for what must come back between two of its calls.

For a deadline d of a window that begins at p, with s of each layer by itself, first read by d or
read by what recomputes such a slot, and w[s] = 1 where s is on the device at p as a whole:

    minimise      v + R,   x[s] whole where s cannot be recomputed for a part of its rows
    at hand       w[s] + x[s] + y[s] >= 1 where s is read by d,
                  w[t] + x[t] + y[t] >= x[s] for each t that recomputing s reads
    bytes         sum size[s] w[s] <= free bytes at p
    back          sum h2d[s] y[s] <= computation between p and d + v + R

with ``x``, ``y`` and ``R`` as in ``step_bound``.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from memo_compile.planners import solver
from memo_compile.planners.bound_parts import (
    Life,
    minimum_s,
    require_operators,
    slot_variables,
    sources_of,
    unit_of_s,
)
from memo_compile.planners.move_rules import StepFacts
from memo_compile.planners.solver import weighted
from memo_compile.step.movable import MovableStep


def seconds_of_windows(
    step: MovableStep,
    facts: StepFacts,
    moved: Sequence[Life],
    free: Any,
    never: Collection[tuple[int, int]],
    discounts: Mapping[tuple[str, int], float],
) -> float:
    """The seconds beyond computation of windows that follow each other: of those that take most.

    Some begin at a call of a layer's backward at which the fewest bytes are free for what is read
    later, the first or the last, and end where the next layer's begins; others, which are shorter,
    at such a call between two at which something is read first.
    """
    borders = [*sorted(set(facts.backward_at)), len(free)]
    of_layers = [[*_scarcest(free, borders, last=last)] for last in (False, True)]
    reads = sorted({facts.first_backward, *(life.read for life in moved)})
    points = sorted({*itertools.chain(*of_layers), *_scarcest(free, reads, last=True), len(free)})
    most_s = dict.fromkeys(points, 0.0)
    known: dict[tuple[_Deadline, ...], float] = {}
    pairs = itertools.chain.from_iterable(map(itertools.pairwise, (points, *of_layers)))
    for at, end in sorted(set(pairs)):
        window = tuple(_deadlines(step, facts, moved, never, (at, end), int(free[at])))
        if window not in known:
            known[window] = _window_s(step, window, discounts)
        most_s[end] = max(most_s[end], most_s[at] + known[window])
    return most_s[points[-1]]


class _Due(NamedTuple):
    """Of one layer what a window must have at hand by some call."""

    class_key: str
    slots: tuple[int, ...]
    """Those that are read by then."""
    later: tuple[int, ...]
    """Those that are read later, but that recomputing one of ``slots`` reads."""
    again: frozenset[int]
    """Those of all that may be recomputed."""


class _Deadline(NamedTuple):
    """What a window has for all that is read in it by some call."""

    due: tuple[_Due, ...]
    free_bytes: int
    """What of it, in whole tensors, may be on the device when the window begins."""
    after_s: float
    """Computation between then and that call."""


def _scarcest(free: Any, borders: Iterable[int], *, last: bool = False) -> Iterator[int]:
    """Between each two borders the first call, or the last, at which the fewest bytes are free."""
    for first, end in itertools.pairwise(borders):
        some = free[first:end]
        yield end - 1 - int(some[::-1].argmin()) if last else first + int(some.argmin())


def _deadlines(
    step: MovableStep,
    facts: StepFacts,
    moved: Iterable[Life],
    never: Collection[tuple[int, int]],
    window: tuple[int, int],
    free_bytes: int,
) -> Iterator[_Deadline]:
    """Those of a window from behind one call to the end of another."""
    at, end = window
    away: dict[int, list[Life]] = {}
    for life in moved:
        if at < life.read:
            away.setdefault(life.layer, []).append(life)
    due = [own for own in away.values() if any(life.read <= end for life in own)]
    for call in sorted({life.read for own in due for life in own if life.read <= end}):
        yield _Deadline(
            due=tuple(_due_in(step, due, never, call)),
            free_bytes=free_bytes,
            after_s=sum(facts.call_s[at + 1 : call]),
        )


def _due_in(
    step: MovableStep,
    away: Iterable[Sequence[Life]],
    never: Collection[tuple[int, int]],
    call: int,
) -> Iterator[_Due]:
    for own in away:
        slots = tuple(life.slot for life in own if life.read <= call)
        if slots:
            cls = step.classes[own[0].class_key]
            again = frozenset(life.slot for life in own if (life.layer, life.slot) not in never)
            read = frozenset().union(*(sources_of(cls, slot) for slot in again.intersection(slots)))
            later = (life.slot for life in own if life.read > call)
            yield _Due(own[0].class_key, slots, tuple(sorted(read.intersection(later))), again)


def _window_s(
    step: MovableStep, deadlines: Iterable[_Deadline], discounts: Mapping[tuple[str, int], float]
) -> float:
    """The seconds beyond computation that a window takes: of its worst deadline."""
    added_s = 0.0
    for deadline in sorted(deadlines, key=lambda own: -_copied_s(step, own)):
        if _copied_s(step, deadline) <= added_s:  # nor are all that follow worse
            break
        added_s = max(added_s, _late_s(step, deadline, discounts))
    return added_s


def _copied_s(step: MovableStep, deadline: _Deadline) -> float:
    """The seconds beyond computation of one way to keep it; no better plan needs more.

    The largest tensors that fit are there before, all others are copied back. Infinite where some
    of them may not be copied.
    """
    slots = [step.classes[own.class_key].slots[slot] for own in deadline.due for slot in own.slots]
    left, copied = deadline.free_bytes, 0
    for slot in sorted(slots, key=lambda slot: -slot.size_bytes):
        if slot.size_bytes <= left:
            left -= slot.size_bytes
        elif slot.can_offload:
            copied += slot.size_bytes
        else:
            return math.inf
    return max(0.0, copied / step.costs.h2d_bytes_per_s - deadline.after_s)


def _late_s(
    step: MovableStep, deadline: _Deadline, discounts: Mapping[tuple[str, int], float]
) -> float:
    """The seconds beyond computation that the deadline's program finds, see the module's text."""
    model = solver.make_model("window of a step")
    stall = model.add_var(name="v")
    kept: list[tuple[int, Any]] = []
    copied: list[tuple[int, Any]] = []
    runs: list[tuple[float, Any]] = []
    unit_s = unit_of_s(step)
    for class_key, slots, later, may_again in deadline.due:
        cls = step.classes[class_key]
        off = dict.fromkeys((*slots, *later), 1)
        x, y = slot_variables(model, cls, off, dict.fromkeys(may_again, 1), whole=True)
        there = {slot: model.add_var(var_type="B") for slot in (*slots, *later)}
        at_hand = {slot: there[slot] + x.get(slot, 0) + y.get(slot, 0) for slot in there}
        for slot in slots:
            model.add_constr(at_hand[slot] >= 1)
            if slot in x:
                for source in sources_of(cls, slot).intersection(later):
                    model.add_constr(at_hand[source] >= x[slot])
        kept += [(cls.slots[slot].size_bytes, own) for slot, own in there.items()]
        copied += [(cls.slots[slot].size_bytes, own) for slot, own in y.items()]
        runs += [
            (seconds / unit_s * discounts.get((class_key, op), 1.0), run)
            for op, seconds, run in require_operators(model, cls, 1, x)
        ]
    again = weighted(*zip(*runs, strict=True)) if runs else weighted([], [])
    model.add_constr(weighted(*zip(*kept, strict=True)) <= float(deadline.free_bytes))
    rate = step.costs.h2d_bytes_per_s * unit_s
    back = weighted([size / rate for size, _ in copied], [own for _, own in copied])
    model.add_constr(back <= deadline.after_s / unit_s + stall + again)
    return minimum_s(model, stall + again, unit_s)
