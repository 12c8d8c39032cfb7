"""How fast a step can be under a budget at best: a bound that no plan of memo goes below.

The step is looked at in a few calls, its *points*, in which keeping everything takes more bytes
than the budget has. In each of them saved tensors of so many bytes must be *away*: copied to the
host before and back after it, or not recomputed yet. One linear program over fractions of tensors
says how long the step stands still for that, and recomputes. It knows nothing of schedules, modes,
placement, or what must be moved as a whole, so that it is never above the time of a plan. The bound
is the computation alone without a budget, or for several turns (a pipeline's stage).

If a step needs 70 GiB at a point, with a budget of 60, tensors of 10 GiB must be away there: that
takes their copies, less what runs beside these, or the operators that make them again.

Symbols. Point k of K splits the step's time; interval k ends at point k, interval K at the end.
Layers of one class whose tensors are made and read in the same intervals are one group of n layers:

    x, y        layers of the group that recompute a tensor, that copy it: x + y <= n
    out[k]      layers whose copy to the host has ended when point k begins; at most y
    back[k]     layers whose copy back has ended when point k ends
    made[k]     layers that have recomputed it when point k ends; 0 in the forward
    run[o, k]   layers that run operator o again in interval k
    w[k]        seconds for which the step stands still in interval k

    minimise    sum w[k] + sum seconds[o] run[o, k]
    bytes       in point k away = out[k] - back[k] + x - made[k], of all tensors together at least
                what is missing there
    lanes       what is copied in an interval takes no longer than the interval: its computation,
                its recomputation and w[k]; so does what is made in it, from where it is made on,
                and what is read in it, up to where it is read
    operators   run[o, k] >= what is made of o in interval k; o runs once for several tensors
    sources     what a tensor is recomputed from is there, and stays until it is read itself
                (nothing is copied back or recomputed twice but what takes no time)
    host        sum size y <= host budget

Among ranks the step also takes what it takes with every wait for a collective as late as its first
reader (``least_seconds.least_of``): the larger of both counts.
"""

import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from memo_compile.planners.least_seconds import least_of_step
from memo_compile.planners.move_rules import (
    StepFacts,
    closure_of,
    facts_of,
    may_pass,
    recompute_seconds,
)
from memo_compile.planners.policy.model import least_alive
from memo_compile.planners.solver import Linear, LinearProgram, SolveStatus, total, weighted
from memo_compile.step.movable import LayerClass, MovableStep, RecomputeRegion, Slot
from memo_compile.step.problem import CallKind, Problem

MAX_POINTS = 16
"""Most calls that are looked at; the program grows with them."""

UNITS_OF_STEP = 1e4
"""A step's computation is so many of the program's units of time: a solver leaves out what costs
less than 1e-7 units."""


def step_lower_bound_s(
    step: MovableStep,
    *,
    budget_bytes: int | None,
    host_budget_bytes: int | None = None,
    regions: Collection[RecomputeRegion] = (),
) -> float:
    """Seconds that every plan of ``step`` within the budgets takes at least; infinite without one.

    ``regions`` are recomputations with measured seconds: where one is faster than its operators
    together, each of these is taken to be as much faster.
    """
    facts = facts_of(step)
    compute_s = sum(facts.call_s)
    least_s = least_of_step(step).step_s if facts.talks else compute_s
    if budget_bytes is None or not step.problem.has_one_turn:
        return least_s
    points = _points_over(step, facts, budget_bytes)
    if not points:
        return least_s
    bound = _Bound(step, facts, points, _shares_of_seconds(step, regions))
    return max(least_s, compute_s + bound.added_s(host_budget_bytes))


class Life(NamedTuple):
    """A saved tensor of one layer, and the calls between which it may be away."""

    layer: int
    slot: int
    made: int
    """The forward's call that makes it."""
    last_use: int
    """The forward's last call that makes or reads it."""
    read: int
    """The backward's first call that reads it."""


class Point(NamedTuple):
    """A call in which bytes are missing; or the border before it, where a backward begins."""

    call: int
    is_border: bool
    missing_bytes: int

    @property
    def end(self) -> int:
        """The first call behind the point."""
        return self.call if self.is_border else self.call + 1

    def may_lack(self, life: Life) -> bool:
        """True where a tensor may be away during a part of the point.

        One that an earlier call made may be gone before the end of the call that reads it last.
        """
        is_gone = life.last_use < self.call or life.made < life.last_use == self.call < self.end
        return is_gone and self.end <= life.read


