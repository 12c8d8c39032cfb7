"""Where a step waits for other ranks, and what it computes before.

Rewrite, with ``r`` the recomputation that ``Lb`` reads, which also reads ``z``:

    issue y; wait y -> z; r; Lb(z, r)      ->      issue y; r; wait y -> z; Lb(z, r)

A collective is waited for right before the first call that reads its result. Between its beginning
and that wait run the calls that stood behind the wait and do not read it: gradients of weights,
recomputations. The order of calls that compute, and that of collectives, stay what they were, so
that every rank begins the same collectives in the same order. ``filled`` moves recomputations
further, from behind a call that reads the result to before the wait: the windows of Lynx
(arXiv 2406.08756). Nothing is recomputed that the plan does not recompute anyway.
"""

import itertools
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from memo_compile.planners.begin_order import (
    ahead,
    earliest,
    gathers_of,
    in_begin_order,
)
from memo_compile.step.communication import comm_bytes
from memo_compile.step.copy_times import CopyLane
from memo_compile.step.halves import RUNS, halves_of_calls
from memo_compile.step.hand_over import storage_roots
from memo_compile.step.movable import MovableStep, StepCosts
from memo_compile.step.ordinary import outside_bytes
from memo_compile.step.problem import CallKind, Problem, StepCall, Storage
from memo_compile.step.simulate import STALL, simulate
from memo_compile.step.tilings import WholeStep
from memo_compile.step.timed import TimedProgram

MAX_WAITS = 8
"""Most waits that a recomputation is tried at: what is made further ahead is alive for longer."""


def has_collectives(problem: Problem) -> bool:
    """True where the step talks to other ranks at places of its program."""
    return any(call.kind is CallKind.ISSUE for call in problem.calls)


def at_once(problem: Problem) -> Problem:
    """``problem`` that waits for each collective right behind its beginning."""
    problem = in_begin_order(problem)
    waits = {call.waits_for: call for call in problem.calls if call.kind is CallKind.COMM_WAIT}
    calls: list[StepCall] = []
    for call in problem.calls:
        if call.kind is not CallKind.COMM_WAIT:
            calls.append(call)
        if call.kind is CallKind.ISSUE and call.name in waits:
            calls.append(waits[call.name])
    return replace(problem, calls=tuple(calls))


def late(problem: Problem, *, holds_inputs: bool = False) -> Problem:
    """``problem`` that waits for a collective as late as order allows.

    What gathers begins late as well (``in_begin_order``). Cost: linear, and the sorting there.

    Where a collective's input lies apart from its output, and nobody else reads it by then, it
    would be held longer: there the wait stays, but with ``holds_inputs``.
    """
    if not has_collectives(problem):
        return problem
    return in_begin_order(replace(problem, calls=tuple(_Late(problem, holds_inputs).run())))


class Least(NamedTuple):
    """Seconds that every plan of a step takes at least, however much memory there is."""

    forward_s: float
    """Until the first call of the backward."""
    step_s: float
    hideable_s: float
    """Recomputation of at most so many seconds may add nothing to ``step_s``."""
    in_flight_s: float
    """Collectives that may be begun and not waited for at one time: no single call hides more."""

    def with_more_s(self, recompute_s: float) -> float:
        """What the step takes at least with so much recomputation."""
        return self.step_s + max(0.0, recompute_s - self.hideable_s)


def least_s(problem: Problem, costs: StepCosts) -> float:
    """As of ``least_of``, of the whole step."""
    return least_of(problem, costs).step_s


_LEAST: "weakref.WeakKeyDictionary[MovableStep, Least]" = weakref.WeakKeyDictionary()
"""Of each step, kept because every budget asks."""


def least_of_step(step: MovableStep) -> Least:
    """As of ``least_of``, found once."""
    if step not in _LEAST:
        _LEAST[step] = least_of(step.problem, step.costs)
    return _LEAST[step]


