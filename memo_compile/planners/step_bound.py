"""How fast a step can be under a budget at best: a bound that no plan of memo goes below.

At one point p of the step the bytes above the budget must be somewhere else, whatever the plan:
copied to the host before p and back after it, or not made yet. One linear program for each point,
over fractions of tensors, and the largest answer counts. It knows nothing of schedules, modes,
placement or layers as wholes, so it is never above the time of a plan.

Among ranks a second bound counts where it is larger: the computation with every wait for a
collective as late as its first reader, as if memory were free. Recomputation and copies may hide in
those waits, so that the two do not add up, but for the forward's with the windows below, and for
what an operator that cannot be split takes beyond all collectives that may be in flight beside it.

What is not on the device at p and read before a later point q of the backward must come back
between the two, so that for points p, q, r, ... of the backward the seconds of such windows add up.
What is read first must come first: a window takes what its worst deadline does. Where few bytes are
free windows take more than a single point, and count. They lie in the backward, so that the seconds
for which the forward stands still come on top: the least ``u`` of the program below for a point of
the forward, whatever is recomputed.

Nothing is copied back or made again twice. So what a recomputation reads stays on the device until
the backward reads it too; where there is no room for it, no plan recomputes the slot.

Symbols, for each class of layers with n layers whose slot s is not in use at p:

    y[s], x[s]    layers whose slot s is offloaded, recomputed: x + y <= n
    z[o]          layers that run operator o a second time: z[maker of s] >= x[s], and for each
                  input i of o: z[i] >= z[o] - (layers that have i at hand)
    before, after seconds of computation in which a copy can run before p, and after it
    u, v          seconds for which the step stands still before p, and after it

    minimise      u + v + R,   R = sum z[o] seconds[o]
    bytes         sum size[s] (x[s] + y[s]) >= alive[p] - budget
    out, back     sum d2h[s] y[s] <= before + u,    sum h2d[s] y[s] <= after + v
    host          sum size[s] y[s] <= host budget

``before`` and ``after`` hold R as well where p lies in the backward.

For a deadline d of a window that begins at p, with s of each layer by itself, first read by d or
read by what recomputes such a slot, and w[s] = 1 where s is on the device at p as a whole:

    minimise      v + R,   x[s] whole where s cannot be recomputed for a part of its rows
    at hand       w[s] + x[s] + y[s] >= 1 where s is read by d,
                  w[t] + x[t] + y[t] >= x[s] for each t that recomputing s reads
    bytes         sum size[s] w[s] <= free bytes at p
    back          sum h2d[s] y[s] <= computation between p and d + v + R
"""

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from memo_compile.errors import ConfigError
from memo_compile.planners import solver
from memo_compile.planners.comm_windows import at_once, late, least_of
from memo_compile.planners.move_rules import (
    StepFacts,
    can_split,
    closure_of,
    facts_of,
    recompute_seconds,
)
from memo_compile.planners.policy.model import call_bytes
from memo_compile.planners.solver import weighted
from memo_compile.step.movable import LayerClass, MovableStep, RecomputeRegion
from memo_compile.step.problem import Problem
from memo_compile.step.residency import step_constant_bytes
from memo_compile.step.simulate import most_per_call

MAX_POINTS = 16
"""Most linear programs that are solved for one bound; each takes milliseconds."""

UNITS = 1e4
"""Times that go into a step's computation, of the unit of time in programs. Engines leave out what
costs less than 1e-7: of a step of microseconds such seconds are too much."""


def step_lower_bound_s(
    step: MovableStep,
    *,
    budget_bytes: int | None,
    host_budget_bytes: int | None = None,
    regions: Collection[RecomputeRegion] = (),
) -> float:
    """Seconds that every plan of ``step`` within the budgets takes at least.

    ``regions`` are recomputations whose seconds are known: where one is faster than its operators
    together, each of these is taken to be as much faster. Without a solver, or a budget, it is the
    computation alone, with what it waits for other ranks. Infinite where no plan can be.
    """
    facts = facts_of(step)
    if not facts.talks:
        found = _found(step, facts, budget_bytes, host_budget_bytes, regions)
        return sum(facts.call_s) + found.beyond_s(0.0)
    alone = least_of(step.problem, step.costs)
    waits_s = max(0.0, alone.forward_s - facts.halves_s[0])
    found = _found(step, facts, budget_bytes, host_budget_bytes, regions, alone.in_flight_s)
    return max(alone.step_s + found.unhidden_s, sum(facts.call_s) + found.beyond_s(waits_s))


