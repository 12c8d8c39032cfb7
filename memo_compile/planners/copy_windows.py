"""Copies get all the time that memory allows: waits come later, reloads are issued earlier.

A schedule counts in layers, which bounds the bytes in flight where the step is at its peak. To wait
elsewhere is to lose time for nothing. Rewrite, with P the most bytes alive, or a multiple of it:

    offload v; L1; wait v; L2      ->    offload v; L1; L2; wait v      v fits beside L2 within P
    L3b; reload w; L2b; wait w     ->    reload w; L3b; L2b; wait w     w fits beside L3b within P

A wait is put off until its copy has ended, a reload is issued early enough for its copy to end in
time, and neither where more than P would be alive. With a larger P more of them are: ``Widened``
says with which one. What has no place yet lets smaller copies pass. The copies of a pipeline's
stage, whose forwards and backwards alternate, stay where they are.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from memo_compile.step.communication import value_sizes
from memo_compile.step.copy_times import CopyBack, issues_of
from memo_compile.step.movable import StepCosts
from memo_compile.step.problem import CallKind, Problem, StepCall
from memo_compile.step.residency import step_constant_bytes
from memo_compile.step.simulate import most_per_call, simulate


@dataclass(slots=True, kw_only=True)
class Widened:
    """A step program whose copies have more time."""

    problem: Problem
    next_times: float
    """With ``times`` below this the program is the same; infinite: memory is in no copy's way."""


def widened(
    problem: Problem,
    costs: StepCosts,
    times: float = 1.0,
    *,
    spare: float = 0.0,
    alive: Any = None,
) -> Widened:
    """``problem`` with later waits and earlier reloads; the peak is ``times`` as large at most.

    Waits are put off only as far as they leave ``spare`` of the peak free: where tensors live
    across each other, as those that wait for the host do with all others, bytes lie unused between
    them. ``alive`` are its ``most_per_call``, where they are known. Cost: linear in the number of
    calls, and for each reload in those that it moves across. Raises InputError: a region has no
    seconds.
    """
    if not problem.host_bytes or not problem.has_one_turn:
        return Widened(problem=problem, next_times=math.inf)
    if alive is None:
        alive = most_per_call(problem)
    border = problem.first_backward
    peak = int(alive.max())
    whole = peak + step_constant_bytes(problem)
    limit = peak + int((times - 1) * whole)
    missing = _Missing()
    spare_bytes = int(spare * whole)
    room = (limit - spare_bytes - alive[:border]).tolist()
    forward = _later_waits(problem, costs, room, missing)
    backward = _earlier_reloads(problem, costs, limit - alive[border:], missing)
    calls = (*forward, *backward)
    more = missing.least_bytes + limit - peak
    return Widened(problem=replace(problem, calls=calls), next_times=1 + more / whole)


@dataclass(slots=True)
class _Missing:
    """The fewest bytes that keep a copy from more time."""

    least_bytes: float = math.inf

    def tell(self, num_bytes: float) -> None:
        self.least_bytes = min(self.least_bytes, num_bytes)


def _later_waits(
    problem: Problem, costs: StepCosts, room: Sequence[int], missing: _Missing
) -> Sequence[StepCall]:
    """The forward; ``room`` are the bytes that are free during each of its calls."""
    values = _values(problem)
    forward = _Forward(problem, costs, values, may_swap=True)
    forward.run(room)
    if forward.has_swapped:
        as_issued = _Forward(problem, costs, values, may_swap=False)
        as_issued.run(room)
        if as_issued.now_s <= forward.now_s:
            forward = as_issued
    missing.tell(forward.missing.least_bytes)
    return forward.calls


class _Values(NamedTuple):
    """What is known of the values that go to the host."""

    sizes: Mapping[str, int]
    last_read: Mapping[str, int]
    """The last call of the forward that reads them."""


def _values(problem: Problem) -> _Values:
    forward = problem.calls[: problem.first_backward]
    moved = {call.inputs[0] for call in forward if call.kind is CallKind.OFFLOAD}
    last_read = {
        value: at
        for at, call in enumerate(forward)
        if call.kind is not CallKind.WAIT and not moved.isdisjoint(call.inputs)
        for value in call.inputs
    }
    talks = any(call.kind is CallKind.COMM_WAIT for call in forward)
    return _Values(value_sizes(problem, None if talks else moved), last_read)


@dataclass(slots=True, kw_only=True, eq=False)
class _CopyOut:
    """A copy to the host that has not ended."""

    offload: StepCall
    issued_s: float
    end_s: float
    seconds: float
    size_bytes: int
    last_read: int
    """The last call of the forward that reads the value: before it, its bytes are there anyway."""
    wait: StepCall | None = None
    """Its wait, once that could have been."""


