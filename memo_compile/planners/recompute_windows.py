"""Recomputations that run where the step waits for other ranks: the windows of Lynx.

Rewrite, with ``r`` the recomputation that ``Lb`` reads:

    issue y; wait y -> z; La(z); r; Lb(r)      ->      issue y; r; wait y -> z; La(z); Lb(r)

(arXiv 2406.08756.) Nothing is recomputed that the plan does not recompute anyway.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from memo_compile.step.communication import has_collectives
from memo_compile.step.halves import RUNS
from memo_compile.step.movable import StepCosts
from memo_compile.step.ordinary import outside_bytes
from memo_compile.step.problem import CallKind, Problem, StepCall
from memo_compile.step.simulate import STALL, simulate
from memo_compile.step.timed import TimedProgram

MAX_WAITS = 8
"""Most waits that a recomputation is tried at: what is made further ahead is alive for longer."""


def filled(program: TimedProgram, *, limit_bytes: int) -> TimedProgram:
    """``program`` with recomputations before waits for other ranks at which it would stand still.

    One that runs beside no collective moves up to the wait at which most of it hides, the nearest
    of equal ones; collectives that are in flight together hide it one after the other. It stays
    behind everything that it reads, and moves only where no more than ``limit_bytes`` are alive at
    one time then (``peak_live_bytes``). The program is as it was where the step takes no less time.
    Cost: calls times recomputations.

    Raises:
        InputError: a region has no seconds.
    """
    problem, costs = program.problem, program.costs
    recomputed = [  # what writes into another's buffer stays where it is
        call
        for call, is_beside in (_recomputations(problem) if has_collectives(problem) else ())
        if not is_beside and not call.into
    ]
    if not recomputed or program.peak_bytes > limit_bytes:
        return program
    before = simulate(problem, costs)
    stall_s = {span.name: span.end_s - span.start_s for span in before.spans if span.lane == STALL}
    calls = list(problem.calls)
    alive = program.alive
    for call in recomputed:
        place = next(at for at, other in enumerate(calls) if other is call)
        region, seconds = problem.regions[call.region], costs.call_s(call)
        peak_bytes = region.most_bytes() + outside_bytes(region)
        made_bytes = sum(region.buffers[index].size_bytes for index in region.outputs_of_buffers())
        target, most_s, beside_waits = place, 0.0, list[str]()
        for at, waits in itertools.islice(_waits_before(calls, place, stall_s), MAX_WAITS):
            if alive[at:place].max() + made_bytes > limit_bytes or most_s >= seconds:
                break
            hidden_s = min(seconds, sum(stall_s[wait] for wait in waits))
            if hidden_s > most_s and alive[at] + peak_bytes <= limit_bytes:
                target, most_s, beside_waits = at, hidden_s, waits
        if target < place:
            during, between = alive[target] + peak_bytes, alive[target:place] + made_bytes
            alive = np.concatenate((alive[:target], [during], between, alive[place + 1 :]))
            calls.insert(target, calls.pop(place))
            _spend(stall_s, beside_waits, seconds)
    better = program.in_order(calls)
    return better if better.timeline.step_s < before.step_s else program


def _spend(stall_s: dict[str, float], waits: Sequence[str], seconds: float) -> None:
    """Takes ``seconds`` of work, which now run before ``waits``, off their stalls, in order."""
    for wait in waits:
        spent_s = min(seconds, stall_s[wait])
        stall_s[wait] -= spent_s
        seconds -= spent_s


def _recomputations(problem: Problem) -> Iterator[tuple[StepCall, bool]]:
    """Each recomputation, and whether a collective is in flight beside it."""
    in_flight: set[str] = set()
    for call in problem.calls:
        if call.kind is CallKind.ISSUE:
            in_flight.add(call.name)
        in_flight.discard(call.waits_for or "")
        if call.kind is CallKind.RECOMPUTE:
            yield call, bool(in_flight)


def _waits_before(
    calls: Sequence[StepCall], place: int, stall_s: Mapping[str, float]
) -> Iterator[tuple[int, list[str]]]:
    """Places where call ``place``, a recomputation, could run: before waits that stand still.

    The nearest comes first, each with the names of the waits that it would shorten there: those of
    all collectives in flight, in order. What it reads, and the half's border, end the walk.
    """
    call = calls[place]
    passed: dict[str, str] = {}
    """The collective of each wait that stands still between there and ``place`` -> the wait."""
    for at in range(place - 1, -1, -1):
        other = calls[at]
        is_other_half = other.half != call.half
        arrives = other.inputs if other.kind is CallKind.WAIT else other.outputs
        if (other.kind in RUNS and is_other_half) or not set(arrives).isdisjoint(call.inputs):
            return
        passed.pop(other.name, None)
        if other.kind is CallKind.COMM_WAIT and stall_s.get(other.name, 0.0) > 0:
            passed[other.waits_for or ""] = other.name
            yield at, [*reversed(passed.values())]


def window_recompute_s(problem: Problem, costs: StepCosts) -> float:
    """Seconds of the recomputations that run while a collective is in flight."""
    recomputed = (call for call, is_beside in _recomputations(problem) if is_beside)
    return sum(map(costs.call_s, recomputed), 0.0)


def num_collectives(problem: Problem) -> int:
    """How many collectives the step begins."""
    return sum(call.kind is CallKind.ISSUE for call in problem.calls)


def measured_collectives(problem: Problem, costs: StepCosts) -> int:
    """How many of them have measured seconds."""
    measured_s = costs.collective_s or {}
    return sum(call.kind is CallKind.ISSUE and call.region in measured_s for call in problem.calls)