class _Found(NamedTuple):
    """Seconds beyond computation that a step takes at least."""

    windows_s: float
    """In the backward, which waits for copies back."""
    forward_s: float
    """In the forward, which waits for copies to the host."""
    whole_s: float
    """Of the worst single point."""
    unhidden_s: float
    """Of recomputation that no wait for other ranks hides."""

    def beyond_s(self, waits_s: float) -> float:
        """All of them, where the forward waits so long for other ranks."""
        return max(max(waits_s, self.forward_s) + self.windows_s, self.whole_s)


_NOTHING = _Found(0.0, 0.0, 0.0, 0.0)


def _found(
    step: MovableStep,
    facts: StepFacts,
    budget_bytes: int | None,
    host_budget_bytes: int | None,
    regions: Collection[RecomputeRegion],
    in_flight_s: float = math.inf,
) -> _Found:
    """What keeping the budgets takes. Collectives of ``in_flight_s`` may hide a recomputation."""
    if budget_bytes is None or not step.problem.has_one_turn:  # in pipelines: of compute alone
        return _NOTHING
    excess = _alive(step, facts) - budget_bytes
    lives, discounts = list(_lives(step, facts)), _discounts(step, regions)
    once = {life.value: life for life in reversed(lives)}  # the first layer moves what two share
    moved = [life for life in once.values() if _size(step, life)]
    free = np.maximum(0, _off_bytes(step, moved, len(facts.call_s)) - excess)
    never = frozenset(_never_again(step, moved, free))
    hosts = host_budget_bytes, discounts, in_flight_s
    try:
        added = [
            _added_s(step, _point(facts, lives, never, at), int(excess[at]), *hosts)
            for at in _points(excess, facts.first_backward)
        ]
        windows_s = _windows_s(step, facts, moved, free, never, discounts)
    except ConfigError:  # no engine on this machine
        return _NOTHING
    most = (max(kind) for kind in zip(_Added(0.0, 0.0, 0.0), *added, strict=True))
    return _Found(windows_s, *most)


def _alive(step: MovableStep, facts: StepFacts) -> Any:
    """Per call (int64) the device bytes with everything kept, collectives in the plans' order.

    What only the loss needs is gone on the backward's first line. In a plan that may be a copy's:
    then it is gone before the first call has made anything.
    """
    problem = step.problem
    alive = _kept_bytes(step, facts, problem) if facts.talks else call_bytes(step)[0]
    if not problem.loss_bytes:
        return alive
    first = problem.regions[problem.calls[problem.first_backward].region]
    begun_bytes = sum(
        sum(made.size_bytes for made in kind if not made.start)
        for kind in (first.buffers, first.outside, first.outputs)
    )
    without_loss = _kept_bytes(step, facts, replace(problem, loss_bytes=0))
    return np.maximum(without_loss, alive - begun_bytes)


def _kept_bytes(step: MovableStep, facts: StepFacts, problem: Problem) -> Any:
    if not facts.talks:
        return most_per_call(problem, facts.tables) + step_constant_bytes(problem)
    late_or_not = late(problem) if step.waits_late else at_once(problem)
    alive = most_per_call(late_or_not) + step_constant_bytes(late_or_not)
    bytes_of = dict(zip((call.name for call in late_or_not.calls), alive, strict=True))
    return np.array([bytes_of[call.name] for call in problem.calls])


