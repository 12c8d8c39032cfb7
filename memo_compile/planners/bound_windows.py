"""The seconds for which a step waits for copies between some of its calls, at least.

Windows of the backward that follow each other add up; ``bound_stages`` has their programs. A window
of the forward ends at a call p. For a call m in it, with s made by m or later and not in use at p,
and u the seconds for which the forward stands still:

    minimise      u + R
    gone          w[s] + x[s] + y[s] >= 1
    bytes         sum size[s] w[s] <= free bytes at p
    out           sum d2h[s] y[s] <= computation between m and p + u

with ``x``, ``y`` and ``R`` as in ``step_bound``, and w[s] = 1 where s is on the device at p as a
whole.

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
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
    sum_of,
    unit_of_s,
)
from memo_compile.planners.bound_stages import Deadline, Due, Window, copied_s, least_s
from memo_compile.planners.move_rules import StepFacts, closure_of, may_pass
from memo_compile.step.movable import LayerClass, MovableStep
from memo_compile.step.problem import CallKind

MAX_SKIP = 3
"""A window ends at one of so many points that follow: in between more bytes may be free."""

MAX_STAGES = 6
"""Most stages of a window; it has as many as there are points in most layers' backwards."""

MIN_SIZE = 0.002
"""Slots of a smaller share of what their layer saves are left out of windows of the backward."""

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
    known: dict[Window, float]
    """The seconds of windows that were looked at."""
    made: dict[tuple[str, int], "_Made"]
    """(class, slot) -> what makes it, once it was asked for."""

    def made_by(self, cls: LayerClass, slot: int) -> "_Made":
        """What makes a slot by itself."""
        key = cls.key, slot
        if key not in self.made:
            ops = frozenset(closure_of(cls, (slot,)))
            self.made[key] = _Made(ops, sources_of(cls, slot))
        return self.made[key]


class _Made(NamedTuple):
    ops: frozenset[int]
    sources: frozenset[int]
    """Slots that they read."""


class _Out(NamedTuple):
    """Copies to the host whose seconds count."""

    end: int
    """Of what was last used by a call of the forward before this one."""
    byte_s: float


_NOTHING_OUT = _Out(0, 0.0)


def backward_waits_s(
    away: Away, *, counts: bool, in_stages: bool, out: _Out = _NOTHING_OUT
) -> float:
    """The seconds beyond computation of windows that follow each other: of those that take most.

    With ``out`` the seconds of copies to the host are added. Some begin at a call of a layer's
    backward at which the fewest bytes are free for what is read later, the first or the last, and
    end where the next layer's begins; others, which are shorter, at such a call between two at
    which something is read first. With ``in_stages`` there are longer ones with all such calls in
    them. Without ``counts`` recomputation takes no time.
    """
    end = len(away.free)
    borders = [*sorted(set(away.facts.backward_at)), end]
    reads = sorted({away.facts.first_backward, *(life.read for life in away.moved)})
    layers = [(sorted(life.read for life in own), own) for own in _by_layer(away.moved)]
    points, spans = _spans(away.free, borders, reads, (end,), in_stages=in_stages)

    def seconds(span: _Span, above_s: float) -> float:
        window = _read_in(away, layers, counts, out, span)
        if window not in away.known:
            if copied_s(away.step, window) <= above_s:
                return above_s
            away.known[window] = least_s(away.step, away.discounts, window)
        return away.known[window]

    return _longest_s(points, spans, seconds)


def both_waits_s(away: Away, *, in_stages: bool) -> float:
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
    out = _Out(end, out_s)
    beyond_s = backward_waits_s(away, counts=True, in_stages=in_stages, out=out)
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
    points, spans = _spans(away.free, borders, [*sorted({0, *made}), turn], (), in_stages=False)
    known: dict[tuple[_Deadline, ...], float] = {}

    def seconds(span: _Span, _: float) -> float:
        window = tuple(_due_out(away, largest, counts, span))
        if window not in known:
            known[window] = _window_s(away, window)
        return known[window]

    return _longest_s(points, spans, seconds)


class _Gone(NamedTuple):
    """Of one layer what the forward has made since some call, and is gone by a window's end."""

    class_key: str
    slots: tuple[int, ...]
    again: frozenset[int]
    """Those of all that may be recomputed."""
    apart: frozenset[tuple[int, int]]
    """Pairs of which one may be."""
    counts: bool
    """The seconds of their recomputation count."""


class _Deadline(NamedTuple):
    """What a window of the forward has for all that is made from some call on."""

    gone: tuple[_Gone, ...]
    free_bytes: int
    """What of it, in whole tensors, may be on the device at the window's end."""
    beside_s: float
    """Computation between the call and that."""


_Span = tuple[int, ...]
"""The calls of a window's points: from behind the first to the last, in stages."""