def least_of(problem: Problem, costs: StepCosts) -> Least:
    """Seconds that every plan of ``problem`` takes at least, however much memory there is.

    No plan begins a collective earlier, needs its result later, or computes less. What converts the
    input of one that runs ahead takes no time here.

    Let X be the seconds of all computation, C those of collectives, s the slowdown, and I the time
    for which nothing is computed. Of C at least C - I runs beside computation, which loses a share
    of 1 - 1/s of it: the step takes X + I + (C - I)(1 - 1/s) = X + C(1 - 1/s) + I/s. I is the
    longest path of the program less what is computed, the most over paths of (collectives on it
    less computation that is not), so that it is least where all computation takes s times as long.
    A second of recomputation lowers I by at most s.
    """
    ready = {gather.calls[0].region for gather in gathers_of(problem).values()}
    alone_s = {**costs.region_s, **dict.fromkeys(ready, 0.0)} if ready else costs.region_s
    slowdown = costs.comm_slowdown
    slowed_s = {region: slowdown * seconds for region, seconds in alone_s.items()}
    alone = replace(costs, comm_slowdown=1.0, region_s=alone_s)
    slowed = replace(costs, comm_slowdown=1.0, region_s=slowed_s)
    fastest = problem
    for _ in range(2):  # a wait stands before the beginning of another that reads the same input
        fastest = earliest(late(fastest, holds_inputs=True))
    forward = replace(fastest, calls=fastest.calls[: fastest.first_backward])
    found = simulate(fastest, slowed, spans=False)
    waited_s = simulate(forward, slowed, spans=False).exposed_comm_s
    computed_s = compute_s(fastest, alone)
    idle_s = max(0.0, found.step_s - slowdown * computed_s) / slowdown
    lost = 1 - 1 / slowdown
    return Least(
        forward_s=compute_s(forward, alone) + lost * _ended_s(forward, alone) + waited_s / slowdown,
        step_s=computed_s + lost * (found.hidden_comm_s + found.exposed_comm_s) + idle_s,
        hideable_s=idle_s,
        in_flight_s=_in_flight_s(fastest, alone),
    )


def _ended_s(problem: Problem, costs: StepCosts) -> float:
    """Seconds of the collectives that ``problem`` waits for."""
    awaited = {call.waits_for for call in problem.calls if call.kind is CallKind.COMM_WAIT}
    issues = (call for call in problem.calls if call.kind is CallKind.ISSUE)
    return math.fsum(
        costs.comm_s(call.region, comm_bytes(problem, call))
        for call in issues
        if call.name in awaited
    )


def _in_flight_s(problem: Problem, costs: StepCosts) -> float:
    """The most seconds of collectives that have begun before one place and are not waited for."""
    begun: dict[str, float] = {}
    most_s = 0.0
    for call in problem.calls:
        if call.kind is CallKind.ISSUE:
            begun[call.name] = costs.comm_s(call.region, comm_bytes(problem, call))
            most_s = max(most_s, math.fsum(begun.values()))
        elif call.kind is CallKind.COMM_WAIT and call.waits_for is not None:
            begun.pop(call.waits_for, None)
    return most_s


def least_wait_s(problem: Problem, costs: StepCosts) -> float:
    """Seconds that every plan of ``problem`` waits for other ranks."""
    return least_s(problem, costs) - compute_s(problem, costs) if has_collectives(problem) else 0.0


def compute_s(problem: Problem, costs: StepCosts) -> float:
    """Seconds of all that ``problem`` computes."""
    calls = (call for call in problem.calls if call.kind in (CallKind.RUN, CallKind.RECOMPUTE))
    return math.fsum(map(costs.call_s, calls))


def whole_compute_s(
    problem: Problem, whole: WholeStep, costs: StepCosts, region_s: Mapping[str, float]
) -> float:
    """Seconds of ``problem`` before any region ran in tiles, or of itself if those are fewer.

    ``region_s`` are seconds of the regions that it has no more. What every plan waits for other
    ranks counts as well.
    """
    untiled = replace(costs, region_s={**costs.region_s, **region_s})
    whole_s = math.fsum(map(untiled.call_s, whole.calls))
    return min(compute_s(problem, costs), whole_s) + least_wait_s(problem, costs)


def overlapped(program: TimedProgram, *, limit_bytes: int) -> TimedProgram:
    """``program`` that hides its collectives, where no more than ``limit_bytes`` are alive.

    Or no more than before. It waits later where that holds an input (``held``), gathers earlier
    (``ahead``), and recomputes before waits (``filled``), each where the step takes less time.

    Raises:
        InputError: a region has no seconds.
    """
    if not has_collectives(program.problem):
        return program
    for better in (held, ahead, filled):
        program = better(program, limit_bytes=limit_bytes)
    return program


def held(program: TimedProgram, *, limit_bytes: int) -> TimedProgram:
    """``program`` that waits later where ``late`` does not, since the input is held until then.

    A wait moves behind calls until its collective has ended, as far as order allows and no more
    than ``limit_bytes`` are alive. The program is as it was where the step takes no less time.

    Raises:
        InputError: a region has no seconds.
    """
    if program.timeline.exposed_comm_s <= 0:
        return program
    better = program.in_order(tuple(_Held(program, limit_bytes).run()))
    return better if better.is_better_than(program, limit_bytes) else program