def _points_over(step: MovableStep, facts: StepFacts, budget_bytes: int) -> Sequence[Point]:
    """The points: calls above the budget, of each of ``MAX_POINTS`` equal parts the highest."""
    alive, beginning_bytes = least_alive(step)
    above = np.flatnonzero(alive > budget_bytes)
    parts = np.array_split(above, max(1, min(len(above), MAX_POINTS)))
    worst = [int(part[alive[part].argmax()]) for part in parts if len(part)]
    points = [Point(call, False, int(alive[call]) - budget_bytes) for call in worst]
    if beginning_bytes > budget_bytes:
        points.append(Point(facts.first_backward, True, beginning_bytes - budget_bytes))
    return sorted(points, key=lambda point: (point.call, point.end))


def _lives_of(step: MovableStep, facts: StepFacts) -> Iterator[Life]:
    """What layers save, can move, and the backward reads; what two layers save is the first one's.

    Among ranks a wait is no use: it may stand right behind the beginning of its collective.
    """
    last_use = _last_uses(step.problem) if facts.talks else facts.last_use
    seen: set[str] = set()
    for number, layer in enumerate(step.layers):
        slots = step.class_of(layer).slots
        for at, (slot, value) in enumerate(zip(slots, layer.values, strict=True)):
            readers = facts.backward_readers.get(value, ())
            if readers and value in last_use and value not in seen:
                seen.add(value)
                made = facts.written_at.get(value, 0)
                if slot.size_bytes and (slot.can_offload or slot.can_recompute):
                    yield Life(number, at, made, max(made, last_use[value]), read=readers[0])


def _last_uses(problem: Problem) -> dict[str, int]:
    """Value -> the last call of the forward that makes or reads it, but for waits, which move."""
    last_use: dict[str, int] = {}
    for at, call in enumerate(problem.calls[: problem.first_backward]):
        read = () if call.kind is CallKind.COMM_WAIT else call.inputs
        last_use.update(dict.fromkeys((*read, *call.outputs), at))
    return last_use


def _shares_of_seconds(
    step: MovableStep, regions: Collection[RecomputeRegion]
) -> dict[tuple[str, int], float]:
    """(class, operator) -> the least share of its seconds that it takes in one of ``regions``."""
    least_share: dict[tuple[str, int], float] = {}
    for region in regions:
        key = region.key
        seconds = recompute_seconds(step, key)
        share = min(1.0, region.seconds / seconds) if seconds > 0 else 1.0
        for op in closure_of(step.classes[key.class_key], key.slots, key.passing):
            least_share[key.class_key, op] = min(share, least_share.get((key.class_key, op), 1.0))
    return least_share


class _Absence(NamedTuple):
    """When the tensor of one slot may be away, by numbers of points.

    With points in calls 10, 20 and 30: a tensor that call 12 makes and 22 reads last, until the
    backward's call 40 does, has early 1, first 2 and end 3.
    """

    slot: int
    early: int
    """The first point behind the call that makes it: its copy to the host may have ended there."""
    first: int
    """The first point in which it may be away."""
    end: int
    """The first point behind those."""


class _Tensor:
    """The variables of one saved tensor of a group of layers; 0 where there are none."""

    def __init__(
        self, program: LinearProgram, absence: _Absence, slot: Slot, num_layers: int, turn: int
    ):
        def variables(first: int, is_able: bool) -> dict[int, Linear]:
            """Per point from ``first`` on a variable that never falls; none unless ``is_able``."""
            if not is_able:
                return {}
            variable_of = {k: program.variable(high=num_layers) for k in range(first, absence.end)}
            for earlier, later in itertools.pairwise(variable_of.values()):
                program.require(earlier <= later)
            return variable_of

        self.absence = absence
        self.out = variables(absence.early, slot.can_offload)
        self.back = variables(absence.first + 1, slot.can_offload)
        self.made = variables(max(absence.first + 1, turn), slot.can_recompute)
        self.y: Linear | float = self.out.get(absence.end - 1, 0.0)
        self.x: Linear | float = 0.0
        if slot.can_recompute:
            self.x = program.variable(high=num_layers)
            program.require(self.x + self.y <= num_layers)
        for recomputed in self.made.values():
            program.require(recomputed <= self.x)
        for k, copied in self.back.items():
            program.require(copied <= self.out[k])

    def growth(self, layers: Mapping[int, Linear], at_end: Linear | float, k: int) -> Linear:
        """How much ``layers`` (out, back, made) grows in interval ``k``; ``at_end`` is its last."""
        until = at_end if k == self.absence.end else layers.get(k, 0.0)
        return total([until, -layers.get(k - 1, 0.0)])

    def recomputed(self, k: int) -> Linear | float:
        """``made[k]``."""
        return self.x if k >= self.absence.end else self.made.get(k, 0.0)

    def away(self, k: int) -> Linear:
        """How many layers lack it in point ``k``."""
        parts = (self.out.get(k, 0.0), self.x, self.back.get(k, 0.0), self.made.get(k, 0.0))
        return weighted((1.0, 1.0, -1.0, -1.0), parts)


