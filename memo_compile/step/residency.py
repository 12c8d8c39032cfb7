"""How much of the arena must be in memory during each call, and the peak of the whole step.

Gradients leave the arena: while the backward runs they fill ordinary memory, and the saved
activations whose place they take are dead. Where the device can give single pages back (CPU), the
dead tail of the arena is given back just as fast as the gradients grow, so that the step's peak is
that of what is alive. Elsewhere the whole arena stays.

Symbols: for call c, tail(c) = highest end of a buffer alive in c or later; ordinary(c) = the
largest sum, at one line of c, of outputs made so far and memory that kernels allocate themselves.
    peak        = fixed + heap slack (CPU) + max_c (tail(c) + ordinary(c)) + waiting
    resident(c) = min(resident(c-1), max_d (tail(d) + ordinary(d)) - ordinary(c))     >= tail(c)
so that no more pages are given back (and faulted in again in the next step) than the peak needs.
``waiting`` are the whole frames of other steps whose backward is still to come (max_inflight).
While an interlude runs, what is dead below the tail can go as well (``step.interludes``): there
tail(c) is what is alive then.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from memo_compile.step.interludes import PlacedInterlude, Range, pauses
from memo_compile.step.ordinary import Starts, ordinary_events, unplanned_outputs
from memo_compile.step.plans import Plan
from memo_compile.step.problem import ArenaBuffer, Problem, arena_buffers, call_starts, last_reads

HEAP_SLACK = 0.03
"""CPU: share of a step's own memory that is added for kernels' work space and for the C allocator's
fragments, up to MAX_HEAP_SLACK_BYTES. CUDA: nothing is added; that was not measured yet."""

MAX_HEAP_SLACK_BYTES = 5 * 2**20
"""Most slack: 2.0, 3.1 and 4.1 MiB were measured on Llama steps of 381, 240 and 173 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """Per call the bytes of the arena, from its start, that stay in memory; and the peak."""

    resident_bytes: tuple[int, ...]
    peak_bytes: int
    """Peak of the whole step: fixed memory, arena, outputs and kernels' own memory."""
    dropped: tuple[tuple[Range, ...], ...] = ()
    """Per interlude what goes of the arena while it runs; no other pages than these come back."""


def residency(
    problem: Problem,
    offsets: Mapping[str, int],
    arena_bytes: int,
    buffers: Sequence[ArenaBuffer] | None = None,
) -> Residency:
    """The residency of a placed step; ``buffers`` are its own, where they are known.

    Cost: buffers x log calls.
    """
    fixed = step_constant_bytes(problem)
    buffers = arena_buffers(problem) if buffers is None else buffers
    ordinary, releases = ordinary_bytes(problem), problem.releases_pages
    tails = [arena_bytes] * len(ordinary.most)
    if releases:
        tails = _tails(problem, buffers, offsets)
    between = pauses(problem, buffers, offsets, ordinary.after)
    most = max((tail + more for tail, more in zip(tails, ordinary.most, strict=True)), default=0)
    for pause in between:
        stays = pause.stays_bytes(_following(tails, pause)) if releases else arena_bytes
        most = max(most, stays + pause.ordinary_bytes)
    resident = _resident(tails, ordinary.most, between, most, arena_bytes)
    dropped = tuple(
        pause.dropped(_following(resident, pause), most - pause.ordinary_bytes) if releases else ()
        for pause in between
    )
    slack = heap_slack(most) if releases else 0
    waiting = (problem.live_steps - 1) * waiting_step_bytes(problem, arena_bytes)
    return Residency(
        resident_bytes=tuple(resident),
        peak_bytes=fixed + most + slack + waiting,
        dropped=dropped,
    )


def _resident(
    tails: Sequence[int],
    ordinary: Sequence[int],
    between: Sequence[PlacedInterlude],
    most: int,
    current: int,
) -> list[int]:
    """Per call the bytes that stay; at first ``current``."""
    found: list[int] = []
    room = {pause.call + 1: most - pause.ordinary_bytes for pause in between}
    for index, (tail, more) in enumerate(zip(tails, ordinary, strict=True)):
        current = max(tail, min(current, most - more, room.get(index, current)))
        found.append(current)
    return found


def _following(per_call: Sequence[int], pause: PlacedInterlude) -> int:
    """The number of the call behind an interlude; of the last call where there is none."""
    return per_call[min(pause.call + 1, len(per_call) - 1)]


def running_peak_bytes(problem: Problem, plan: Plan) -> int:
    """The peak of a step that runs by ``plan``, where ``problem`` tells of ordinary memory."""
    needs = zip(plan.resident_bytes, ordinary_bytes(problem).most, strict=True)
    most = max((stay + more for stay, more in needs), default=0)
    slack = heap_slack(most) if problem.releases_pages else 0
    waiting = (problem.live_steps - 1) * waiting_step_bytes(problem, plan.arena_bytes)
    return step_constant_bytes(problem) + most + slack + waiting