class _Forward:
    """A forward whose waits are put off, as far as ``run`` has come.

    Where bytes are missing, computation waits for the first copies of the lane. With ``may_swap``
    it may wait for others: a copy that has place for itself during the call, and is in the way of
    smaller ones that have not, goes behind them.
    """

    def __init__(
        self, problem: Problem, costs: StepCosts, values: _Values, *, may_swap: bool
    ) -> None:
        self.calls: list[StepCall] = []
        self.now_s = 0.0
        self.missing = _Missing()
        self.has_swapped = False
        self._costs, self._may_swap = costs, may_swap
        self._forward = problem.calls[: problem.first_backward]
        self._values = values
        self._lane: list[_CopyOut] = []
        self._free_s = 0.0
        """When the last copy that has ended had."""

    def run(self, room: Sequence[int]) -> None:
        """The whole forward."""
        for at, (call, free) in enumerate(zip(self._forward, room, strict=True)):
            while self._lane and self._lane[0].end_s <= self.now_s:
                self._end(self._lane[0])
            self._make_room(at, free)
            if call.kind is CallKind.WAIT:
                self._put_off(call)
                continue
            if call.copy is not None:
                self._issue(call)
            else:
                self.now_s += self._costs.call_s(call)
            self.calls.append(call)
        for copy in tuple(self._lane):
            self._end(copy)

    def _issue(self, offload: StepCall) -> None:
        assert offload.copy is not None, f"{offload.name}: a copy without its bytes"
        seconds, value = self._costs.d2h_s(offload.copy.num_bytes), offload.inputs[0]
        before_s = self._lane[-1].end_s if self._lane else self._free_s
        copy = _CopyOut(
            offload=offload,
            issued_s=self.now_s,
            end_s=max(before_s, self.now_s) + seconds,
            seconds=seconds,
            size_bytes=self._values.sizes[value],
            last_read=self._values.last_read[value],
        )
        self._lane.append(copy)

    def _put_off(self, wait: StepCall) -> None:
        for copy in self._lane:
            if copy.offload.name == wait.waits_for:
                copy.wait = wait
                return
        self.calls.append(wait)  # the copy has ended

    def _end(self, copy: _CopyOut) -> None:
        """Computation goes on when ``copy`` has ended."""
        self._lane.remove(copy)
        self.now_s = max(self.now_s, copy.end_s)
        self._free_s = max(self._free_s, copy.end_s)
        if copy.wait is not None:
            self.calls.append(copy.wait)

    def _make_room(self, at: int, free: int) -> None:
        """What copies hold during call ``at`` is at most ``free``, or nothing."""
        held = [copy for copy in self._lane if copy.wait is not None and copy.last_read <= at]
        held_bytes = sum(copy.size_bytes for copy in held)
        if not held or held_bytes <= free:
            return
        left, first = held_bytes, 0
        while left > free and first < len(held):
            more_bytes = left - free
            left -= held[first].size_bytes
            first += 1
        if self._may_swap and self._swap(held, free, than_s=held[first - 1].end_s):
            return
        more = (copy.size_bytes - free for copy in held if copy.size_bytes > free)
        self.missing.tell(min((more_bytes, *more)) if self._may_swap else more_bytes)
        for copy in self._lane[: self._lane.index(held[first - 1]) + 1]:
            self._end(copy)

    def _swap(self, held: Sequence[_CopyOut], free: int, than_s: float) -> bool:
        """Waits for those of ``held`` that have no place, if they can have ended before ``than_s``.

        The others, and what is not held yet, go behind them on the lane. Nothing before this call
        has waited for any of them, so that nothing before it changes.
        """
        urgent = list(held)
        for copy in sorted(held, key=lambda copy: -copy.size_bytes):
            if copy.size_bytes <= free:
                free -= copy.size_bytes
                urgent.remove(copy)
        last = self._lane.index(urgent[-1])
        behind = [copy for copy in self._lane[:last] if copy not in urgent]
        if any(copy.offload.member != urgent[-1].offload.member for copy in behind):
            return False  # its half has ended, and only there the value is at hand
        end_s = self._free_s
        for copy in urgent:
            end_s = max(end_s, copy.issued_s) + copy.seconds
        if not behind or end_s >= than_s:
            return False
        self.has_swapped = True
        self.missing.tell(min(copy.size_bytes for copy in urgent) - free)
        moved = [copy.offload for copy in behind]
        known = set(map(id, moved))
        self.calls = [call for call in self.calls if id(call) not in known]
        place = next(at for at, call in enumerate(self.calls) if call is urgent[-1].offload)
        self.calls[place + 1 : place + 1] = moved
        issued_s = urgent[-1].issued_s
        for copy in behind:
            copy.issued_s = max(copy.issued_s, issued_s)
        self._lane[: last + 1] = [*urgent, *behind]
        end_s = self._free_s
        for copy in self._lane:
            copy.end_s = end_s = max(end_s, copy.issued_s) + copy.seconds
        for copy in urgent:
            self._end(copy)
        return True