class _Late:
    def __init__(self, problem: Problem, holds_inputs: bool) -> None:
        self.problem = problem
        self.holds_inputs = holds_inputs
        self.roots = storage_roots(problem)
        self.given = frozenset(problem.inputs)
        self.in_place = {
            call.name
            for call in problem.calls
            if call.kind is CallKind.ISSUE
            and problem.regions[call.region].outputs[0].storage is Storage.INPUT
        }
        self.last_read: dict[str, int] = {}
        """Storage of a collective's input -> the last call that reads or writes it, but waits."""
        self._find_last_reads()
        self.pending: list[StepCall] = []
        """Waits that stand further up in the program and were not made, in order."""

    def _find_last_reads(self) -> None:
        calls = self.problem.calls
        held = {self._held(call) for call in calls if call.kind is CallKind.COMM_WAIT}
        lies_in = {root: root for root in held}
        lies_in |= {value: root for value, root in self.roots.items() if root in held}
        for at, call in enumerate(calls):
            if call.kind is not CallKind.COMM_WAIT:
                for value in (*call.inputs, *(into.value for into in call.into)):
                    if value in lies_in:
                        self.last_read[lies_in[value]] = at

    def run(self) -> Iterator[StepCall]:
        halves = halves_of_calls(self.problem)
        for at, call in enumerate(self.problem.calls):
            if at and halves[at] != halves[at - 1]:  # a copy may be the half's first call
                yield from self._made(self.pending)
            if call.kind is CallKind.COMM_WAIT:
                self.pending.append(call)
                yield from self._made([call] if self._must_stay(call, at) else self._released(at))
                continue
            if not self.pending:
                yield call
                continue
            touched = self._touched(call)
            needed = [wait for wait in self.pending if self._needs(call, touched, wait)]
            yield from self._made(needed)
            yield call
            yield from self._made(self._released(at))
        yield from self._made(self.pending)

    def _made(self, waits: Sequence[StepCall]) -> list[StepCall]:
        made = list(waits)
        self.pending = [wait for wait in self.pending if wait not in made]
        return made

    def _touched(self, call: StepCall) -> set[str]:
        values = (*call.inputs, *(into.value for into in call.into))
        return {self.roots.get(value, value) for value in values}

    def _held(self, wait: StepCall) -> str:
        """The storage of the collective's input."""
        return self.roots.get(wait.inputs[1], wait.inputs[1])

    def _must_stay(self, wait: StepCall, at: int) -> bool:
        """True where to wait later would hold the input for longer."""
        return not self._is_kept(wait) and self.last_read.get(self._held(wait), -1) < at

    def _released(self, at: int) -> list[StepCall]:
        """The waits to be made behind call ``at``: nobody reads their inputs for himself now."""
        return [
            wait
            for wait in self.pending
            if not self._is_kept(wait) and self.last_read.get(self._held(wait), -1) <= at
        ]

    def _is_kept(self, wait: StepCall) -> bool:
        """True where to wait later costs no memory, or memory does not count."""
        is_in_place = wait.waits_for in self.in_place
        return is_in_place or self.holds_inputs or self._held(wait) in self.given

    def _needs(self, call: StepCall, touched: Set[str], wait: StepCall) -> bool:
        """True for a call that reads the result, or may write into the input."""
        if self.roots.get(wait.outputs[0], wait.outputs[0]) in touched:
            return True
        held = self._held(wait)
        if held not in touched:
            return False
        writes = {into.value for into in call.into}
        writes |= {
            call.inputs[output.index]
            for output, _ in self.problem.made_by(call)
            if output.storage is Storage.INPUT and output.index is not None
        }
        return held in self.given or held in {self.roots.get(value, value) for value in writes}


class _Held(_Late):
    """Waits of which each stands as late as it gains time, and as far as there is room."""

    def __init__(self, program: TimedProgram, limit_bytes: int) -> None:
        super().__init__(program.problem, holds_inputs=True)
        self.costs = program.costs
        self.now, self.lane = 0.0, CopyLane()
        self.end_s: dict[str, float] = {}
        """Collective -> when it has ended."""
        self.room = max(limit_bytes, program.peak_bytes) - program.alive
        """Per call the bytes that are free."""
        self.sizes = program.sizes

    def run(self) -> Iterator[StepCall]:
        for call in super().run():
            if call.kind is CallKind.ISSUE:
                seconds = self.costs.comm_s(call.region, comm_bytes(self.problem, call))
                self.end_s[call.name] = self.lane.copy(self.now, seconds)[1]
            elif call.kind is CallKind.COMM_WAIT:
                self.now = max(self.now, self.end_s.get(call.waits_for or "", 0.0))
            elif call.kind in RUNS:
                self.now += self.costs.call_s(call)
            yield call

    def _released(self, at: int) -> list[StepCall]:
        """Those whose collectives have ended, and the first ones where bytes are short."""
        left = [wait for wait in self.pending if self.end_s[wait.waits_for or ""] > self.now]
        room = self.room[at + 1] if at + 1 < len(self.room) else 0
        while left and sum(map(self._more_bytes, left)) > room:
            del left[0]
        return [wait for wait in self.pending if wait not in left]

    def _more_bytes(self, wait: StepCall) -> int:
        """What is held until a wait, for nobody else."""
        return 0 if wait.waits_for in self.in_place else self.sizes.get(self._held(wait), 0)


