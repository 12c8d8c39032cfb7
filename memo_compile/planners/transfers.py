"""Where the transfers of a step begin, and where the step waits for them.

A *transfer* is a copy to the host, a copy back, or a collective among ranks. It runs beside the
computation, on a lane that takes one after the other. All follow two rules.

*Waits come late*, and computation does not stand still for nothing:

    offload v; wait v; L1; L2      ->    offload v; L1; wait v; L2
    issue y; wait y; r; Lb(y)      ->    issue y; r; wait y; Lb(y)

The step waits for a transfer once it has ended: at the latest before the first call that needs it,
and earlier where memory is short, since a transfer keeps what it reads.

*Starts come early*, so that nothing waits for them:

    L3b; L2b; reload w; wait w     ->    L3b; reload w; L2b; wait w

A copy back, or a collective that gathers what the step is given, begins as late as it still ends in
time, and later where memory is short: from then on it holds what it makes. A copy back of what the
forward has saved begins with the backward at the earliest, that of a weight with its half.

The order of calls that compute, and that of collectives, stay as they are, so that all ranks begin
the same collectives in the same order. Copies of a pipeline's stage, whose forwards and backwards
alternate, stay where they are.
"""

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from memo_compile.planners.begin_order import gathered_bytes, gathers_of, in_begin_order
from memo_compile.planners.recompute_windows import filled
from memo_compile.step.communication import comm_bytes, has_collectives, value_sizes
from memo_compile.step.copy_times import CopyLane
from memo_compile.step.halves import halves_of_calls
from memo_compile.step.hand_over import storage_roots
from memo_compile.step.movable import StepCosts
from memo_compile.step.problem import CallKind, Problem, StepCall, Storage
from memo_compile.step.timed import TimedProgram

_COPIES = frozenset({CallKind.OFFLOAD, CallKind.RELOAD})
_COLLECTIVES = frozenset({CallKind.ISSUE})
_STARTS = _COPIES | _COLLECTIVES
_COMPUTES = (CallKind.RUN, CallKind.RECOMPUTE)

ROUNDING_SHARE = 1e-9
"""Times that differ by this share of the step count as equal: a transfer still ends in time."""


def at_once(problem: Problem) -> Problem:
    """``problem`` that waits for each collective right behind its beginning.

    Collectives begin in the order that all ranks keep. It is the step without overlap, which holds
    the least.
    """
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
    """``problem`` that waits for collectives as late as order allows, whatever they take.

    That is right before the first call that needs one, or before what it reads would be kept for
    it alone; with ``holds_inputs`` it may be kept. Gathers begin late as well. Cost: linear.
    """
    if not has_collectives(problem):
        return problem
    room = None if holds_inputs else np.zeros(len(problem.calls), dtype=np.int64)
    walk = _LaterWaits(problem, None, room, _COLLECTIVES)
    return in_begin_order(replace(problem, calls=walk.run()))


class Placed(NamedTuple):
    """A program whose transfers stand at the places that give them their time."""

    program: TimedProgram
    lacking_bytes: float
    """With so many bytes more a transfer would have more time; infinite: bytes are not short."""


def with_time(
    program: TimedProgram,
    limit_bytes: int,
    *,
    copies: bool = True,
    collectives: bool = True,
    spare_bytes: int = 0,
) -> Placed:
    """``program`` whose transfers run beside its computation, in no more than ``limit_bytes``.

    Nor in more than now, where that exceeds them. Waits that come later leave ``spare_bytes`` free.
    Collectives stay as they are where the step would take no less time; where it still stands still
    for them, recomputations run there (``recompute_windows``). Cost: linear in the number of calls,
    and for each start in those that it moves across.

    Raises:
        InputError: a region has no seconds.
    """
    problem = program.problem
    kinds = frozenset[CallKind]()
    if copies and (problem.host_bytes or problem.host_weights) and problem.has_one_turn:
        kinds = _COPIES
    if not collectives or not has_collectives(problem):
        return _placed(program, limit_bytes, spare_bytes, kinds)
    placed = _placed(program, limit_bytes, spare_bytes, kinds | _COLLECTIVES)
    if not placed.program.is_better_than(program, limit_bytes):
        placed = _placed(program, limit_bytes, spare_bytes, kinds)
    return placed._replace(program=filled(placed.program, limit_bytes=limit_bytes))


