"""The seconds for which a step waits for copies between two of its calls.

For a deadline d of a window of the backward that begins at p, with s of each layer by itself, first
read by d or read by what recomputes such a slot, and w[s] = 1 where s is on the device at p as a
whole:

    minimise      v + R,   x[s] whole where s cannot be recomputed for a part of its rows
    at hand       w[s] + x[s] + y[s] >= 1 where s is read by d,
                  w[t] + x[t] + y[t] >= x[s] for each t that recomputing s reads
    bytes         sum size[s] w[s] <= free bytes at p
    back          sum h2d[s] y[s] <= computation between p and d + v + R

with ``x``, ``y`` and ``R`` as in ``step_bound``.

A window of the forward ends at p. For a call m in it, with s made by m or later and not in use at
p, and u the seconds for which the forward stands still:

    minimise      u + R
    gone          w[s] + x[s] + y[s] >= 1
    bytes         sum size[s] w[s] <= free bytes at p
    out           sum d2h[s] y[s] <= computation between m and p + u

What is read first in a window of the backward, and not recomputed, was copied to the host in the
forward, or is on the device ever since: of the latter no more than has room at the first window's
point. So with the seconds of those copies in the objective, in windows that follow each other,

    out           sum d2h[s] (1 - x[s]) <= computation of the forward + u + that room's seconds

bounds what both halves stand still: what hides in the one by recomputing costs in the other. What
an earlier window's region may have made as well counts no second time.

What is recomputed takes its seconds once. So ``R`` counts in the windows of one half of the step
only, and of a layer in one of the forward's: in that in which its largest tensor is made.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from memo_compile.planners import solver
from memo_compile.planners.bound_never import Never
from memo_compile.planners.bound_parts import (
    Life,
    minimum_s,
    require_operators,
    size_of,
    slot_variables,
    sources_of,
    unit_of_s,
)
from memo_compile.planners.move_rules import StepFacts, closure_of, may_pass
from memo_compile.planners.solver import weighted
from memo_compile.step.movable import LayerClass, MovableStep
from memo_compile.step.problem import CallKind

MAX_SKIP = 3
"""A window ends at one of so many points that follow: in between more bytes may be free."""

MAX_UNITS = 1 << 22
"""Most units of bytes in which it is said what a window's tensors fill."""


class Away(NamedTuple):
    """What may be off the device, and the bytes that there are for it."""

    step: MovableStep
    facts: StepFacts
    moved: Sequence[Life]
    free: Any
    """Per call (int64) the bytes for those of ``moved`` that may be off during it."""
    never: Never
    discounts: Mapping[tuple[str, int], float]
    """(class, operator) -> the least share of its seconds that a recomputation takes."""


class _Out(NamedTuple):
    """Copies to the host whose seconds count."""

    end: int
    """Of what was last used by a call of the forward before this one."""
    byte_s: float


_NOTHING_OUT = _Out(0, 0.0)


def backward_waits_s(away: Away, *, counts: bool, out: _Out = _NOTHING_OUT) -> float:
    """The seconds beyond computation of windows that follow each other: of those that take most.

    With ``out`` the seconds of copies to the host are added. Some begin at a call of a layer's
    backward at which the fewest bytes are free for what is read later, the first or the last, and
    end where the next layer's begins; others, which are shorter, at such a call between two at
    which something is read first. Without ``counts`` recomputation takes no time.
    """
    end = len(away.free)
    borders = [*sorted(set(away.facts.backward_at)), end]
    reads = sorted({away.facts.first_backward, *(life.read for life in away.moved)})
    layers = [(sorted(life.read for life in own), own) for own in _by_layer(away.moved)]
    due_in = partial(_due_back, away, layers, counts, out)
    return _longest_s(away, borders, reads, (end,), due_in)


