"""Copies get all the time that memory allows: waits come later, reloads are issued earlier.

A schedule counts in layers, which bounds the bytes in flight where the step is at its peak. To wait
elsewhere is to lose time for nothing. Rewrite, with P the most bytes alive, or a multiple of it:

    offload v; L1; wait v; L2      ->    offload v; L1; L2; wait v      v fits beside L2 within P
    L3b; reload w; L2b; wait w     ->    reload w; L3b; L2b; wait w     w fits beside L3b within P

A wait is put off until its copy has ended, a reload is issued early enough for its copy to end in
time, and neither where more than P would be alive.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from memo_compile.step.copy_times import CopyBack, CopyLane, issues_of
from memo_compile.step.movable import StepCosts
from memo_compile.step.problem import CallKind, Problem, StepCall, arena_values
from memo_compile.step.residency import step_constant_bytes
from memo_compile.step.simulate import most_per_call


def widened(
    problem: Problem, costs: StepCosts, times: float = 1.0, *, alive: Any = None
) -> Problem:
    """``problem`` with later waits and earlier reloads; the peak is ``times`` as large at most.

    ``alive`` are its ``most_per_call``, where they are known. Cost: linear in the number of calls,
    and for each reload in those that it moves across. Raises InputError: a region has no seconds.
    """
    if not problem.host_bytes:
        return problem
    if alive is None:
        alive = most_per_call(problem)
    border = problem.first_backward
    peak = int(alive.max())
    limit = peak + int((times - 1) * (peak + step_constant_bytes(problem)))
    forward = _later_waits(problem, costs, (limit - alive[:border]).tolist())
    backward = _earlier_reloads(problem, costs, limit - alive[border:])
    return replace(problem, calls=(*forward, *backward))


def _later_waits(problem: Problem, costs: StepCosts, room: Sequence[int]) -> Iterator[StepCall]:
    """The forward; ``room`` are the bytes that are free during each of its calls."""
    sizes = {made.value: made.size_bytes for made in arena_values(problem)}
    lane, ends = CopyLane(), dict[str, float]()
    put_off: list[tuple[float, int, StepCall]] = []
    now, held = 0.0, 0
    for call, free in zip(problem.calls, room, strict=False):
        while put_off and (held > free or put_off[0][0] <= now):
            end, size_bytes, wait = put_off.pop(0)
            now, held = max(now, end), held - size_bytes
            yield wait
        if call.kind is CallKind.WAIT:
            size_bytes = sizes[call.inputs[0]]
            put_off.append((ends[call.waits_for or ""], size_bytes, call))
            held += size_bytes
            continue
        if call.copy is not None:
            ends[call.name] = lane.copy(now, costs.d2h_s(call.copy.num_bytes))[1]
        else:
            now += costs.call_s(call)
        yield call
    yield from (wait for _, _, wait in put_off)


def _earlier_reloads(problem: Problem, costs: StepCosts, room: Any) -> Iterator[StepCall]:
    """The backward; ``room`` (int64, one for each of its calls) are the bytes that are free.

    The place of a call is the number of calls before it that compute.
    """
    calls = problem.calls[problem.first_backward :]
    computes = [call.copy is None and not call.waits_for for call in calls]
    places = list(itertools.accumulate(computes, initial=0))[:-1]
    free = np.full(places[-1] + 1 if calls else 0, np.iinfo(np.int64).max)
    np.minimum.at(free, places, room)
    needed = {call.waits_for: at for call, at in zip(calls, places, strict=True) if call.waits_for}
    reloads = [
        (call, at) for call, at in zip(calls, places, strict=True) if call.kind is CallKind.RELOAD
    ]
    copies = [
        CopyBack(0, at, needed[call.name], costs.h2d_s(call.copy.num_bytes))
        for call, at in reloads
        if call.copy is not None
    ]
    seconds = [costs.call_s(call) for call in itertools.compress(calls, computes)]
    issued: dict[int, list[StepCall]] = {}
    last = 0
    for (call, at), wanted in zip(reloads, issues_of(seconds, copies), strict=True):
        size_bytes = problem.regions[call.region].buffers[0].size_bytes
        first = max(wanted, last)
        full = np.flatnonzero(free[first:at] < size_bytes)
        last = first + int(full[-1]) + 1 if len(full) else min(first, at)
        free[last:at] -= size_bytes
        issued.setdefault(last, []).append(call)
    for call, at in zip(calls, places, strict=True):
        yield from issued.pop(at, ())
        if call.kind is not CallKind.RELOAD:
            yield call