def _earlier_reloads(
    problem: Problem, costs: StepCosts, room: Any, missing: _Missing
) -> Sequence[StepCall]:
    """The backward; ``room`` (int64, one for each of its calls) are the bytes that are free."""
    backward = _Backward(problem, costs, room, may_pass=True)
    calls = backward.run()
    if backward.has_passed:
        in_order = _Backward(problem, costs, room, may_pass=False).run()
        forward = problem.calls[: problem.first_backward]
        passing_s, in_order_s = (
            simulate(replace(problem, calls=(*forward, *some)), costs, spans=False).step_s
            for some in (calls, in_order)
        )
        calls = calls if passing_s < in_order_s else in_order
    missing.tell(backward.missing.least_bytes)
    return calls


class _CopyIn(NamedTuple):
    """A reload."""

    call: StepCall
    at: int
    """The place before which it stands."""
    wanted: int
    """The last place from which it ends in time."""
    seconds: float
    size_bytes: int


class _Backward:
    """A backward whose reloads are issued earlier. A place is the number of calls that compute.

    Where bytes are missing for a reload, so that it cannot end in time, smaller ones that come next
    and have theirs go before it with ``may_pass``: behind it they would end even later.
    """

    def __init__(self, problem: Problem, costs: StepCosts, room: Any, *, may_pass: bool) -> None:
        self.missing = _Missing()
        self.has_passed = False
        self._may_pass = may_pass
        self._calls = calls = problem.calls[problem.first_backward :]
        computes = [call.copy is None and not call.waits_for for call in calls]
        self._places = list(itertools.accumulate(computes, initial=0))[:-1]
        self._free = np.full(self._places[-1] + 1 if calls else 0, np.iinfo(np.int64).max)
        np.minimum.at(self._free, self._places, room)
        seconds = [costs.call_s(call) for call in itertools.compress(calls, computes)]
        self._begins_s = [0.0, *itertools.accumulate(seconds)]
        self._left = self._reloads(problem, costs, seconds)
        self._issued: dict[int, list[StepCall]] = {}
        self._last = 0
        """The place of the last reload that is issued."""

    def _reloads(
        self, problem: Problem, costs: StepCosts, seconds: Sequence[float]
    ) -> list[_CopyIn]:
        placed = list(zip(self._calls, self._places, strict=True))
        needed = {call.waits_for: at for call, at in placed if call.waits_for}
        found = [(call, at) for call, at in placed if call.kind is CallKind.RELOAD]
        copies = [
            CopyBack(0, at, needed[call.name], costs.h2d_s(call.copy.num_bytes))
            for call, at in found
            if call.copy is not None
        ]
        issues = issues_of(seconds, copies)
        return [
            _CopyIn(
                call=call,
                at=at,
                wanted=wanted,
                seconds=copy.seconds,
                size_bytes=problem.regions[call.region].buffers[0].size_bytes,
            )
            for (call, at), copy, wanted in zip(found, copies, issues, strict=True)
        ]

    def run(self) -> Sequence[StepCall]:
        """The whole backward."""
        while self._left:
            reload = self._left[0]
            first = max(reload.wanted, self._last)
            full = np.flatnonzero(self._free[first : reload.at] < reload.size_bytes)
            if len(full):
                behind = first + int(full[-1]) + 1
                self.missing.tell(int(reload.size_bytes - self._free[behind - 1]))
                if self._may_pass and self._passed(first, behind):
                    continue
                first = behind
            self._issue(reload, min(first, reload.at))
        calls: list[StepCall] = []
        for call, at in zip(self._calls, self._places, strict=True):
            if at in self._issued:
                calls += self._issued.pop(at)
            if call.kind is not CallKind.RELOAD:
                calls.append(call)
        return calls

    def _issue(self, reload: _CopyIn, place: int) -> None:
        self._left.remove(reload)
        self._last = place
        self._free[place : reload.at] -= reload.size_bytes
        self._issued.setdefault(place, []).append(reload.call)

    def _passed(self, first: int, behind: int) -> bool:
        """True where one of the next was issued at ``first``, and the first one waits.

        That is issued at ``behind`` at the earliest; the lane is busy from there on. One that would
        end in time behind it stays there, as do those after that.
        """
        large = self._left[0]
        busy_until_s = self._begins_s[behind] + large.seconds
        for reload in itertools.islice(self._left, 1, None):
            in_time = self._begins_s[reload.wanted] >= busy_until_s
            if in_time or reload.call.member != large.call.member:
                return False  # the half of another member may be left out
            busy_until_s += reload.seconds
            if reload.size_bytes >= large.size_bytes:
                continue
            lacking = reload.size_bytes - int(self._free[first : reload.at].min())
            if lacking <= 0:
                self.has_passed = True
                self._issue(reload, first)
                return True
            self.missing.tell(lacking)
        return False
