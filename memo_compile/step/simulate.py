"""A step program in simulated time, and its memory before anything is placed.

Four lanes: calls run in order on the compute lane; copies to the host and copies back have a lane
each, first in, first out, and begin when the compute lane has come to them; communication is empty
on one device. A wait stalls the compute lane until its copy has ended. Nothing else does: forward
and backward are one sequence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memo_compile.errors import InvalidPlan
from memo_compile.step.copy_times import CopyLane
from memo_compile.step.movable import StepCosts
from memo_compile.step.plans import Span, Timeline
from memo_compile.step.problem import (
    CallKind,
    Problem,
    RegionProfile,
    StepCall,
    call_starts,
    last_reads,
    ordinary_events,
    outside_events,
)
from memo_compile.step.residency import step_constant_bytes

COMPUTE, STALL, D2H, H2D = "compute", "stall", "d2h", "h2d"


def simulate(problem: Problem, costs: StepCosts, *, spans: bool = True) -> Timeline:
    """How long the step takes, and what every lane does when. Cost: linear.

    Raises:
        InputError: a region has no seconds.
        InvalidPlan: a wait names no copy that was issued before it.
    """
    found: list[Span] = []
    ends: dict[str, float] = {}
    out, back = CopyLane(), CopyLane()
    copies = {
        CallKind.OFFLOAD: (D2H, out, costs.d2h_s),
        CallKind.RELOAD: (H2D, back, costs.h2d_s),
    }
    now = stall_s = 0.0
    for call in problem.calls:
        begin = now
        if call.kind is CallKind.WAIT:
            now = max(now, _end_of(call, ends))
            stall_s += now - begin
            name, end = STALL, now
        elif call.kind in copies:
            assert call.copy is not None, f"{call.name}: a copy without its bytes"
            name, lane, copy_s = copies[call.kind]
            begin, end = lane.copy(now, copy_s(call.copy.num_bytes))
            ends[call.name] = end
        else:
            now += costs.call_s(call)
            name, end = COMPUTE, now
        if spans and end > begin:
            found.append(Span(lane=name, name=call.name, start_s=begin, end_s=end))
    step_s = max(now, out.free_s, back.free_s)
    return Timeline(step_s=step_s, stall_s=stall_s, spans=tuple(found))


def _end_of(call: StepCall, ends: Mapping[str, float]) -> float:
    end = ends.get(call.waits_for or "")
    if end is None:
        raise InvalidPlan(
            f"{call.name} waits for {call.waits_for}, which is no copy issued before it"
        )
    return end


def peak_live_bytes(problem: Problem) -> int:
    """The peak of a perfect placement: no placed step of this program has a smaller one.

    Per call the most bytes alive in the arena and the most ordinary memory, as
    ``step.residency`` adds them; the largest sum, and the constant.
    """
    if not problem.calls:
        return step_constant_bytes(problem)
    return step_constant_bytes(problem) + int(sum(most_per_call(problem)).max())


def most_per_call(problem: Problem) -> tuple[Any, Any]:
    """Per call the most bytes alive in the arena, and the most of ordinary memory."""
    starts = np.array(call_starts(problem)[:-1])
    arena, ordinary = (np.maximum.reduceat(level, starts) for level in memory_levels(problem))
    return arena, ordinary


def memory_levels(problem: Problem) -> tuple[Any, Any]:
    """Per line of the step the bytes alive in the arena, and those of ordinary memory."""
    starts = call_starts(problem)
    outside = [(line, change) for line, change, _ in outside_events(problem)]
    outside += ordinary_events(problem)
    levels = []
    for events in (_arena_events(problem, starts), np.array(outside, np.int64).reshape(-1, 2)):
        alive = np.zeros(starts[-1] + 1, dtype=np.int64)
        np.add.at(alive, np.minimum(events[:, 0], starts[-1]), events[:, 1])
        levels.append(np.cumsum(alive)[:-1])
    return levels[0], levels[1]


@dataclass(slots=True)
class _RegionLives:
    """A region's buffers as arrays, and where its calls begin."""

    inner: Any
    """(line, change) of the buffers that die inside."""
    crossing: tuple[tuple[int, int, int, tuple[int, ...]], ...]
    """(first line, least end, bytes, positions among the outputs) of the others."""
    starts: list[int] = field(default_factory=list)


def _region_lives(region: RegionProfile, inside: frozenset[int]) -> _RegionLives:
    positions = region.outputs_of_buffers()
    inner: list[tuple[int, int]] = []
    crossing = []
    for index, buffer in enumerate(region.buffers):
        if index in inside:
            continue
        if index not in positions:
            inner += [(buffer.start, buffer.size_bytes), (buffer.end, -buffer.size_bytes)]
            continue
        end = max(buffer.end, region.num_lines)
        crossing.append((buffer.start, end, buffer.size_bytes, tuple(positions[index])))
    table = np.array(inner, dtype=np.int64).reshape(-1, 2)
    return _RegionLives(inner=table, crossing=tuple(crossing))


def _arena_events(problem: Problem, starts: Sequence[int]) -> Any:
    """(line, change) of every buffer of ``arena_buffers``, as one array and without its objects."""
    last_read = last_reads(problem, tuple(starts))
    lives: dict[tuple[str, frozenset[int]], _RegionLives] = {}
    nothing: frozenset[int] = frozenset()
    events: list[tuple[int, int]] = []
    for call, start in zip(problem.calls, starts, strict=False):
        key = (call.region, call.into_buffers() if call.into else nothing)
        region = lives.get(key)
        if region is None:
            region = lives[key] = _region_lives(problem.regions[call.region], key[1])
        region.starts.append(start)
        for first, least_end, size_bytes, positions in region.crossing:
            end = start + least_end
            for position in positions:
                end = max(end, last_read.get(call.outputs[position], 0))
            events.append((start + first, size_bytes))
            events.append((end, -size_bytes))
    tables = [np.array(events, dtype=np.int64).reshape(-1, 2)]
    for region in lives.values():
        if len(region.inner):
            table = np.tile(region.inner, (len(region.starts), 1))
            table[:, 0] += np.repeat(np.array(region.starts), len(region.inner))
            tables.append(table)
    return np.concatenate(tables)