def waiting_step_bytes(problem: Problem, arena_bytes: int) -> int:
    """What a step holds until its backward begins: its frame, and results that are kept."""
    return arena_bytes + (problem.fixed.outputs if problem.keeps_outputs else 0)


def heap_slack(step_bytes: int) -> int:
    """Bytes to plan for on top of the ``step_bytes`` that a step adds to what is constant (CPU)."""
    return min(int(step_bytes * HEAP_SLACK), MAX_HEAP_SLACK_BYTES)


def step_constant_bytes(problem: Problem) -> int:
    """Memory that is there from the forward's entry to the backward's exit."""
    fixed = problem.fixed
    old_gradients = max(0, fixed.gradients - fixed.new_gradients)
    given = fixed.parameters + fixed.buffers + fixed.optimizer_state + fixed.inputs
    return given + old_gradients + fixed.earlier_outputs + fixed.libraries


def beside_arena_bytes(problem: Problem) -> int:
    """The most memory of the step beside its arena."""
    return step_constant_bytes(problem) + max(ordinary_bytes(problem).most, default=0)


def retained_peak_bytes(problem: Problem, plan: Plan) -> int:
    """The peak of a step whose backward keeps its graph: its frame exists twice until its end."""
    ordinary = ordinary_bytes(problem)
    needs = [stay + more for stay, more in zip(plan.resident_bytes, ordinary.most, strict=True)]
    most, end = max(needs, default=0), plan.arena_bytes + sum(ordinary.after[-1:])
    retained = plan.arena_bytes + max([end, *needs[problem.first_backward :]])
    return plan.peak_bytes + max(0, retained - most)


class OrdinaryMemory(NamedTuple):
    """Ordinary memory per call: what kernels hold themselves, and outputs made so far."""

    before: list[int]
    """When the call begins; for the first of the backward, with the gradients of the results."""
    most: list[int]
    """At one of the call's lines."""
    after: list[int]
    """When the call has ended."""


def ordinary_bytes(problem: Problem) -> OrdinaryMemory:
    """What the step holds outside its arena, in ordinary memory."""
    of_calls = call_starts(problem)
    starts = np.array(of_calls)
    level = ordinary_level(problem, of_calls)
    before, after = level[starts[:-1]], level[starts[1:] - 1]
    most = np.maximum.reduceat(level, starts[:-1])
    most[1:] = np.maximum(most[1:], after[:-1])  # what dies on a call's first line is still there
    return OrdinaryMemory(before.tolist(), most.tolist(), after.tolist())


def ordinary_level(
    problem: Problem, starts: Starts | None = None, last_read: Mapping[str, int] | None = None
) -> Any:
    """Per line of the step the bytes of ordinary memory; arguments as of ``outside_events``."""
    starts = call_starts(problem) if starts is None else starts
    last_read = last_reads(problem, starts) if last_read is None else last_read
    events = [
        *unplanned_outputs(problem, starts, last_read),
        *ordinary_events(problem, starts, last_read),
    ]
    few = np.array(events, dtype=np.int64).reshape(-1, 2).T
    lines, changes = np.concatenate([few, *_inside_calls(problem, starts)], axis=1)
    return level_of(lines, changes, starts[-1])


def _inside_calls(problem: Problem, starts: Starts) -> Iterator[Any]:
    """(2, n) each: lines, and the bytes that kernels of calls allocate and free there."""
    begins: dict[str, list[int]] = {
        name: [] for name, region in problem.regions.items() if region.outside
    }
    for call, start in zip(problem.calls, starts, strict=False):
        if call.region in begins:
            begins[call.region].append(start)
    for name, first in begins.items():
        outside = problem.regions[name].outside
        lines = [line for buffer in outside for line in (buffer.start, buffer.end)]
        changes = [
            change for buffer in outside for change in (buffer.size_bytes, -buffer.size_bytes)
        ]
        every = np.add.outer(np.array(first, dtype=np.int64), np.array(lines, dtype=np.int64))
        yield np.stack([every.ravel(), np.tile(np.array(changes, dtype=np.int64), len(first))])


def level_of(lines: Sequence[int], changes: Sequence[int], num_lines: int) -> Any:
    """Per line the sum of all ``changes`` (bytes) up to and at it; those at the end are left."""
    level = np.zeros(num_lines + 1, dtype=np.int64)
    at = np.minimum(np.array(lines, dtype=np.int64), num_lines)
    np.add.at(level, at, np.array(changes, dtype=np.int64))
    return np.cumsum(level)[:-1]


def _tails(
    problem: Problem, buffers: Iterable[ArenaBuffer], offsets: Mapping[str, int]
) -> list[int]:
    """Per call the highest end of a buffer that is alive in it or later."""
    starts = call_starts(problem)
    ends = sorted((buffer.end, offsets[buffer.id] + buffer.size_bytes) for buffer in buffers)
    tails, highest = [], 0
    for start in reversed(starts[:-1]):
        while ends and ends[-1][0] >= start:  # an unused input dies on the first line
            highest = max(highest, ends.pop()[1])
        tails.append(highest)
    return tails[::-1]