def _spans(
    free: Any,
    borders: Sequence[int],
    reads: Sequence[int],
    ends: Iterable[int],
    *,
    in_stages: bool,
) -> tuple[Sequence[int], Collection[_Span]]:
    """Where windows may begin and end, and the windows, see ``backward_waits_s``."""
    of_layers = [[*_scarcest(free, borders, last=last)] for last in (False, True)]
    each = {*itertools.chain(*of_layers), *_scarcest(free, reads, last=True), *ends}
    points = sorted(each)
    spans: set[_Span] = {*itertools.chain.from_iterable(map(itertools.pairwise, of_layers))}
    for skip in range(1, MAX_SKIP + 1):
        spans.update(zip(points, points[skip:], strict=False))
    if in_stages:
        at = {point: number for number, point in enumerate(points)}
        counts = Counter(
            at[end] - at[first] for own in of_layers for first, end in itertools.pairwise(own)
        )
        num_stages = min(MAX_STAGES, max(2, counts.most_common(1)[0][0] if counts else 0))
        spans.update(
            tuple(points[first : first + num_stages + 1])
            for first in range(len(points) - num_stages)
        )
    return points, spans


def _longest_s(
    points: Iterable[int], spans: Iterable[_Span], seconds: Callable[[_Span, float], float]
) -> float:
    """The seconds of the path of windows that takes most.

    ``seconds`` of a window may be too few where they are no more than it is told.
    """
    most_s = dict.fromkeys(points, 0.0)
    for span in sorted(spans, key=lambda span: (span[-1], -span[0], len(span))):
        first, end = span[0], span[-1]
        most_s[end] = max(most_s[end], most_s[first] + seconds(span, most_s[end] - most_s[first]))
    return max(most_s.values(), default=0.0)


def _scarcest(free: Any, borders: Iterable[int], *, last: bool = False) -> Iterator[int]:
    """Between each two borders the first call, or the last, at which the fewest bytes are free."""
    for first, end in itertools.pairwise(borders):
        some = free[first:end]
        yield end - 1 - int(some[::-1].argmin()) if last else first + int(some.argmin())


def _read_in(
    away: Away,
    layers: Iterable[tuple[Sequence[int], Sequence[Life]]],
    counts: bool,
    out: _Out,
    span: _Span,
) -> Window:
    """A window of the backward; ``layers``: when each is read, and its lives."""
    at, end = span[0], span[-1]
    read = [
        own
        for reads, own in layers
        if reads[0] <= end and at < reads[-1] and bisect_right(reads, at) < bisect_right(reads, end)
    ]
    later = [[life for life in _large(away.step, own) if at < life.read] for own in read]
    calls = sorted({life.read for own in later for life in own if life.read <= end})
    until = list(span[1:])
    deadlines = [_deadline(away, span, call, bisect_left(until, call)) for call in calls]
    numbers = {call: number for number, call in enumerate(calls)}
    due = tuple(
        _due_of(away, some, numbers, counts, out)._replace(paid=_paid(away, own, at, out))
        for own, some in zip(read, later, strict=True)
        if some
    )
    return Window(
        due=due,
        deadlines=tuple(deadlines),
        free_bytes=tuple(
            filled_bytes(_sizes(away.step, due, deadlines, stage), int(away.free[point]))
            for stage, point in enumerate(span[:-1])
        ),
        ends=tuple(_deadline(away, span, call, stage) for stage, call in enumerate(until)),
    )


def _deadline(away: Away, span: _Span, call: int, stage: int) -> Deadline:
    points = span[: stage + 1]
    return Deadline(stage, tuple(sum(away.facts.call_s[point + 1 : call]) for point in points))


def _large(step: MovableStep, own: Sequence[Life]) -> Iterator[Life]:
    """What is not too small to be looked at."""
    slots = step.classes[own[0].class_key].slots
    least = MIN_SIZE * sum(slot.size_bytes for slot in slots)
    return (life for life in own if slots[life.slot].size_bytes >= least)


def _due_of(
    away: Away, own: Sequence[Life], numbers: Mapping[int, int], counts: bool, out: _Out
) -> Due:
    """What a window must have of a layer; ``numbers`` of its calls' deadlines."""
    cls, again = away.step.classes[own[0].class_key], away.never.again(own)
    by_slot = {life.slot: life for life in own}
    found = {life.slot for life in own if life.read in numbers}
    queue = sorted(found)
    for slot in queue:  # grows
        sources = away.made_by(cls, slot).sources if slot in again else frozenset()
        read = sources.intersection(by_slot) - found
        found.update(read)
        queue += sorted(read)
    copied = (life.slot for life in own if life.read in numbers and life.last_use < out.end)
    return Due(
        class_key=cls.key,
        reads=tuple((slot, numbers.get(by_slot[slot].read)) for slot in sorted(found)),
        again=again & found,
        apart=frozenset(pair for pair in away.never.apart(own) if found.issuperset(pair)),
        counts=counts,
        out=frozenset(copied),
        out_s=out.byte_s,
    )


def _sizes(
    step: MovableStep, due: Iterable[Due], deadlines: Sequence[Deadline], stage: int
) -> Sequence[int]:
    """Bytes of what is read in a stage, or later."""
    return [
        step.classes[own.class_key].slots[slot].size_bytes
        for own in due
        for slot, number in own.reads
        if number is None or deadlines[number].stage >= stage
    ]


