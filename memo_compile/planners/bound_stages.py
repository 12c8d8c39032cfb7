"""The seconds for which a step stands still in a window of its backward, at least: one program.

A window is cut into stages at its points, which are calls at which few bytes are free. Stage i is
what the step does from behind point i on until the next point. For each slot s of a layer, with
D[s] the stage in which it is read first, and u[i] the seconds for which stage i stands still:

    w[i,s]            1 where s is on the device at point i, as a whole
    x[i,s], p[i,s]    the parts that a region makes in stage i: to be kept, and on the way
    y[i,n,s]          the part that is copied back from point i on, by deadline n

    minimise          sum u + R
    at hand           w[i,s] + x[i..D,s] + y[i,n,s] >= 1 where s is read by n, for each i <= D
    sources           w[i,t] + x[i..k,t] + p[k,t] + y[i,n,t] >= x[k,s] where making s reads t, for
                      each i <= k, and n as s is read, or the end of stage k; as well for p[k,s]
    made              the sum of x[i,s] is what is ever made of s, where it is read in the window;
                      x[-1,s] is what was made before it
    stays             w[j,s] >= x[i,s] for all j > i until s is read, and with making s from t in
                      stage i, w[j,t] + p[i,t] >= x[i,s]
    bytes             sum size[s] w[i,s] <= free bytes at point i
    back              sum h2d[s] y[i,n,s] <= computation from point i to deadline n + (u + r)[i..]
    in turn           what is made from t in stage i waits for the copy of t that began in it, which
                      it does not hide: (1 - w[i,t] - x[i,t] - p[i,t]) h2d[t] + seconds from t to s
                      <= computation + u[i] + r[i], where all between the two is made in it

The sums of x, and each y, are at most those of ``step_bound``; so are the seconds r[i] of operators
that run again in a stage, all together at most R. What one stage finds is a single window's answer.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from memo_compile.planners import solver
from memo_compile.planners.bound_parts import (
    minimum_s,
    require_operators,
    slot_variables,
    sources_of,
    sum_of,
    unit_of_s,
)
from memo_compile.planners.move_rules import closure_of, may_pass
from memo_compile.planners.solver import total
from memo_compile.step.movable import LayerClass, MovableStep

LEAST = 0.002
"""Copies of less than this share of a window's are not said to go before what is made from them."""

BEFORE = -1
"""The stage of what is made again before a window's first point."""

Discounts = Mapping[tuple[str, int], float]
Ops = frozenset[int]


class Due(NamedTuple):
    """Of one layer what a window must have at hand."""

    class_key: str
    reads: tuple[tuple[int, int | None], ...]
    """Its slots, each with the number of the deadline by which it is read; None where that is after
    the window, but making another reads it."""
    again: frozenset[int]
    """Those of them that may be recomputed."""
    apart: frozenset[tuple[int, int]]
    """Pairs of which one may be."""
    counts: bool
    """The seconds of their recomputation count."""
    out: frozenset[int] = frozenset()
    """Those of which the seconds of a copy to the host count as well."""
    out_s: float = 0.0
    """Those seconds, a byte."""
    paid: frozenset[int] = frozenset()
    """Operators whose seconds count in an earlier window of the layer."""


class Deadline(NamedTuple):
    """A call of the window that is the first to read something."""

    stage: int
    beside_s: tuple[float, ...]
    """Computation between each point up to its stage's, and the call."""


class Window(NamedTuple):
    """What is read between two points of a step's backward."""

    due: tuple[Due, ...]
    deadlines: tuple[Deadline, ...]
    """In the order of their calls."""
    free_bytes: tuple[int, ...]
    """At each point what may be on the device of what is read later, in whole tensors."""
    ends: tuple[Deadline, ...]
    """The calls at which the stages end."""