class _Bound:
    """The linear program of a step and its points; symbols as above."""

    def __init__(
        self,
        step: MovableStep,
        facts: StepFacts,
        points: Sequence[Point],
        shares: Mapping[tuple[str, int], float],
    ) -> None:
        self.step, self.facts, self.points, self.shares = step, facts, points, shares
        self.unit_s = sum(facts.call_s) / UNITS_OF_STEP or 1.0
        self.unit_bytes = float(max(point.missing_bytes for point in points))
        self.turn = sum(point.call < facts.first_backward for point in points)
        """The first point of the backward."""
        self.program = LinearProgram()
        self.lives = [*_lives_of(step, facts)]
        count = len(points) + 1
        self.away: list[list[Linear]] = [[] for _ in points]
        """Per point the bytes that are away."""
        self.out_bytes, self.made_bytes, self.back_bytes, self.read_bytes = (
            [list[Linear]() for _ in range(count)] for _ in range(4)
        )
        """Per interval the bytes that are copied to the host, and of these what it made itself;
        that are copied back, and of these what it reads itself."""
        self.extra_s = [[self.program.variable()] for _ in range(count)]
        """Per interval the seconds beyond computation: w, and what runs again."""
        self.copied: list[Linear] = []
        """Bytes that the host holds."""

    def added_s(self, host_budget_bytes: int | None) -> float:
        """Seconds beyond computation; infinite where nothing keeps the budgets."""
        for (class_key, absences), num_layers in Counter(self._groups()).items():
            self._add_group(self.step.classes[class_key], absences, num_layers)
        require = self.program.require
        for point, away in zip(self.points, self.away, strict=True):
            require(total(away) >= point.missing_bytes / self.unit_bytes)
        byte_s = self.unit_bytes / self.unit_s
        for copies, k, span_s, rate in self._copies_by_interval():
            if copies:
                copies_s = total(copies) * (byte_s / rate)
                require(copies_s <= total(self.extra_s[k]) + span_s / self.unit_s)
        if host_budget_bytes is not None:
            require(total(self.copied) <= host_budget_bytes / self.unit_bytes)
        self.program.minimise(total(list(itertools.chain(*self.extra_s))))
        status = self.program.solve()
        if status is SolveStatus.INFEASIBLE:
            return math.inf
        added = self.program.value(self.program.objective) if status.has_solution else 0.0
        return max(0.0, added * self.unit_s)

    def _absences(self) -> Iterator[tuple[_Absence, Life]]:
        """Each tensor that may be away in a point: when, and its life."""
        calls = [point.call for point in self.points]
        for life in self.lives:
            lacks = [k for k, point in enumerate(self.points) if point.may_lack(life)]
            if lacks:
                early = bisect_right(calls, life.made)
                yield _Absence(life.slot, early, lacks[0], lacks[-1] + 1), life

    def _groups(self) -> Iterator[tuple[str, tuple[_Absence, ...]]]:
        """Per layer (class, absences of its tensors): those of a group have the same."""
        by_layer: dict[int, list[_Absence]] = {}
        for absence, life in self._absences():
            by_layer.setdefault(life.layer, []).append(absence)
        for layer, absences in by_layer.items():
            yield self.step.layers[layer].class_key, tuple(absences)

    def _copies_by_interval(self) -> Iterator[tuple[Sequence[Linear], int, float, float]]:
        """(terms of the bytes copied, interval, seconds of computation beside it, bytes/s).

        To the host from one point's beginning to the next one's, and back between their ends.
        """
        until_s = [0.0, *itertools.accumulate(self.facts.call_s)]  # before each call
        begins, ends = [point.call for point in self.points], [point.end for point in self.points]
        # Per interval the first call behind one that makes a tensor, and the last that reads one.
        made, read = [*begins], [*begins, 0]
        for absence, life in self._absences():
            made[absence.early] = min(made[absence.early], life.made + 1)
            read[absence.end] = max(read[absence.end], life.read)
        rate, back_rate = self.step.costs.d2h_bytes_per_s, self.step.costs.h2d_bytes_per_s
        for k, begin in enumerate(begins):
            yield self.made_bytes[k], k, until_s[begin] - until_s[made[k]], rate
            yield self.read_bytes[k + 1], k + 1, until_s[read[k + 1]] - until_s[ends[k]], back_rate
        for k, (before, after) in enumerate(itertools.pairwise(begins), start=1):
            yield self.out_bytes[k], k, until_s[after] - until_s[before], rate
        for k, (before, after) in enumerate(itertools.pairwise(ends), start=1):
            yield self.back_bytes[k], k, until_s[after] - until_s[before], back_rate

    def _add_group(self, cls: LayerClass, absences: Sequence[_Absence], num_layers: int) -> None:
        """Variables and constraints of a group of layers."""
        program = self.program
        tensors = {
            absence.slot: _Tensor(program, absence, cls.slots[absence.slot], num_layers, self.turn)
            for absence in absences
        }
        for slot, tensor in tensors.items():
            size = cls.slots[slot].size_bytes / self.unit_bytes
            absence = tensor.absence
            for k in range(absence.first, absence.end):
                self.away[k].append(size * tensor.away(k))
            for k in tensor.out:
                self.out_bytes[k].append(size * tensor.growth(tensor.out, tensor.y, k))
            if tensor.out:
                self.made_bytes[absence.early].append(size * tensor.out[absence.early])
                for k in range(absence.first + 1, absence.end + 1):
                    self.back_bytes[k].append(size * tensor.growth(tensor.back, tensor.y, k))
                self.read_bytes[absence.end].append(self.back_bytes[absence.end][-1])
                self.copied.append(size * total([tensor.y]))
            for source in _sources_of(cls, slot) & tensors.keys():
                other = tensors[source]
                first = max(other.absence.first, absence.first + 1, self.turn)
                for k in range(first, other.absence.end):
                    program.require(other.away(k) + tensor.recomputed(k) <= num_layers)
        for k in range(self.turn, len(self.points) + 1):
            made = {
                slot: tensor.growth(tensor.made, tensor.x, k)
                for slot, tensor in tensors.items()
                if cls.slots[slot].can_recompute and tensor.absence.first < k <= tensor.absence.end
            }
            self.extra_s[k] += self._rerun_s(cls, made)

    def _rerun_s(self, cls: LayerClass, made: Mapping[int, Linear]) -> Iterator[Linear]:
        """The seconds of each operator in an interval in which ``made`` layers make each slot."""
        makers = {op.slot: at for at, op in enumerate(cls.ops)}
        needs: dict[int, list[Linear]] = {}  # operator -> in how many layers each reader runs
        for at in reversed(range(len(cls.ops))):
            op = cls.ops[at]
            if op.slot is not None:
                needs[at] = [made[op.slot]] if op.slot in made and makers[op.slot] == at else []
            run_terms = needs.get(at, [])
            if not op.can_recompute or not run_terms:
                continue
            if op.seconds > 0 and len(run_terms) > 1:  # it runs once for all of them
                run = self.program.variable()
                for need in run_terms:
                    self.program.require(need <= run)
                run_terms = [run]
            if op.seconds > 0:
                share = self.shares.get((cls.key, at), 1.0)
                yield run_terms[0] * (op.seconds * share / self.unit_s)
            for source in op.inputs:
                if cls.ops[source].slot is None:  # it runs wherever this operator does
                    source_terms = needs.setdefault(source, [])
                    source_terms += [need for need in run_terms if need not in source_terms]


def _sources_of(cls: LayerClass, slot: int) -> set[int]:
    """The slots from which ``slot`` is recomputed, without those that may be made twice."""
    if not cls.slots[slot].can_recompute:
        return set()
    read = {cls.ops[at].slot for op in closure_of(cls, (slot,)) for at in cls.ops[op].inputs}
    return {
        source
        for source in read
        if source is not None and source != slot and not may_pass(cls, source)
    }