def both_waits_s(away: Away) -> float:
    """The seconds beyond computation of both halves, see the module's text."""
    turn, out_s = away.facts.first_backward, 1 / away.step.costs.d2h_bytes_per_s
    late = [life for life in away.moved if life.read > turn]
    if not late:
        return 0.0
    first = min(life.made for life in late) + 1
    ends = range(first, min(life.read for life in late))
    hidden_s = [*itertools.accumulate(away.facts.call_s[first:turn], initial=0.0)]
    made_later = np.bincount(
        [life.last_use for life in late], [size_of(away.step, life) for life in late], ends.stop
    )[::-1].cumsum()[::-1]

    def spare_s(end: int) -> float:
        return hidden_s[min(end, turn) - first] + out_s * float(away.free[end])

    end = min(ends, key=lambda end: spare_s(end) + out_s * made_later[end])
    beyond_s = backward_waits_s(away, counts=True, out=_Out(end, out_s))
    return max(0.0, beyond_s - spare_s(end))


def forward_waits_s(away: Away, *, counts: bool) -> float:
    """Likewise of the forward, whose windows end where the fewest bytes are free."""
    turn = away.facts.first_backward
    made = {life.made for life in away.moved}
    borders = [*sorted({0, *away.facts.forward_at}), turn]
    largest = {
        own[0].layer: max(own, key=lambda life: size_of(away.step, life)).made
        for own in _by_layer(away.moved)
    }
    due_in = partial(_due_out, away, largest, counts)
    return _longest_s(away, borders, [*sorted({0, *made}), turn], (), due_in)


class _Due(NamedTuple):
    """Of one layer what a window must have at hand by some call, or gone by its end."""

    class_key: str
    slots: tuple[int, ...]
    """Those that are read by then, or made since."""
    later: tuple[int, ...]
    """Those that are read later, but that recomputing one of ``slots`` reads."""
    again: frozenset[int]
    """Those of all that may be recomputed."""
    apart: frozenset[tuple[int, int]]
    """Pairs of which one may be."""
    counts: bool
    """The seconds of their recomputation count."""
    out: frozenset[int] = frozenset()
    """Those of ``slots`` of which the seconds of a copy to the host count as well."""
    out_s: float = 0.0
    """Those seconds, a byte."""
    paid: frozenset[int] = frozenset()
    """Operators whose seconds count in an earlier window of the layer."""


class _Deadline(NamedTuple):
    """What a window has for all that is read in it by some call, or made in it since."""

    due: tuple[_Due, ...]
    free_bytes: int
    """What of it, in whole tensors, may be on the device at the window's point."""
    beside_s: float
    """Computation between that and the call."""
    is_forward: bool


_Window = tuple[int, int]
"""From behind one call to the other."""


def _longest_s(
    away: Away,
    borders: Sequence[int],
    reads: Sequence[int],
    ends: Iterable[int],
    due_in: Callable[[_Window], Iterator[_Deadline]],
) -> float:
    """The seconds of the path of windows that takes most, see ``backward_waits_s``."""
    of_layers = [[*_scarcest(away.free, borders, last=last)] for last in (False, True)]
    each = {*itertools.chain(*of_layers), *_scarcest(away.free, reads, last=True), *ends}
    points = sorted(each)
    most_s = dict.fromkeys(points, 0.0)
    known: dict[tuple[_Deadline, ...], float] = {}
    pairs = {*itertools.chain.from_iterable(map(itertools.pairwise, of_layers))}
    for skip in range(1, MAX_SKIP + 1):
        pairs.update(zip(points, points[skip:], strict=False))
    for at, end in sorted(pairs):
        window = tuple(due_in((at, end)))
        if window not in known:
            known[window] = _window_s(away, window)
        most_s[end] = max(most_s[end], most_s[at] + known[window])
    return max(most_s.values(), default=0.0)


def _scarcest(free: Any, borders: Iterable[int], *, last: bool = False) -> Iterator[int]:
    """Between each two borders the first call, or the last, at which the fewest bytes are free."""
    for first, end in itertools.pairwise(borders):
        some = free[first:end]
        yield end - 1 - int(some[::-1].argmin()) if last else first + int(some.argmin())


def _due_back(
    away: Away,
    layers: Iterable[tuple[Sequence[int], Sequence[Life]]],
    counts: bool,
    out: _Out,
    window: _Window,
) -> Iterator[_Deadline]:
    """The deadlines of a window of the backward; ``layers``: when each is read, and its lives."""
    at, end = window
    due = [
        [life for life in own if at < life.read]
        for reads, own in layers
        if bisect_right(reads, at) < bisect_right(reads, end)
    ]
    paid = {
        own[0].layer: _paid(away, [life for life in own if life.read <= at])
        for _, own in layers
        if out.byte_s
    }
    for call in sorted({life.read for own in due for life in own if life.read <= end}):
        read = tuple(
            _read_by(away, own, call, counts, out)._replace(
                paid=paid.get(own[0].layer, frozenset())
            )
            for own in due
            if _is_read(own, call)
        )
        yield _Deadline(
            due=read,
            free_bytes=_filled_bytes(away.step, read, int(away.free[at])),
            beside_s=sum(away.facts.call_s[at + 1 : call]),
            is_forward=False,
        )


