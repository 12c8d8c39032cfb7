"""A step program in simulated time, and its memory before anything is placed.

Four lanes: calls run in order on the compute lane; copies to the host and copies back have a lane
each, first in, first out, and begin when the compute lane has come to them; so have collectives,
whose lane is empty on one device, and which slow computation down by a factor. A wait stalls the
compute lane until its copy or its collective has ended. Nothing else does: forward and backward are
one sequence.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from memo_compile.errors import InvalidPlan
from memo_compile.step.communication import comm_bytes
from memo_compile.step.copy_times import CopyLane
from memo_compile.step.lives import CallTables, lives_of
from memo_compile.step.movable import StepCosts
from memo_compile.step.ordinary import passing_bytes
from memo_compile.step.plans import Span, Timeline
from memo_compile.step.problem import (
    COPY_REGION,
    CallKind,
    Problem,
    RegionProfile,
    StepCall,
    call_starts,
    last_reads,
)
from memo_compile.step.residency import level_of, ordinary_level, step_constant_bytes

COMPUTE, STALL, D2H, H2D = "compute", "stall", "d2h", "h2d"
COMMUNICATION = "communication"


def simulate(problem: Problem, costs: StepCosts, *, spans: bool = True) -> Timeline:
    """How long the step takes, and what every lane does when. Cost: linear.

    Raises:
        InputError: a region has no seconds.
        InvalidPlan: a wait names no copy that was issued before it.
    """
    found: list[Span] = []
    ends: dict[str, float] = {}
    out, back, ranks = CopyLane(), CopyLane(), CopyLane()
    sent, fetched = (D2H, out, costs.d2h_s), (H2D, back, costs.h2d_s)
    now = stall_s = comm_s = exposed_s = 0.0
    for call in problem.calls:
        begin, kind = now, call.kind
        if kind is CallKind.RUN or kind is CallKind.RECOMPUTE:
            seconds = costs.call_s(call)
            now += seconds if ranks.free_s <= now else costs.beside_s(seconds, ranks.free_s - now)
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
            begin, end = ranks.copy(now, seconds)
            name, ends[call.name] = COMMUNICATION, end
            comm_s += seconds
        else:
            assert call.copy is not None, f"{call.name}: a copy without its bytes"
            name, lane, copy_s = sent if kind is CallKind.OFFLOAD else fetched
            begin, end = lane.copy(now, copy_s(call.copy.num_bytes))
            ends[call.name] = end
        if spans and end > begin:
            found.append(Span(lane=name, name=call.name, start_s=begin, end_s=end))
    step_s = max(now, out.free_s, back.free_s, ranks.free_s)
    return Timeline(
        step_s=step_s,
        stall_s=stall_s,
        spans=tuple(found),
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
    """The peak of a perfect placement: no placed step of this program has a smaller one.

    The largest of ``most_per_call``, and the constant; ``step.residency`` adds them likewise.
    ``alive`` are the former, where they are known.
    """
    if not problem.calls:
        return step_constant_bytes(problem)
    alive = most_per_call(problem, tables) if alive is None else alive
    return step_constant_bytes(problem) + int(alive.max())


def most_per_call(problem: Problem, tables: CallTables | None = None) -> Any:
    """Per call the most bytes alive in the arena, and with them the most of ordinary memory.

    An interlude counts with the call before it, beside what is alive on that call's last line.
    ``tables`` are those of programs that share calls with this one.
    """
    starts, levels = _memory_levels(problem, tables)
    most: Any = sum(np.maximum.reduceat(level, np.array(starts[:-1])) for level in levels)
    for call, passing in passing_bytes(problem):
        most[call] = max(most[call], passing + sum(lvl[starts[call + 1] - 1] for lvl in levels))
    return most


def memory_level(problem: Problem) -> Any:
    """Per line of the step the bytes alive in the arena and those of ordinary memory."""
    return sum(_memory_levels(problem, None)[1])


def _memory_levels(
    problem: Problem, tables: CallTables | None
) -> tuple[tuple[int, ...], tuple[Any, Any]]:
    """The first lines of calls, and per line the bytes of both memories.

    Ordinary memory is at its most where an arena that stays leaves it no room.
    """
    last_read: Mapping[str, int]
    if tables is not None:
        starts, last_read, arena = lives_of(problem, tables)
    else:  # to make tables for one program takes longer than to go through it
        starts = call_starts(problem)
        last_read = last_reads(problem, starts)
        arena = _arena_level(problem, starts, last_read)
    ordinary = ordinary_level(problem, starts, last_read)
    if not problem.releases_pages:
        ordinary = np.full_like(ordinary, ordinary.max(initial=0))
    return starts, (arena, ordinary)


def _arena_level(problem: Problem, starts: Sequence[int], last_read: Mapping[str, int]) -> Any:
    """Per line the bytes alive of ``arena_buffers``, without making its objects."""
    alike: dict[tuple[str, frozenset[int]], tuple[list[int], list[tuple[str, ...]]]] = {}
    none: frozenset[int] = frozenset()
    for call, start in zip(problem.calls, starts, strict=False):
        if call.region == COPY_REGION:  # makes nothing, and holds nothing of its own
            continue
        key = (call.region, call.into_buffers()) if call.into else (call.region, none)
        found = alike.get(key)
        if found is None:
            found = alike[key] = [], []
        found[0].append(start)
        found[1].append(call.outputs)
    changes = np.zeros(starts[-1] + 1, dtype=np.int64)
    for (name, inside), (begins, outputs) in alike.items():
        at = np.array(begins, dtype=np.int64)
        for buffer in _crossing(problem.regions[name]):
            if buffer.number in inside:
                continue
            ends = at + buffer.end
            for position in buffer.outputs:
                reads = [last_read.get(made[position], 0) for made in outputs]
                ends = np.maximum(ends, np.array(reads, dtype=np.int64))
            changes[at + buffer.start] += buffer.size_bytes  # calls begin on lines of their own
            np.subtract.at(changes, np.minimum(ends, starts[-1]), buffer.size_bytes)
    level = np.cumsum(changes)[:-1]
    for (name, inside), (begins, _) in alike.items():
        own = _inner_level(problem.regions[name], inside)
        if own is not None:
            for begin in begins:
                level[begin : begin + len(own)] += own
    return level


class _Crossing(NamedTuple):
    """A buffer of a region that lives at least as long as the call; lines count from its first."""

    number: int
    """Index in the region's ``buffers``."""
    start: int
    end: int
    size_bytes: int
    outputs: list[int]
    """Its outputs, by position."""


def _crossing(region: RegionProfile) -> list[_Crossing]:
    found = []
    for index, outputs in region.outputs_of_buffers().items():
        buffer = region.buffers[index]
        end = max(buffer.end, region.num_lines)
        found.append(_Crossing(index, buffer.start, end, buffer.size_bytes, outputs))
    return found


def _inner_level(region: RegionProfile, inside: frozenset[int]) -> Any:
    """Per line of a call the bytes of the buffers that die in it; None where there are none."""
    crossing = region.outputs_of_buffers()
    own = [
        buffer
        for index, buffer in enumerate(region.buffers)
        if index not in crossing and index not in inside
    ]
    if not own:
        return None
    lines = [line for buffer in own for line in (buffer.start, buffer.end)]
    changes = [change for buffer in own for change in (buffer.size_bytes, -buffer.size_bytes)]
    return level_of(lines, changes, region.num_lines + 1)