def _placed(
    program: TimedProgram,
    limit_bytes: int,
    spare_bytes: int,
    kinds: Set[CallKind],
    *,
    may_overtake: bool = True,
) -> Placed:
    """``with_time`` for transfers that begin with calls of ``kinds``: starts first, then waits.

    Where memory is short, small copies may overtake large ones, if that is faster.
    """
    if not kinds:
        return Placed(program, math.inf)
    limit_bytes = max(limit_bytes, program.peak_bytes)
    room = limit_bytes - program.alive
    starts = _EarlierStarts(program.problem, program.costs, room, kinds, may_overtake)
    begun = program.in_order(starts.run())
    if starts.moves_in_forward:  # what begins earlier there takes of the room for later waits
        room = limit_bytes - begun.alive
    walk = _LaterWaits(begun.problem, begun.costs, room - spare_bytes, kinds, may_overtake)
    calls = walk.run()
    is_same = calls == program.problem.calls
    lacking_bytes = min(walk.lacking_bytes, starts.lacking_bytes)
    placed = Placed(program if is_same else program.in_order(calls), lacking_bytes)
    if walk.has_overtaken or starts.has_overtaken:
        plain = _placed(program, limit_bytes, spare_bytes, kinds, may_overtake=False)
        lacking_bytes = min(lacking_bytes, plain.lacking_bytes)
        faster = min(plain.program, placed.program, key=lambda timed: timed.timeline.step_s)
        return Placed(faster, lacking_bytes)
    return placed


@dataclass(slots=True, kw_only=True, eq=False)
class _InFlight:
    """A transfer in flight, whose wait may be put off."""

    start: StepCall
    issued_s: float
    seconds: float = math.inf
    end_s: float = math.inf
    held_bytes: int = 0
    """Bytes of what it reads, which it alone keeps alive from ``held_from`` until its wait."""
    held_from: int = 0
    """Index of the call from which on it does."""
    wait: StepCall | None = None
    """None until the walk has come to it."""