def _paid(away: Away, earlier: Sequence[Life]) -> frozenset[int]:
    """What making ``earlier`` slots of a layer runs, and making what that reads.

    One region may make what is read in several windows, so that a tensor at hand when a window
    begins was not copied out for it. It counts as made in that window, of what no other pays for.
    """
    if not earlier:
        return frozenset()
    cls = away.step.classes[earlier[0].class_key]
    made = away.never.again(earlier)
    read = _sources(cls, made, frozenset(range(len(cls.slots))))
    return frozenset().union(*(closure_of(cls, (slot,)) for slot in made | read))


def _sources(cls: LayerClass, slots: Iterable[int], again: Collection[int]) -> frozenset[int]:
    """What recomputing ``slots`` reads, and what that is made from where it takes no time."""
    read = frozenset().union(*(sources_of(cls, slot) for slot in slots))
    passing = (slot for slot in read.intersection(again) if may_pass(cls, slot))
    return read.union(*(sources_of(cls, slot) for slot in passing))


def _due_out(
    away: Away, largest: Mapping[int, int], counts: bool, window: _Window
) -> Iterator[_Deadline]:
    """The deadlines of a window of the forward; each layer's ``largest`` is made by which call."""
    at, end = window
    calls = away.step.problem.calls
    made = [
        life
        for life in away.moved
        if at <= life.made and life.last_use < end and calls[life.made].kind is CallKind.RUN
    ]
    for call in sorted({life.made for life in made}):
        since = tuple(
            _Due(
                class_key=own[0].class_key,
                slots=tuple(life.slot for life in own),
                later=(),
                again=away.never.again(own),
                apart=away.never.apart(own),
                counts=counts and at <= largest[own[0].layer] < end,
            )
            for own in _by_layer(life for life in made if life.made >= call)
        )
        yield _Deadline(
            due=since,
            free_bytes=_filled_bytes(away.step, since, int(away.free[end])),
            beside_s=sum(away.facts.call_s[call + 1 : end]),
            is_forward=True,
        )