def _points(excess: Any, first_backward: int) -> list[int]:
    """Calls at which bytes are above the budget: the worst, and some spread over the step."""
    above = np.flatnonzero(excess > 0)
    if not len(above):
        return []
    spread = np.linspace(0, len(above) - 1, min(len(above), MAX_POINTS // 2)).astype(int)
    worst = above[np.argsort(-excess[above], kind="stable")][: MAX_POINTS // 2]
    near = above[np.argsort(abs(above - first_backward), kind="stable")][:2]
    return sorted({*above[spread].tolist(), *worst.tolist(), *near.tolist()})


def _discounts(
    step: MovableStep, regions: Collection[RecomputeRegion]
) -> dict[tuple[str, int], float]:
    """(class, operator) -> the least share of its seconds that it takes in a known region.

    A region takes its share of its operators' seconds, which is at least the sum of theirs by the
    least share of each.
    """
    found: dict[tuple[str, int], float] = {}
    for region in regions:
        key = region.key
        seconds = recompute_seconds(step, key)
        share = min(1.0, region.seconds / seconds) if seconds > 0 else 1.0
        for op in closure_of(step.classes[key.class_key], key.slots):
            found[key.class_key, op] = min(share, found.get((key.class_key, op), 1.0))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """What may be off the device during one call, and the time around it."""

    num_off: "_Counts"
    """Layers that hold a slot and do not need it all through the call."""
    num_again: "_Counts"
    """Those of them that may recompute it."""
    before_s: float
    after_s: float
    in_backward: bool


_Counts = Mapping[str, Mapping[int, int]]
"""Class -> slot -> how many of its layers."""


class _Life(NamedTuple):
    """A saved value of one layer."""

    value: str
    layer: int
    class_key: str
    slot: int
    made: int
    """The forward's call that makes it."""
    last_use: int
    """The forward's last call that has to do with it."""
    read: int
    """The backward's first that reads it."""

    def may_be_off(self, at: int) -> bool:
        """True where some of call ``at`` can run without it.

        A value that an earlier call made may be gone before the end of the call that reads it last.
        """
        done = self.last_use < at or self.made < self.last_use == at
        return done and at < self.read


def _lives(step: MovableStep, facts: StepFacts) -> Iterator[_Life]:
    for number, layer in enumerate(step.layers):
        for slot, value in enumerate(layer.values):
            readers = facts.backward_readers.get(value, ())
            if readers and value in facts.last_use:
                made = facts.written_at.get(value, 0)
                last_use = facts.last_use[value]
                yield _Life(value, number, layer.class_key, slot, made, last_use, readers[0])


def _never_again(step: MovableStep, moved: Sequence[_Life], free: Any) -> Iterator[tuple[int, int]]:
    """(layer, slot) of what no plan recomputes.

    A region reads tensors that stay on the device until the backward reads them, since nothing is
    copied back twice. ``free`` are the bytes that there are for them during each call.
    """
    lives = {(life.layer, life.slot): life for life in moved}
    known: dict[tuple[str, int], frozenset[int]] = {}
    for life in moved:
        key = life.class_key, life.slot
        if key not in known:
            known[key] = _sources(step.classes[life.class_key], life.slot)
        found = (lives.get((life.layer, source)) for source in known[key])
        held = [source for source in found if source is not None and source.read > life.read]
        for until in sorted({source.read for source in held}):
            held_bytes = sum(_size(step, source) for source in held if source.read >= until)
            if held_bytes > free[life.read : until].min():
                yield life.layer, life.slot
                break


def _point(
    facts: StepFacts, lives: Sequence[_Life], never: Collection[tuple[int, int]], at: int
) -> _Point:
    off = [life for life in lives if life.may_be_off(at)]
    seconds = facts.call_s
    return _Point(
        num_off=_counted(off),
        num_again=_counted(life for life in off if (life.layer, life.slot) not in never),
        before_s=sum(seconds[min(life.made for life in off) + 1 : at]) if off else 0.0,
        after_s=sum(seconds[at + 1 : max(life.read for life in off)]) if off else 0.0,
        in_backward=at >= facts.first_backward,
    )


def _counted(lives: Iterable[_Life]) -> _Counts:
    found: dict[str, Counter[int]] = {}
    for life in lives:
        found.setdefault(life.class_key, Counter())[life.slot] += 1
    return found


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


def _windows_s(
    step: MovableStep,
    facts: StepFacts,
    moved: Sequence[_Life],
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


def _scarcest(free: Any, borders: Iterable[int], *, last: bool = False) -> Iterator[int]:
    """Between each two borders the first call, or the last, at which the fewest bytes are free."""
    for first, end in itertools.pairwise(borders):
        some = free[first:end]
        yield end - 1 - int(some[::-1].argmin()) if last else first + int(some.argmin())


def _deadlines(
    step: MovableStep,
    facts: StepFacts,
    moved: Iterable[_Life],
    never: Collection[tuple[int, int]],
    window: tuple[int, int],
    free_bytes: int,
) -> Iterator[_Deadline]:
    """Those of a window from behind one call to the end of another."""
    at, end = window
    away: dict[int, list[_Life]] = {}
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
    away: Iterable[Sequence[_Life]],
    never: Collection[tuple[int, int]],
    call: int,
) -> Iterator[_Due]:
    for own in away:
        slots = tuple(life.slot for life in own if life.read <= call)
        if slots:
            cls = step.classes[own[0].class_key]
            again = frozenset(life.slot for life in own if (life.layer, life.slot) not in never)
            read = frozenset().union(*(_sources(cls, slot) for slot in again.intersection(slots)))
            later = (life.slot for life in own if life.read > call)
            yield _Due(own[0].class_key, slots, tuple(sorted(read.intersection(later))), again)


def _sources(cls: LayerClass, slot: int) -> frozenset[int]:
    """The other slots that recomputing ``slot`` reads; none where it cannot be recomputed."""
    if not cls.slots[slot].can_recompute:
        return frozenset()
    read = {
        cls.ops[source].slot for op in closure_of(cls, (slot,)) for source in cls.ops[op].inputs
    }
    return frozenset(other for other in read if other is not None and other != slot)


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
    unit_s = _unit_s(step)
    for class_key, slots, later, may_again in deadline.due:
        cls = step.classes[class_key]
        off = dict.fromkeys((*slots, *later), 1)
        x, y = _slot_variables(model, cls, off, dict.fromkeys(may_again, 1), whole=True)
        there = {slot: model.add_var(var_type="B") for slot in (*slots, *later)}
        at_hand = {slot: there[slot] + x.get(slot, 0) + y.get(slot, 0) for slot in there}
        for slot in slots:
            model.add_constr(at_hand[slot] >= 1)
            if slot in x:
                for source in _sources(cls, slot).intersection(later):
                    model.add_constr(at_hand[source] >= x[slot])
        kept += [(cls.slots[slot].size_bytes, own) for slot, own in there.items()]
        copied += [(cls.slots[slot].size_bytes, own) for slot, own in y.items()]
        runs += [
            (seconds / unit_s * discounts.get((class_key, op), 1.0), run)
            for op, seconds, run in _require_operators(model, cls, 1, x)
        ]
    again = weighted(*zip(*runs, strict=True)) if runs else weighted([], [])
    model.add_constr(weighted(*zip(*kept, strict=True)) <= float(deadline.free_bytes))
    rate = step.costs.h2d_bytes_per_s * unit_s
    back = weighted([size / rate for size, _ in copied], [own for _, own in copied])
    model.add_constr(back <= deadline.after_s / unit_s + stall + again)
    return _least_s(model, stall + again, unit_s)


def _size(step: MovableStep, life: _Life) -> int:
    """Bytes of a slot that may be off the device; 0 for one that must stay."""
    slot = step.classes[life.class_key].slots[life.slot]
    return slot.size_bytes if slot.can_offload or slot.can_recompute else 0


def _off_bytes(step: MovableStep, moved: Iterable[_Life], num_calls: int) -> Any:
    """Per call (int64) the bytes of ``moved`` that may be off the device during it."""
    changes = np.zeros(num_calls + 1, dtype=np.int64)
    for life in moved:
        start = life.last_use + (life.made == life.last_use)
        if start < life.read:
            changes[start] += _size(step, life)
            changes[life.read] -= _size(step, life)
    return changes.cumsum()[:-1]


class _Added(NamedTuple):
    """Seconds beyond computation that a point takes at least."""

    forward_s: float
    """In the forward alone, whatever is recomputed."""
    step_s: float
    unhidden_s: float
    """Of operators that cannot be split: what they take beyond the collectives in flight."""


def _added_s(
    step: MovableStep,
    point: _Point,
    excess_bytes: int,
    host_budget_bytes: int | None,
    discounts: Mapping[tuple[str, int], float],
    in_flight_s: float,
) -> _Added:
    """The seconds beyond computation that the point's linear program finds."""
    model = solver.make_model("bound of a step")
    stalls = [model.add_var(name=name) for name in ("u", "v")]
    moved: list[tuple[int, Any, Any]] = []
    runs: list[tuple[float, Any]] = []
    unhidden: list[tuple[float, Any]] = []
    unit_s = _unit_s(step)
    for class_key, num_off in point.num_off.items():
        cls = step.classes[class_key]
        x, y = _slot_variables(model, cls, num_off, point.num_again.get(class_key, {}))
        for op, seconds, run in _require_operators(model, cls, max(num_off.values()), x):
            least_s = seconds * discounts.get((class_key, op), 1.0)
            runs.append((least_s / unit_s, run))
            if least_s > in_flight_s and not cls.ops[op].row_wise:
                unhidden.append(((least_s - in_flight_s) / unit_s, run))
        moved += [(cls.slots[slot].size_bytes, x.get(slot, 0), y.get(slot, 0)) for slot in x | y]
    again = weighted([seconds for seconds, _ in runs], [run for _, run in runs])
    sizes = [size_bytes for size_bytes, _, _ in moved]
    offloaded = [y for _, _, y in moved]
    off = weighted(sizes, offloaded) + weighted(sizes, [x for _, x, _ in moved])
    model.add_constr(off >= float(excess_bytes), "bytes")
    rates = (step.costs.d2h_bytes_per_s, step.costs.h2d_bytes_per_s)
    for stall, seconds, rate, may_recompute in zip(
        stalls, (point.before_s, point.after_s), rates, (point.in_backward, True), strict=True
    ):
        if seconds == math.inf:
            continue
        room = seconds / unit_s + stall + (again if may_recompute else 0.0)
        copied = weighted([size / rate / unit_s for size in sizes], offloaded)
        model.add_constr(copied <= room)
    if host_budget_bytes is not None:
        model.add_constr(weighted(sizes, offloaded) <= float(host_budget_bytes), "host")
    step_s = _least_s(model, stalls[0] + stalls[1] + again, unit_s)
    is_open = 0 < step_s < math.inf
    in_forward = is_open and not point.in_backward
    forward_s = _least_s(model, stalls[0] + 0.0, unit_s) if in_forward else 0.0
    beyond = weighted(*zip(*unhidden, strict=True)) if unhidden and is_open else None
    return _Added(forward_s, step_s, 0.0 if beyond is None else _least_s(model, beyond, unit_s))


def _least_s(model: Any, objective: Any, unit_s: float) -> float:
    """The least ``objective``, whose unit are so many seconds; infinite where nothing keeps it."""
    model.objective = objective
    status = solver.solve(model)
    if status is solver.SolveStatus.INFEASIBLE:
        return math.inf
    if not status.has_solution:
        return 0.0
    least = model.objective_bound if model.num_int else model.objective_value
    return unit_s * max(0.0, float(least))


def _unit_s(step: MovableStep) -> float:
    """The unit of time in programs of ``step``, see ``UNITS``."""
    return sum(facts_of(step).call_s) / UNITS or 1.0


def _slot_variables(
    model: Any,
    cls: LayerClass,
    num_off: Mapping[int, int],
    num_again: Mapping[int, int],
    *,
    whole: bool = False,
) -> tuple[dict[int, Any], dict[int, Any]]:
    """Per slot the layers that recompute it, and that offload it.

    With ``whole``, of one layer: what cannot be recomputed for a part of its rows is or is not.
    """
    x: dict[int, Any] = {}
    y: dict[int, Any] = {}
    for slot, kind in enumerate(cls.slots):
        count, again = num_off.get(slot, 0), num_again.get(slot, 0)
        if again and kind.can_recompute:
            is_whole = whole and not can_split(cls, (slot,))
            x[slot] = model.add_var(var_type="B") if is_whole else model.add_var(ub=again)
        if count and kind.can_offload:
            y[slot] = model.add_var(ub=count)
        if slot in x and slot in y:
            model.add_constr(x[slot] + y[slot] <= count)
    return x, y


def _require_operators(
    model: Any, cls: LayerClass, num_layers: int, x: Mapping[int, Any]
) -> list[tuple[int, float, Any]]:
    """Each operator that a recomputed slot needs: its seconds, and how many layers run it again."""
    makers = {op.slot: at for at, op in enumerate(cls.ops) if op.slot is not None}
    users: dict[int, list[int]] = {}
    for at, op in enumerate(cls.ops):
        for source in op.inputs:
            users.setdefault(source, []).append(at)
    runs: dict[int, Any] = {}
    for at in reversed(range(len(cls.ops))):
        op = cls.ops[at]
        if op.slot is None:
            needs = [runs[user] for user in users.get(at, ()) if user in runs]
        else:
            needs = [x[op.slot]] if op.slot in x and makers[op.slot] == at else []
        if op.can_recompute and needs:
            runs[at] = model.add_var(ub=num_layers)
            for need in needs:
                model.add_constr(runs[at] >= need)
    return [(at, cls.ops[at].seconds, run) for at, run in runs.items()]