def _paid(away: Away, own: Sequence[Life], at: int, out: _Out) -> frozenset[int]:
    """What making the slots of a layer that are read by a call runs, and making what that reads.

    One region may make what is read in several windows, so that a tensor at hand when a window
    begins was not copied out for it. It counts as made in that window, of what no other pays for.
    """
    earlier = [life for life in own if life.read <= at]
    if not out.byte_s or not earlier:
        return frozenset()
    cls = away.step.classes[earlier[0].class_key]
    made = away.never.again(earlier)
    read = _sources(away, cls, made)
    return frozenset().union(*(away.made_by(cls, slot).ops for slot in made | read))


def _sources(away: Away, cls: LayerClass, slots: Iterable[int]) -> frozenset[int]:
    """What recomputing ``slots`` reads, and what that is made from where it takes no time."""
    read = frozenset().union(*(away.made_by(cls, slot).sources for slot in slots))
    passing = (slot for slot in read if may_pass(cls, slot))
    return read.union(*(away.made_by(cls, slot).sources for slot in passing))


def _due_out(
    away: Away, largest: Mapping[int, int], counts: bool, span: _Span
) -> Iterator[_Deadline]:
    """The deadlines of a window of the forward; each layer's ``largest`` is made by which call."""
    at, end = span
    calls = away.step.problem.calls
    made = [
        life
        for life in away.moved
        if at <= life.made and life.last_use < end and calls[life.made].kind is CallKind.RUN
    ]
    for call in sorted({life.made for life in made}):
        gone = tuple(
            _Gone(
                class_key=own[0].class_key,
                slots=tuple(life.slot for life in own),
                again=away.never.again(own),
                apart=away.never.apart(own),
                counts=counts and at <= largest[own[0].layer] < end,
            )
            for own in _by_layer(life for life in made if life.made >= call)
        )
        sizes = [
            away.step.classes[own.class_key].slots[slot].size_bytes
            for own in gone
            for slot in own.slots
        ]
        yield _Deadline(
            gone=gone,
            free_bytes=filled_bytes(sizes, int(away.free[end])),
            beside_s=sum(away.facts.call_s[call + 1 : end]),
        )


def filled_bytes(sizes: Sequence[int], free_bytes: int) -> int:
    """The most of ``free_bytes`` that some tensors of such ``sizes`` fill, as wholes.

    So windows are the same, and looked at once, in layers with a few bytes more for the same.
    """
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


def _window_s(away: Away, deadlines: Iterable[_Deadline]) -> float:
    """The seconds beyond computation that a window of the forward takes: of its worst deadline."""
    added_s = 0.0
    for deadline in sorted(deadlines, key=lambda own: -_copied_s(away.step, own)):
        if _copied_s(away.step, deadline) <= added_s:  # nor are all that follow worse
            break
        added_s = max(added_s, _late_s(away, deadline))
    return added_s


def _copied_s(step: MovableStep, deadline: _Deadline) -> float:
    """The seconds beyond computation of one way to keep it; no better plan needs more.

    The largest tensors that fit are on the device, all others are copied. Infinite where some of
    them may not be copied.
    """
    slots = [step.classes[own.class_key].slots[slot] for own in deadline.gone for slot in own.slots]
    left, copied = deadline.free_bytes, 0
    for slot in sorted(slots, key=lambda slot: -slot.size_bytes):
        if slot.size_bytes <= left:
            left -= slot.size_bytes
        elif slot.can_offload:
            copied += slot.size_bytes
        else:
            return math.inf
    return max(0.0, copied / step.costs.d2h_bytes_per_s - deadline.beside_s)


def _late_s(away: Away, deadline: _Deadline) -> float:
    """The seconds beyond computation that the deadline's program finds, see the module's text."""
    model = solver.make_model("window of a step")
    stands = model.add_var(name="stands")
    unit_s = unit_of_s(away.step)
    out_s = 1 / (away.step.costs.d2h_bytes_per_s * unit_s)
    kept: list[tuple[float, Any]] = []
    copied: list[tuple[float, Any]] = []
    counted: list[tuple[float, Any]] = []
    for class_key, slots, again, apart, counts in deadline.gone:
        cls = away.step.classes[class_key]
        off = dict.fromkeys(slots, 1)
        x, y = slot_variables(model, cls, off, dict.fromkeys(again, 1), apart=apart)
        there = {slot: model.add_var(var_type="B") for slot in slots}
        for slot in slots:
            model.add_constr(there[slot] + x.get(slot, 0) + y.get(slot, 0) >= 1)
        kept += [(cls.slots[slot].size_bytes, own) for slot, own in there.items()]
        copied += [(cls.slots[slot].size_bytes * out_s, own) for slot, own in y.items()]
        for op, seconds, run in require_operators(model, cls, 1, x) if counts else ():
            counted.append((seconds / unit_s * away.discounts.get((class_key, op), 1.0), run))
    model.add_constr(sum_of(kept) <= float(deadline.free_bytes))
    model.add_constr(sum_of(copied) <= deadline.beside_s / unit_s + stands)
    return minimum_s(model, stands + sum_of(counted), unit_s)