def _filled_bytes(step: MovableStep, due: Iterable[_Due], free_bytes: int) -> int:
    """The most of ``free_bytes`` that some of those tensors fill, as wholes.

    So windows are the same, and looked at once, in layers with a few bytes more for the same.
    """
    sizes = [
        step.classes[own.class_key].slots[slot].size_bytes
        for own in due
        for slot in (*own.slots, *own.later)
    ]
    if sum(sizes) <= free_bytes:
        return sum(sizes)
    unit = math.gcd(*sizes)
    if free_bytes // unit > MAX_UNITS:
        return free_bytes
    within, reached = (2 << free_bytes // unit) - 1, 1  # bit n: some of them take n units
    for size_bytes in sizes:
        reached |= reached << size_bytes // unit & within
    return (reached.bit_length() - 1) * unit


def _by_layer(lives: Iterable[Life]) -> Collection[Sequence[Life]]:
    found: dict[int, list[Life]] = {}
    for life in lives:
        found.setdefault(life.layer, []).append(life)
    return found.values()


def _is_read(own: Iterable[Life], call: int) -> bool:
    return any(life.read <= call for life in own)


def _read_by(away: Away, own: Sequence[Life], call: int, counts: bool, out: _Out) -> _Due:
    slots = tuple(life.slot for life in own if life.read <= call)
    cls, again = away.step.classes[own[0].class_key], away.never.again(own)
    read = _sources(cls, again.intersection(slots), again)
    later = sorted(life.slot for life in own if life.read > call and life.slot in read)
    counted = frozenset(life.slot for life in own if life.read <= call and life.last_use < out.end)
    apart = away.never.apart(own)
    return _Due(cls.key, slots, tuple(later), again, apart, counts, counted, out.byte_s)


def _window_s(away: Away, deadlines: Iterable[_Deadline]) -> float:
    """The seconds beyond computation that a window takes: of its worst deadline."""
    added_s = 0.0
    for deadline in sorted(deadlines, key=lambda own: -_copied_s(away.step, own)):
        if _copied_s(away.step, deadline) <= added_s:  # nor are all that follow worse
            break
        added_s = max(added_s, _late_s(away, deadline))
    return added_s


def _rate(step: MovableStep, deadline: _Deadline) -> float:
    return step.costs.d2h_bytes_per_s if deadline.is_forward else step.costs.h2d_bytes_per_s


def _copied_s(step: MovableStep, deadline: _Deadline) -> float:
    """The seconds beyond computation of one way to keep it; no better plan needs more.

    The largest tensors that fit are on the device, all others are copied. Infinite where some of
    them may not be copied.
    """
    slots = [step.classes[own.class_key].slots[slot] for own in deadline.due for slot in own.slots]
    left, copied = deadline.free_bytes, 0
    out_s = sum(
        own.out_s * step.classes[own.class_key].slots[slot].size_bytes
        for own in deadline.due
        for slot in own.out
    )
    for slot in sorted(slots, key=lambda slot: -slot.size_bytes):
        if slot.size_bytes <= left:
            left -= slot.size_bytes
        elif slot.can_offload:
            copied += slot.size_bytes
        else:
            return math.inf
    return max(0.0, copied / _rate(step, deadline) - deadline.beside_s) + out_s


def _late_s(away: Away, deadline: _Deadline) -> float:
    """The seconds beyond computation that the deadline's program finds, see the module's text."""
    model = solver.make_model("window of a step")
    stall = model.add_var(name="stall")
    kept: list[tuple[int, Any]] = []
    copied: list[tuple[int, Any]] = []
    counted: list[tuple[float, Any]] = []
    hidden: list[tuple[float, Any]] = []
    always_s, unit_s = 0.0, unit_of_s(away.step)
    for class_key, slots, later, may_again, apart, counts, out, out_s, paid in deadline.due:
        cls = away.step.classes[class_key]
        off = dict.fromkeys((*slots, *later), 1)
        x, y = slot_variables(model, cls, off, dict.fromkeys(may_again, 1), apart=apart)
        there = {slot: model.add_var(var_type="B") for slot in (*slots, *later)}
        at_hand = {slot: there[slot] + x.get(slot, 0) + y.get(slot, 0) for slot in there}
        for slot in slots:
            model.add_constr(at_hand[slot] >= 1)
            own_s = out_s * cls.slots[slot].size_bytes if slot in out else 0.0
            always_s += 0.0 if slot in x else own_s
            if slot in x and own_s:
                stays = model.add_var(name="out")
                model.add_constr(stays >= 1 - x[slot])
                counted.append((own_s / unit_s, stays))
            if slot in x:
                for source in sources_of(cls, slot).intersection(later):
                    model.add_constr(at_hand[source] >= x[slot])
        for slot in later:
            if slot in x and may_pass(cls, slot):
                for source in sources_of(cls, slot).intersection(later):
                    model.add_constr(at_hand[source] >= x[slot])
        kept += [(cls.slots[slot].size_bytes, own) for slot, own in there.items()]
        copied += [(cls.slots[slot].size_bytes, own) for slot, own in y.items()]
        runs = [
            (seconds / unit_s * away.discounts.get((class_key, op), 1.0), run, op in paid)
            for op, seconds, run in require_operators(model, cls, 1, x)
        ]
        counted += [(own_s, run) for own_s, run, is_paid in runs if counts and not is_paid]
        hidden += [(own_s, run) for own_s, run, _ in runs if not deadline.is_forward]
    model.add_constr(weighted(*_columns(kept)) <= float(deadline.free_bytes))
    rate = _rate(away.step, deadline) * unit_s
    moved = weighted([size / rate for size, _ in copied], [own for _, own in copied])
    model.add_constr(moved <= deadline.beside_s / unit_s + stall + weighted(*_columns(hidden)))
    return always_s + minimum_s(model, stall + weighted(*_columns(counted)), unit_s)


def _columns(terms: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    return [weight for weight, _ in terms], [variable for _, variable in terms]