def filled(program: TimedProgram, *, limit_bytes: int) -> TimedProgram:
    """``program`` with recomputations before waits for other ranks at which it would stand still.

    One that runs beside no collective moves up to the wait at which most of it hides, the nearest
    of equal ones: further ones add up as long as their collectives are in flight together. It stays
    behind everything that it reads, and moves only where no more than ``limit_bytes`` are alive at
    one time then (``peak_live_bytes``). The program is as it was where the step takes no less time.
    Cost: calls times recomputations.

    Raises:
        InputError: a region has no seconds.
    """
    problem, costs = program.problem, program.costs
    recomputed = _beside_nothing(problem) if has_collectives(problem) else []
    if not recomputed or program.peak_bytes > limit_bytes:
        return program
    before = simulate(problem, costs)
    stall_s = {span.name: span.end_s - span.start_s for span in before.spans if span.lane == STALL}
    calls = list(problem.calls)
    alive = program.alive
    for call in recomputed:
        place = next(at for at, other in enumerate(calls) if other is call)
        region, seconds = problem.regions[call.region], costs.call_s(call)
        own_bytes = region.most_bytes() + outside_bytes(region)
        made_bytes = sum(region.buffers[index].size_bytes for index in region.outputs_of_buffers())
        to, most_s, beside_waits = place, 0.0, list[str]()
        for at, waits in itertools.islice(_waits_before(calls, place, stall_s), MAX_WAITS):
            if alive[at:place].max() + made_bytes > limit_bytes or most_s >= seconds:
                break
            hidden_s = min(seconds, sum(stall_s[wait] for wait in waits))
            if hidden_s > most_s and alive[at] + own_bytes <= limit_bytes:
                to, most_s, beside_waits = at, hidden_s, waits
        if to < place:
            during, beside = alive[to] + own_bytes, alive[to:place] + made_bytes
            alive = np.concatenate((alive[:to], [during], beside, alive[place + 1 :]))
            calls.insert(to, calls.pop(place))
            _spend(stall_s, beside_waits, seconds)
    better = program.in_order(calls)
    return better if better.timeline.step_s < before.step_s else program


def _spend(stall_s: dict[str, float], waits: Sequence[str], seconds: float) -> None:
    """These waits, before which so much work runs now, stall for less, the first one first."""
    for wait in waits:
        spent = min(seconds, stall_s[wait])
        stall_s[wait] -= spent
        seconds -= spent


def _beside_nothing(problem: Problem) -> list[StepCall]:
    """Recomputations, into buffers of their own, while which no collective is in flight."""
    flying: set[str] = set()
    found = []
    for call in problem.calls:
        if call.kind is CallKind.ISSUE:
            flying.add(call.name)
        flying.discard(call.waits_for or "")
        if call.kind is CallKind.RECOMPUTE and not flying and not call.into:
            found.append(call)
    return found


def _waits_before(
    calls: Sequence[StepCall], place: int, stall_s: Mapping[str, float]
) -> Iterator[tuple[int, list[str]]]:
    """The waits that stand still before which call ``place`` could run, the nearest one first.

    With each the waits behind which it would hide there: those whose collectives are in flight.
    """
    call = calls[place]
    passed: dict[str, str] = {}
    """The collective of each wait that stands still between there and ``place`` -> the wait."""
    for at in range(place - 1, -1, -1):
        other = calls[at]
        is_other_half = (other.phase, other.member) != (call.phase, call.member)
        arrives = other.inputs if other.kind is CallKind.WAIT else other.outputs
        if (other.kind in RUNS and is_other_half) or not set(arrives).isdisjoint(call.inputs):
            return
        passed.pop(other.name, None)
        if other.kind is CallKind.COMM_WAIT and stall_s.get(other.name, 0.0) > 0:
            passed[other.waits_for or ""] = other.name
            yield at, [*reversed(passed.values())]


def window_recompute_s(problem: Problem, costs: StepCosts) -> float:
    """Seconds of the recomputations that run while a collective is in flight."""
    flying: set[str] = set()
    seconds = 0.0
    for call in problem.calls:
        if call.kind is CallKind.ISSUE:
            flying.add(call.name)
        flying.discard(call.waits_for or "")
        if call.kind is CallKind.RECOMPUTE and flying:
            seconds += costs.call_s(call)
    return seconds


def num_collectives(problem: Problem) -> int:
    """How many collectives the step begins."""
    return sum(call.kind is CallKind.ISSUE for call in problem.calls)


def measured_collectives(problem: Problem, costs: StepCosts) -> int:
    """How many of them have measured seconds."""
    known = costs.collective_s or {}
    return sum(call.kind is CallKind.ISSUE and call.region in known for call in problem.calls)
