"""Simulates a step program in time, and counts its memory before anything is placed.

There are four lanes. Calls run in order on the compute lane. Copies to the host, copies back and
collectives have a lane each, first in, first out; they begin once the compute lane has come to
their issue. Collectives slow computation down by a factor. Only a wait stalls the compute lane:
until its copy or its collective has ended. Forward and backward are one sequence.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from memo_compile.errors import InvalidPlan
from memo_compile.step.communication import comm_bytes
from memo_compile.step.copy_times import CopyLane
from memo_compile.step.lives import CallTables, lives_of
from memo_compile.step.movable import StepCosts
from memo_compile.step.ordinary import passing_bytes
from memo_compile.step.plans import Span, Timeline
from memo_compile.step.problem import CallKind, Problem, StepCall
from memo_compile.step.residency import ordinary_level, step_constant_bytes

COMPUTE, STALL, D2H, H2D = "compute", "stall", "d2h", "h2d"
COMMUNICATION = "communication"


def simulate(problem: Problem, costs: StepCosts, *, spans: bool = True) -> Timeline:
    """Returns how long the step takes, and what every lane does when. Cost: linear.

    Raises:
        InputError: a region has no seconds.
        InvalidPlan: a wait names no copy that was issued before it.
    """
    all_spans: list[Span] = []
    ends: dict[str, float] = {}
    d2h_lane, h2d_lane, comm_lane = CopyLane(), CopyLane(), CopyLane()
    offload, reload = (D2H, d2h_lane, costs.d2h_s), (H2D, h2d_lane, costs.h2d_s)
    now = stall_s = comm_s = exposed_s = 0.0
    for call in problem.calls:
        begin, kind = now, call.kind
        if kind is CallKind.RUN or kind is CallKind.RECOMPUTE:
            seconds = costs.call_s(call)
            now += (
                seconds
                if comm_lane.free_s <= now
                else costs.beside_s(seconds, comm_lane.free_s - now)
            )
            name, end = COMPUTE, now
        elif kind is CallKind.WAIT:
            now = max(now, _end_of(call, ends))
            stall_s += now - begin
            name, end = STALL, now
        elif kind is CallKind.COMM_WAIT:
            now = max(now, _end_of(call, ends))
            exposed_s += now - begin
            name, end = STALL, now
        elif kind is CallKind.ISSUE:
            seconds = costs.comm_s(call.region, comm_bytes(problem, call))
            begin, end = comm_lane.copy(now, seconds)
            name, ends[call.name] = COMMUNICATION, end
            comm_s += seconds
        else:
            assert call.copy is not None, f"{call.name}: a copy without its bytes"
            name, lane, copy_s = offload if kind is CallKind.OFFLOAD else reload
            begin, end = lane.copy(now, copy_s(call.copy.num_bytes))
            ends[call.name] = end
        if spans and end > begin:
            all_spans.append(Span(lane=name, name=call.name, start_s=begin, end_s=end))
    step_s = max(now, d2h_lane.free_s, h2d_lane.free_s, comm_lane.free_s)
    return Timeline(
        step_s=step_s,
        stall_s=stall_s,
        spans=tuple(all_spans),
        hidden_comm_s=max(0.0, comm_s - exposed_s),
        exposed_comm_s=exposed_s,
    )


def _end_of(call: StepCall, ends: Mapping[str, float]) -> float:
    end = ends.get(call.waits_for or "")
    if end is None:
        raise InvalidPlan(f"{call.name} waits for {call.waits_for}, which was not issued before it")
    return end


def peak_live_bytes(
    problem: Problem, tables: CallTables | None = None, *, alive: Any = None
) -> int:
    """Returns the peak of a perfect placement; ``alive`` is its ``most_per_call``, if at hand."""
    if not problem.calls:
        return step_constant_bytes(problem)
    alive = most_per_call(problem, tables) if alive is None else alive
    return step_constant_bytes(problem) + int(alive.max())


def most_per_call(problem: Problem, tables: CallTables | None = None) -> Any:
    """Returns for each call the most bytes alive in the arena plus the most of ordinary memory.

    An interlude counts with the call before it, beside what is alive on that call's last line.
    ``tables`` are those of programs that share calls with this one.
    """
    starts, levels = _memory_levels(problem, tables)
    most: Any = sum(np.maximum.reduceat(level, np.array(starts[:-1])) for level in levels)
    for call, interlude_bytes in passing_bytes(problem):
        last_line = starts[call + 1] - 1
        most[call] = max(most[call], interlude_bytes + sum(level[last_line] for level in levels))
    return most


def memory_level(problem: Problem) -> Any:
    """Returns for each line of the step the bytes alive in the arena plus ordinary memory."""
    return sum(_memory_levels(problem, None)[1])


def _memory_levels(
    problem: Problem, tables: CallTables | None
) -> tuple[tuple[int, ...], tuple[Any, Any]]:
    """Returns the first lines of calls, and line by line (arena bytes, ordinary bytes).

    Where the arena's pages cannot be given back, ordinary memory counts with its maximum on every
    line.
    """
    starts, last_read, arena = lives_of(problem, tables or CallTables())
    ordinary = ordinary_level(problem, starts, last_read)
    if not problem.releases_pages:
        ordinary = np.full_like(ordinary, ordinary.max(initial=0))
    return starts, (arena, ordinary)