def copied_s(step: MovableStep, window: Window) -> float:
    """The seconds beyond computation of one way to keep it; no better plan needs more.

    The largest tensors that fit at all points are on the device, all others are copied in the stage
    that reads them. Infinite where some of them may not be copied.
    """
    rate = step.costs.h2d_bytes_per_s
    read = [
        (step.classes[due.class_key].slots[slot], number)
        for due in window.due
        for slot, number in due.reads
        if number is not None
    ]
    left = min(window.free_bytes)
    copied = [0] * len(window.deadlines)
    for slot, number in sorted(read, key=lambda own: -own[0].size_bytes):
        if slot.size_bytes <= left:
            left -= slot.size_bytes
        elif slot.can_offload:
            copied[number] += slot.size_bytes
        else:
            return math.inf
    stands_s = [0.0] * len(window.free_bytes)
    begun = list(stands_s)
    for size_bytes, deadline in zip(copied, window.deadlines, strict=True):
        stage = deadline.stage
        begun[stage] += size_bytes / rate
        stands_s[stage] = max(stands_s[stage], begun[stage] - deadline.beside_s[-1])
    out_s = (
        due.out_s * step.classes[due.class_key].slots[slot].size_bytes
        for due in window.due
        for slot in due.out
    )
    return sum(stands_s) + sum(out_s)


def least_s(step: MovableStep, discounts: Discounts, window: Window) -> float:
    """The seconds beyond computation that the window's program finds, see the module's text."""
    program = _Program(step, discounts, window)
    for due in window.due:
        program.add(due)
    return program.least_s()


_Terms = list[tuple[float, Any]]
_Per = dict[tuple[int, int], Any]
"""(stage, slot) -> a variable or an expression."""


class _Program:
    def __init__(self, step: MovableStep, discounts: Discounts, window: Window) -> None:
        self._step, self._discounts, self._window = step, discounts, window
        self._unit_s = unit_of_s(step)
        self._back_s = 1 / (step.costs.h2d_bytes_per_s * self._unit_s)
        self._least = LEAST * window.ends[-1].beside_s[0] / self._unit_s
        self._model = model = solver.make_model("window of a step")
        stages = range(len(window.free_bytes))
        self._stands = [model.add_var(name="stands") for _ in stages]
        self._runs = [model.add_var(name="runs") for _ in stages]
        self._hidden: list[_Terms] = [[] for _ in stages]
        self._there: list[_Terms] = [[] for _ in stages]
        self._ends = (*window.deadlines, *window.ends)
        self._copied: dict[tuple[int, int], _Terms] = {}
        """Per point and deadline the copies in between."""
        self._counted: _Terms = []
        self._always_s = 0.0

    def add(self, due: Due) -> None:
        """Require what the window has to have of a layer."""
        layer = _Layer(self._model, self._step.classes[due.class_key], due, self._window)
        for (stage, slot), there in layer.there.items():
            self._there[stage].append((layer.cls.slots[slot].size_bytes, there))
        for number in range(len(self._ends)):
            self._require_by(layer, number)
        self._run(layer, due)
        self._take_turns(layer)
        for slot in sorted(due.out):
            self._copy_out(layer, slot, due.out_s * layer.cls.slots[slot].size_bytes)

    def least_s(self) -> float:
        """The least seconds, once every layer was added."""
        model = self._model
        for there, free_bytes in zip(self._there, self._window.free_bytes, strict=True):
            model.add_constr(sum_of(there) <= float(free_bytes))
        for runs, hidden in zip(self._runs, self._hidden, strict=True):
            model.add_constr(runs <= sum_of(hidden))
        for (first, number), copies in self._copied.items():
            end = self._ends[number]
            span = slice(first, end.stage + 1)
            room = end.beside_s[first] / self._unit_s
            added = total([*self._stands[span], *self._runs[span]])
            model.add_constr(sum_of(copies) <= room + added)
        objective = total(self._stands) + sum_of(self._counted)
        return self._always_s + minimum_s(model, objective, self._unit_s)

    def _require_by(self, layer: "_Layer", number: int) -> None:
        """What must be at hand by a deadline, or by the end of a stage, from each point before."""
        last = self._ends[number].stage
        for first in range(last + 1):
            for slot, needs in layer.needed_by(first, last, number).items():
                time = layer.cls.slots[slot].size_bytes * self._back_s
                if time <= self._least:
                    continue
                back = layer.back(slot)
                self._copied.setdefault((first, number), []).append((time, back))
                for part, others in needs:
                    at_hand = layer.there[first, slot] + back + total(others)
                    self._model.add_constr(at_hand >= part)

    def _seconds(self, cls: LayerClass, op: int) -> float:
        least = self._discounts.get((cls.key, op), 1.0)
        return cls.ops[op].seconds * least / self._unit_s

    def _run(self, layer: "_Layer", due: Due) -> None:
        """What making slots again takes, and in which stages it runs."""
        made_by = {slot: frozenset(closure_of(layer.cls, (slot,))) for slot in layer.again}
        for op, _, run in require_operators(self._model, layer.cls, 1, layer.again):
            seconds = self._seconds(layer.cls, op)
            if due.counts and op not in due.paid:
                self._counted.append((seconds, run))
            parts = []
            for stage, hidden in enumerate(self._hidden):
                users = [
                    part
                    for own in (layer.made, layer.passing)
                    for (at, slot), part in own.items()
                    if at == stage and op in made_by[slot]
                ]
                if users:
                    parts.append(self._model.add_var(ub=1))
                    self._model.add_constr(parts[-1] <= total(users))
                    hidden.append((seconds, parts[-1]))
            if parts:
                self._model.add_constr(total(parts) <= run)

    def _take_turns(self, layer: "_Layer") -> None:
        """What is made from a copy that its stage began comes after it."""
        for (stage, source), there in layer.there.items():
            time = layer.cls.slots[source].size_bytes * self._back_s
            if time <= self._least:
                continue
            for path, ops in layer.paths_from(source):
                seconds = [sum(self._seconds(layer.cls, op) for op in own) for own in ops]
                if sum(seconds) <= self._least or any(
                    (stage, own) not in layer.made for own in path
                ):
                    continue
                # each slot that is not made from the copy takes the whole of it away
                terms: _Terms = [(-time, there)]
                terms += [(-time, part) for part in layer.made_in(stage, source)]
                for slot, own_s in zip(path, seconds, strict=True):
                    terms.append((time + own_s, layer.made_somehow(stage, slot)))
                # what is made on the way may be so for something that is read later
                is_passing = (stage, path[-1]) in layer.passing
                number = None if is_passing else layer.deadlines[path[-1]]
                beside_s = self._before_s(stage, number) / self._unit_s
                room = beside_s + self._stands[stage] + self._runs[stage]
                self._model.add_constr(sum_of(terms) - time * (len(path) - 1) <= room)

    def _before_s(self, stage: int, number: int | None) -> float:
        """Computation in a stage before what is made in it is read, or the stage ends."""
        if number is not None and self._window.deadlines[number].stage == stage:
            return self._window.deadlines[number].beside_s[-1]
        return self._window.ends[stage].beside_s[-1]

    def _copy_out(self, layer: "_Layer", slot: int, seconds: float) -> None:
        if slot not in layer.again:
            self._always_s += seconds
            return
        stays = self._model.add_var(name="out")
        self._model.add_constr(stays >= 1 - layer.again[slot])
        self._counted.append((seconds / self._unit_s, stays))