class _LaterWaits:
    """A walk over a program, which puts off the waits for what calls of ``kinds`` begin.

    Each wait comes back when the transfer has ended, when a call needs its result, or when the
    bytes that it keeps are short. Without ``costs`` no transfer ends before the step waits for it.
    ``room`` are the bytes that are free during each call; None: memory does not count.
    """

    def __init__(
        self,
        problem: Problem,
        costs: StepCosts | None,
        room: Any,
        kinds: Set[CallKind],
        may_overtake: bool = False,
    ) -> None:
        self.lacking_bytes = math.inf
        self.has_overtaken = False
        self._problem, self._costs, self._kinds = problem, costs, kinds
        self._room = None if room is None else room.tolist()
        self._may_overtake = may_overtake
        self._calls: list[StepCall] = []
        self._now_s = 0.0
        self._lanes = {kind: CopyLane() for kind in _STARTS}
        self._flights: dict[str, _InFlight] = {}
        """By the name of the call that begins the transfer."""
        self._pending: list[_InFlight] = []
        """Those whose waits the walk has put off, in order."""
        self._leaving: list[_InFlight] = []
        """Copies to the host that have not ended, in the order of their lane."""
        self._lane_free_s = 0.0
        """When the last of them that has ended did: the lane to the host was free then."""
        self._talks = CallKind.ISSUE in kinds
        self._end = len(problem.calls) if self._talks else problem.first_backward
        self._roots = storage_roots(problem) if self._talks else {}
        self._given = frozenset(problem.inputs)
        self._sizes, self._last_read = self._values()

    def _values(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """By value: bytes of what transfers read, and the last call, no wait, that touches it."""
        calls = self._problem.calls[: self._end]
        read = {
            self._root(call.inputs[0])
            for call in calls
            if call.kind in self._kinds and call.kind is not CallKind.RELOAD
        }
        last_read: dict[str, int] = {}
        for at, call in enumerate(calls):
            is_wait = call.kind is CallKind.WAIT or call.kind is CallKind.COMM_WAIT
            if not is_wait and (self._roots or not read.isdisjoint(call.inputs)):
                for root in map(self._root, call.touched):
                    if root in read:
                        last_read[root] = at
        if self._room is None:
            return {}, last_read
        wanted = None if has_collectives(self._problem) else read
        return value_sizes(self._problem, wanted), last_read

    def _root(self, value: str) -> str:
        """The first value in the storage of ``value``."""
        return self._roots.get(value, value)

    def run(self) -> tuple[StepCall, ...]:
        """All calls in their new order."""
        calls, border = self._problem.calls, self._problem.first_backward
        halves = halves_of_calls(self._problem) if self._talks else ()
        for at, call in enumerate(calls[: self._end]):
            if self._pending and at == border:  # the copies back may begin
                self._wait_for(self._pending)
            if self._pending and halves and halves[at] != halves[at - 1]:  # collectives end there
                pending = self._pending
                self._wait_for(flight for flight in pending if flight.start.kind is CallKind.ISSUE)
            if call.waits_for:
                self._come_to(call)
                continue
            if self._pending:
                self._wait_for(())
                self._make_room(at)
                self._wait_for(self._due_before(call))
            self._calls.append(call)
            if call.kind in _STARTS:
                self._begin(call)
            elif self._costs is not None:
                self._now_s += self._costs.call_s(call)
        self._wait_for(self._pending)
        return (*self._calls, *calls[self._end :])

    def _come_to(self, wait: StepCall) -> None:
        """Puts ``wait`` off, if it may be and its transfer has not ended."""
        flight = self._flights[wait.waits_for or ""]
        if flight.start.kind in self._kinds and flight.start.kind is not CallKind.RELOAD:
            if flight.end_s > self._now_s:
                flight.wait = wait
                self._pending.append(flight)
                return
        elif self._costs is not None:  # not put off: the step waits here
            self._now_s = max(self._now_s, flight.end_s)
        self._calls.append(wait)

    def _begin(self, start: StepCall) -> None:
        """Notes when a transfer that begins will end, and which bytes it alone keeps alive."""
        flight = _InFlight(start=start, issued_s=self._now_s)
        self._flights[start.name] = flight
        if self._costs is not None:
            flight.seconds = self._seconds(self._costs, start)
            flight.end_s = self._lanes[start.kind].copy(self._now_s, flight.seconds)[1]
        if start.kind is CallKind.RELOAD or start.kind not in self._kinds:
            return
        if start.kind is CallKind.OFFLOAD:
            self._leaving.append(flight)
        root = self._root(start.inputs[0])
        output = next(iter(self._problem.regions[start.region].outputs), None)
        in_place = output is not None and output.storage is Storage.INPUT
        # Those of a result in place, and of what the step is given, live on without it.
        if not in_place and root not in self._given and self._room is not None:
            # A call lets go of what it reads while it runs; orders without costs need not know it.
            flight.held_from = self._last_read[root] + (self._costs is None)
            flight.held_bytes = self._sizes.get(root, 0)

    def _seconds(self, costs: StepCosts, start: StepCall) -> float:
        """How long the transfer that ``start`` begins takes by itself."""
        if start.copy is None:
            return costs.comm_s(start.region, comm_bytes(self._problem, start))
        copy_s = costs.d2h_s if start.kind is CallKind.OFFLOAD else costs.h2d_s
        return copy_s(start.copy.num_bytes)

    def _wait_for(self, flights: Iterable[_InFlight]) -> None:
        """The step waits here for ``flights``, and for all that have ended by then."""
        done = set(flights)
        if self._costs is not None:
            self._now_s = max([self._now_s, *(flight.end_s for flight in done)])
        left = []
        for flight in self._pending:
            if flight in done or flight.end_s <= self._now_s:
                assert flight.wait is not None, f"{flight.start.name}: pending without a wait"
                self._calls.append(flight.wait)
            else:
                left.append(flight)
        self._pending = left
        ended = [flight.end_s for flight in self._leaving if flight.end_s <= self._now_s]
        self._lane_free_s = max([self._lane_free_s, *ended])
        del self._leaving[: len(ended)]

    def _make_room(self, at: int) -> None:
        """Waits for the first transfers to end, until what they keep during call ``at`` fits."""
        if self._room is None:
            return
        holding = [copy for copy in self._pending if copy.held_bytes and copy.held_from <= at]
        holding.sort(key=lambda flight: flight.end_s)
        lacking_bytes = over_bytes = sum(copy.held_bytes for copy in holding) - self._room[at]
        number = 0
        while over_bytes > 0 and number < len(holding):
            lacking_bytes, over_bytes = over_bytes, over_bytes - holding[number].held_bytes
            number += 1
        if number:  # with ``lacking_bytes`` more the last of them would have more time
            self.lacking_bytes = min(self.lacking_bytes, lacking_bytes)
            small = self._overtaking(holding, self._room[at], holding[number - 1].end_s)
            self._wait_for(small or holding[:number])

    def _overtaking(
        self, holding: Sequence[_InFlight], room_bytes: int, than_s: float
    ) -> Sequence[_InFlight]:
        """Lets small copies of ``holding`` overtake large ones; returns the small ones, or none.

        The large ones are those that fit ``room_bytes``, so that the step waits for the others
        only. None overtakes where it would wait for those until ``than_s`` all the same.
        """
        small = list(holding)
        for flight in sorted(holding, key=lambda copy: -copy.held_bytes):
            if flight.held_bytes <= room_bytes:
                room_bytes -= flight.held_bytes
                small.remove(flight)
        if not self._may_overtake or any(copy not in self._leaving for copy in small):
            return ()
        end = self._leaving.index(small[-1]) + 1
        large = [copy for copy in self._leaving[:end] if copy not in small]
        member = small[-1].start.member  # the half of another member may be left out
        if not large or any(copy.start.member != member for copy in large):
            return ()
        if self._ends_s(small)[-1] >= than_s:
            return ()
        self.has_overtaken = True
        # With so many bytes more one of them would have room as well.
        least_bytes = min(copy.held_bytes for copy in small)
        self.lacking_bytes = min(self.lacking_bytes, least_bytes - room_bytes)
        moved = {id(copy.start) for copy in large}
        self._calls = [call for call in self._calls if id(call) not in moved]
        place = max(at for at, call in enumerate(self._calls) if call is small[-1].start) + 1
        self._calls[place:place] = [copy.start for copy in large]
        for copy in large:
            copy.issued_s = max(copy.issued_s, small[-1].issued_s)
        self._leaving[:end] = [*small, *large]
        for copy, end_s in zip(self._leaving, self._ends_s(self._leaving), strict=True):
            copy.end_s = self._lanes[CallKind.OFFLOAD].free_s = end_s
        return small

    def _ends_s(self, lane: Iterable[_InFlight]) -> list[float]:
        """When these copies to the host end, one after the other on a lane free for them."""
        free = CopyLane(self._lane_free_s)
        return [free.copy(flight.issued_s, flight.seconds)[1] for flight in lane]

    def _due_before(self, call: StepCall) -> Iterator[_InFlight]:
        """The collectives to wait for before ``call``: it reads a result, or may write an input."""
        if not self._talks:
            return
        touched = set(map(self._root, call.touched))
        written = {into.value for into in call.into}
        written |= {
            call.inputs[output.index]
            for output, _ in self._problem.made_by(call)
            if output.storage is Storage.INPUT and output.index is not None
        }
        written = set(map(self._root, written))
        for flight in self._pending:
            if flight.wait is None or flight.start.kind is not CallKind.ISSUE:
                continue
            read = self._root(flight.start.inputs[0])
            may_write = read in touched and (read in self._given or read in written)
            if may_write or self._root(flight.wait.outputs[0]) in touched:
                yield flight


@dataclass(slots=True)
class _Start:
    """The beginning of a transfer. Place n is behind the first n of the calls that stay."""

    calls: tuple[StepCall, ...]
    """What moves with it; nothing where it stays itself."""
    earliest: int
    """The first place where it may stand."""
    latest: int
    """The place where it stands now."""
    needed: int
    """The place of its wait."""
    seconds: float
    made_bytes: int
    """Bytes of its result, which are alive from its beginning on."""
    wanted: int = 0
    """The last place from which it still ends in time (``_find_wanted_places``)."""


class _EarlierStarts:
    """Takes the starts that may come earlier out of a program, and finds their places."""

    def __init__(
        self,
        problem: Problem,
        costs: StepCosts,
        room: Any,
        kinds: Set[CallKind],
        may_overtake: bool,
    ) -> None:
        self.has_overtaken = False
        self._may_overtake = may_overtake
        self.lacking_bytes = math.inf
        self._problem, self._costs, self._kinds = problem, costs, kinds
        self._gathers = gathers_of(problem) if CallKind.ISSUE in kinds else {}
        self.moves_in_forward = bool(self._gathers or problem.host_weights)
        """True where transfers may begin earlier in the forward too, not in the backward alone."""
        self._first = 0 if self.moves_in_forward else problem.first_backward
        """The first call that something may move across."""
        moving = {call.name for gather in self._gathers.values() for call in gather.calls}
        calls = problem.calls[self._first :]
        self._stays = [call.name not in moving and not self._is_copy(call) for call in calls]
        """Per call from ``_first`` on whether it keeps its place; ``_staying``: those that do."""
        self._staying = [*itertools.compress(calls, self._stays)]
        self._room = room[self._first :][self._stays].copy()
        """Per call that stays the bytes that are free (int64)."""

    def _is_copy(self, call: StepCall) -> bool:
        return call.kind is CallKind.RELOAD and call.kind in self._kinds

    def run(self) -> tuple[StepCall, ...]:
        """All calls in their new order."""
        costs = self._costs
        call_s = [costs.call_s(call) if call.kind in _COMPUTES else 0.0 for call in self._staying]
        self._begin_s = [0.0, *itertools.accumulate(call_s)]
        computed = (at if call.kind in _COMPUTES else 0 for at, call in enumerate(self._staying, 1))
        self._same_time_place = [0, *itertools.accumulate(computed, max)]
        """Per place the first one at the same time: only waits stand between."""
        at_place: dict[int, list[StepCall]] = {}
        for lane in filter(None, self._lanes()):
            _find_wanted_places(lane, call_s)
            for start in lane:  # waits took no time, but may do: before them it begins as well
                start.wanted = max(self._same_time_place[start.wanted], start.earliest)
            self._place(lane, at_place)
        calls = [*self._problem.calls[: self._first]]
        for at, call in enumerate(self._staying):
            calls += at_place.get(at, ())
            calls.append(call)
        return tuple(calls)

    def _place(self, lane: list[_Start], at_place: dict[int, list[StepCall]]) -> None:
        """Places each start where it is wanted, or later where bytes are short, in their order."""
        least = 0
        while lane:
            start = lane[0]
            if not start.calls:  # it stays, and those behind it come behind it
                least = start.latest + 1
                del lane[0]
                continue
            first = max(start.wanted, least)
            place = self._with_room(start, first)
            if self._may_overtake and place > first:
                start = self._overtaking(lane, first, place)
                place = place if start is lane[0] else first
            lane.remove(start)
            least = min(place, start.latest)
            self._room[least : start.latest] -= start.made_bytes
            at_place.setdefault(least, []).extend(start.calls)

    def _with_room(self, start: _Start, first: int) -> int:
        """The first place from ``first`` on from which there is room for ``start``."""
        full = np.flatnonzero(self._room[first : start.latest] < start.made_bytes)
        if not len(full):
            return first
        behind = first + int(full[-1]) + 1
        lacking_bytes = start.made_bytes - int(self._room[behind - 1])
        self.lacking_bytes = min(self.lacking_bytes, lacking_bytes)
        return behind

    def _overtaking(self, lane: Sequence[_Start], first: int, place: int) -> _Start:
        """Which copy of ``lane`` goes first: ``lane[0]``, or a smaller one with room at ``first``.

        The former has room from ``place`` on only. One overtakes it that would end too late behind.
        """
        large = lane[0]
        busy_until_s = self._begin_s[place] + large.seconds
        for start in lane[1:]:
            in_time = self._begin_s[start.wanted] >= busy_until_s
            # The half of another member may be left out.
            if not start.calls or in_time or start.calls[0].member != large.calls[0].member:
                break
            busy_until_s += start.seconds
            if start.made_bytes < large.made_bytes and self._with_room(start, first) == first:
                self.has_overtaken = True
                return start
        return large

    def _lanes(self) -> Iterator[list[_Start]]:
        """The starts of copies back, and those of collectives, each in the order of its lane."""
        problem, gathers, calls = self._problem, self._gathers, self._problem.calls[self._first :]
        needed = {call.waits_for: at for at, call in enumerate(self._staying) if call.waits_for}
        sizes = value_sizes(problem) if gathers else {}
        halves = halves_of_calls(problem) if gathers else (0,) * len(calls)
        copies, collectives = list[_Start](), list[_Start]()
        begins: dict[int, int] = {}
        place = border = 0
        for at, (half, call, stays) in enumerate(zip(halves, calls, self._stays, strict=True)):
            if self._first + at == problem.first_backward:
                border = place
            begins.setdefault(half, place)
            if self._is_copy(call) and call.copy is not None:
                made = problem.regions[call.region].buffers[0].size_bytes
                seconds = self._costs.h2d_s(call.copy.num_bytes)
                start = _Start((call,), border, place, needed[call.name], seconds, made)
                copies.append(start)
            elif call.kind is CallKind.ISSUE and gathers:
                gather = gathers.get(call.name)
                moving = () if gather is None else gather.calls
                made = sum(sizes.get(start.outputs[0], 0) for start in moving)
                seconds = self._costs.comm_s(call.region, comm_bytes(problem, call))
                start = _Start(moving, begins[half], place, needed[call.name], seconds, made)
                collectives.append(start)
            place += stays
        _bound_earliest(collectives, gathered_bytes(problem) if gathers else 0)
        yield copies
        yield collectives


def _find_wanted_places(lane: Sequence[_Start], call_s: Sequence[float]) -> None:
    """Sets each ``wanted``: as late as delays no call beyond where all starts stand at earliest.

    A walk forward finds when each call begins then; one back, how late each transfer may begin.
    """
    copies, due_s = CopyLane(), dict[int, float]()  # place of a wait -> when its transfer ends
    borders, begins, now_s, number, least = list[float](), list[float](), 0.0, 0, 0
    for start in lane:
        start.earliest = least = min(max(least, start.earliest), start.latest)
    for place, seconds in enumerate(call_s):
        borders.append(now_s)
        while number < len(lane) and lane[number].earliest <= place:
            due_s[lane[number].needed] = copies.copy(now_s, lane[number].seconds)[1]
            number += 1
        begins.append(max(now_s, due_s.get(place, 0.0)))
        now_s = begins[-1] + seconds
    tolerance, latest_s, latest = ROUNDING_SHARE * now_s, math.inf, len(call_s)
    for start in reversed(lane):
        latest_s = min(latest_s, begins[start.needed]) - start.seconds
        place = bisect.bisect_right(borders, latest_s + tolerance) - 1
        start.wanted = latest = max(start.earliest, min(place, latest, start.latest))


def _bound_earliest(collectives: Iterable[_Start], most_bytes: int) -> None:
    """Sets ``earliest``: gathers keep their order, and at most ``most_bytes`` are gathered."""
    least, unread = 0, list[_Start]()  # gathers that are not waited for yet
    for start in collectives:
        if start.calls:
            unread.append(start)
            least = max(least, start.earliest)
            while sum(start.made_bytes for start in unread) > most_bytes and len(unread) > 1:
                least = max(least, unread.pop(0).needed + 1)
            start.earliest = least = min(least, start.latest)
        else:  # it stays
            start.earliest, least = start.latest, start.latest + 1