_Need = tuple[Any, list[Any]]
"""The part of a slot that must be at hand, and the parts of it that are made until then."""


class _Layer:
    """The variables of one layer in a window."""

    def __init__(self, model: Any, cls: LayerClass, due: Due, window: Window) -> None:
        self.cls, self._model = cls, model
        self._made_of = {slot: sources_of(cls, slot) for slot, _ in due.reads}
        self.deadlines = dict(due.reads)
        last = len(window.free_bytes) - 1
        self._num_deadlines = len(window.deadlines)
        self._stages = {
            slot: last if number is None else window.deadlines[number].stage
            for slot, number in due.reads
        }
        """The stage in which a slot is read; the last one where it is read later."""
        slots = dict.fromkeys(self.deadlines, 1)
        may_again = dict.fromkeys(due.again.intersection(slots), 1)
        x, y = slot_variables(model, cls, slots, may_again, apart=due.apart)
        self.again: Mapping[int, Any] = x
        """The part of each slot that is ever made again."""
        self._back: Mapping[int, Any] = y
        pairs = [(stage, slot) for slot in slots for stage in range(self._stages[slot] + 1)]
        self.there: _Per = {own: model.add_var(var_type="B") for own in pairs}
        before = [(BEFORE, slot) for slot in slots]
        self.made: _Per = {own: model.add_var(ub=1) for own in (*before, *pairs) if own[1] in x}
        self.passing: _Per = {
            own: model.add_var(ub=1) for own in self.made if may_pass(cls, own[1])
        }
        self._somehow: _Per = {}
        self._paths: dict[int, list[tuple[tuple[int, ...], tuple[Ops, ...]]]] = {}
        for slot in x:
            made = total(self._made_from(slot, BEFORE, self._stages[slot]))
            model.add_constr(made <= x[slot])
            if self.deadlines[slot] is not None:
                model.add_constr(made >= x[slot])
        for (_, slot), part in self.passing.items():
            model.add_constr(part <= x[slot])
        for (stage, slot), part in self.made.items():
            for later in range(stage + 1, self._stages[slot] + 1):
                model.add_constr(self.there[later, slot] >= part)
        for _, stage, _, part, source in self._sources():
            for later in range(stage + 1, self._stages[source] + 1):
                on_the_way = self.passing.get((stage, source), 0)
                model.add_constr(self.there[later, source] + on_the_way >= part)

    def _sources(self) -> Iterator[tuple[bool, int, int, Any, int]]:
        """What is made in which stage, or on the way, and what that reads which is read later."""
        for is_kept, parts in ((True, self.made), (False, self.passing)):
            for (stage, slot), part in parts.items():
                for source in self._made_of[slot]:
                    if (max(0, stage), source) in self.there:
                        yield is_kept, stage, slot, part, source

    def back(self, slot: int) -> Any:
        """A part of ``slot`` that is copied back, another one with each call."""
        if slot not in self._back:
            return 0
        part = self._model.add_var(ub=1)
        self._model.add_constr(part <= self._back[slot])
        return part

    def needed_by(self, first: int, last: int, number: int) -> Mapping[int, list[_Need]]:
        """What must be at hand by the deadline of a number, in the last of the stages from one on.

        A number that is no deadline's is that of the last stage's end.
        """
        found: dict[int, list[_Need]] = {}
        is_end = number >= self._num_deadlines
        for slot, due in self.deadlines.items():
            if not is_end and due is not None and due <= number and self._stages[slot] >= first:
                made = self._made_from(slot, first, self._stages[slot])
                found.setdefault(slot, []).append((1, made))
        for is_kept, stage, slot, part, source in self._sources():
            due = self.deadlines[slot]
            is_due = is_end or (is_kept and due is not None and due <= number)
            if first <= stage <= last and is_due:
                made = [*self._made_from(source, first, stage), *self._on_the_way(stage, source)]
                found.setdefault(source, []).append((part, made))
        return found

    def _made_from(self, slot: int, first: int, last: int) -> list[Any]:
        stages = range(first, last + 1)
        return [self.made[stage, slot] for stage in stages if (stage, slot) in self.made]

    def _on_the_way(self, stage: int, slot: int) -> list[Any]:
        return [self.passing[stage, slot]] if (stage, slot) in self.passing else []

    def made_in(self, stage: int, slot: int) -> list[Any]:
        """The parts of a slot that a stage makes, to be kept and on the way."""
        return [*self._made_from(slot, stage, stage), *self._on_the_way(stage, slot)]

    def paths_from(self, source: int) -> Iterator[tuple[tuple[int, ...], tuple[Ops, ...]]]:
        """The slots that are made from ``source``, each by the fewest others in between.

        With the operators of each that run after what it is made from is there.
        """
        if source not in self._paths:
            self._paths[source] = list(_paths_from(self.cls, source, self._made_of))
        return iter(self._paths[source])

    def made_somehow(self, stage: int, slot: int) -> Any:
        """The part of a slot that is made in a stage, to be kept or on the way."""
        own = stage, slot
        if own not in self.passing:
            return self.made[own]
        if own not in self._somehow:
            self._somehow[own] = self._model.add_var(ub=1)
            for part in self.made_in(*own):
                self._model.add_constr(self._somehow[own] >= part)
        return self._somehow[own]


def _paths_from(
    cls: LayerClass, source: int, made_of: Mapping[int, frozenset[int]]
) -> Iterator[tuple[tuple[int, ...], tuple[Ops, ...]]]:
    paths: dict[int, tuple[int, ...]] = {source: ()}
    queue = [source]
    for slot in queue:  # grows
        for other, sources in made_of.items():
            if other not in paths and slot in sources:
                path = paths[other] = (*paths[slot], other)
                queue.append(other)
                pairs = zip((source, *path), path, strict=False)
                yield path, tuple(_ops_from(cls, before, own) for before, own in pairs)


def _ops_from(cls: LayerClass, source: int, slot: int) -> Ops:
    """Those operators that make ``slot`` again which run after something that reads ``source``."""
    found: set[int] = set()
    for op in sorted(closure_of(cls, (slot,))):
        inputs = cls.ops[op].inputs
        if any(own in found or cls.ops[own].slot == source for own in inputs):
            found.add(op)
    return frozenset(found)
