"""How much of the arena must be in memory during each call, and the peak of the whole step.

Gradients lie outside the arena: as the backward runs, ordinary memory grows while saved activations
die. Where the device can give single pages back (CPU), the dead tail of the arena is given back as
fast as the gradients grow. Elsewhere the whole arena stays.

Symbols: for call c, tail(c) = highest end of a buffer alive in c or later; ordinary(c) = the
largest sum, at one line of c, of outputs made so far and memory that kernels allocate themselves.
    step peak   = max_c (tail(c) + ordinary(c)), or that of an interlude or of the update if larger
    peak        = fixed + heap slack (CPU) + step peak + waiting
    resident(c) = min(resident(c-1), step peak - ordinary(c))     >= tail(c)
so that no more pages are given back (and faulted in again in the next step) than the peak needs.
``waiting`` are the whole frames of other steps whose backward is still to come (max_inflight).
An *interlude* is the user's code between two halves of a group. While it runs, dead ranges below
the tail can be given back as well (``step.interludes``): there the bytes that cannot be given back
stand for tail(c), and ``dropped`` names the ranges that are. During the optimizer's *update* the
arena counts only where its pages stay.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from memo_compile.step.interludes import PlacedInterlude, Range, placed_interludes
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
    """How much of the arena stays in memory during each call, and the peak of the step."""

    resident_bytes: tuple[int, ...]
    """For each call the bytes of the arena, from its start, that stay."""
    peak_bytes: int
    """Peak of the whole step: fixed memory, arena, outputs and kernels' own memory."""
    dropped: tuple[tuple[Range, ...], ...] = ()
    """For each interlude the ranges of the arena that are given back while it runs."""


def residency(
    problem: Problem,
    offsets: Mapping[str, int],
    arena_bytes: int,
    buffers: Sequence[ArenaBuffer] | None = None,
) -> Residency:
    """Returns a placed step's residency; ``buffers`` are its ``arena_buffers``, if at hand."""
    fixed = step_constant_bytes(problem)
    buffers = arena_buffers(problem) if buffers is None else buffers
    ordinary, releases = ordinary_bytes(problem), problem.releases_pages
    tails = [arena_bytes] * len(ordinary.most)
    if releases:
        tails = _tails(problem, buffers, offsets)
    interludes = placed_interludes(problem, buffers, offsets, ordinary.after)
    call_bytes = (tail + outside for tail, outside in zip(tails, ordinary.most, strict=True))
    step_peak = max(call_bytes, default=0)
    for interlude in interludes:
        stays = interlude.stays_bytes(_next_call(tails, interlude)) if releases else arena_bytes
        step_peak = max(step_peak, stays + interlude.ordinary_bytes)
    step_peak = max(step_peak, _update_bytes(problem, arena_bytes, ordinary))
    resident = _resident(tails, ordinary.most, interludes, step_peak, arena_bytes)
    dropped = tuple(
        interlude.dropped(_next_call(resident, interlude), step_peak - interlude.ordinary_bytes)
        if releases
        else ()
        for interlude in interludes
    )
    return Residency(
        resident_bytes=tuple(resident),
        peak_bytes=fixed + _with_slack(problem, step_peak, arena_bytes),
        dropped=dropped,
    )


def _resident(
    tails: Sequence[int],
    ordinary: Sequence[int],
    interludes: Sequence[PlacedInterlude],
    step_peak: int,
    arena_bytes: int,
) -> list[int]:
    """Returns for each call how many bytes of the arena stay: ``resident(c)`` of this module.

    An interlude runs with what stays during the next call, so that it bounds that as well.
    """
    resident: list[int] = []
    current = arena_bytes
    bound_at = {each.call + 1: step_peak - each.ordinary_bytes for each in interludes}
    for call, (tail, outside) in enumerate(zip(tails, ordinary, strict=True)):
        current = max(tail, min(current, step_peak - outside, bound_at.get(call, current)))
        resident.append(current)
    return resident


def _next_call(per_call: Sequence[int], interlude: PlacedInterlude) -> int:
    """Returns the entry of the call behind an interlude, or of the last call."""
    return per_call[min(interlude.call + 1, len(per_call) - 1)]


def running_peak_bytes(problem: Problem, plan: Plan) -> int:
    """Returns the peak of a step by ``plan``, with the ordinary memory that ``problem`` has now."""
    ordinary = ordinary_bytes(problem)
    stays = zip(plan.resident_bytes, ordinary.most, strict=True)
    step_peak = max((resident + outside for resident, outside in stays), default=0)
    step_peak = max(step_peak, _update_bytes(problem, plan.arena_bytes, ordinary))
    return step_constant_bytes(problem) + _with_slack(problem, step_peak, plan.arena_bytes)


def _with_slack(problem: Problem, step_peak: int, arena_bytes: int) -> int:
    """Returns ``step_peak`` bytes of one step, with the heap's slack and steps that wait."""
    slack = heap_slack(step_peak) if problem.releases_pages else 0
    waiting = (problem.live_steps - 1) * waiting_step_bytes(problem, arena_bytes)
    return step_peak + slack + waiting


def _update_bytes(problem: Problem, arena_bytes: int, ordinary: "OrdinaryMemory") -> int:
    """Returns the step's bytes while the optimizer updates: gradients, and what it borrows.

    An arena whose pages stay comes on top: state that the first update makes, and what every update
    makes meanwhile, lie beside it.
    """
    if not problem.fixed.update:
        return 0
    stays = 0 if problem.releases_pages else arena_bytes
    return stays + problem.fixed.update + sum(ordinary.after[-1:])


def idle_after_step_bytes(problem: Problem, plan: Plan) -> int:
    """Returns what the optimizer may borrow of the arena after the backward, within the peak.

    0 where its pages stay, so that updates are as small as they can be.
    """
    if not problem.releases_pages:
        return 0
    step_bytes = plan.peak_bytes - step_constant_bytes(problem)
    step_bytes -= heap_slack(step_bytes)
    return max(0, min(plan.arena_bytes, step_bytes - sum(ordinary_bytes(problem).after[-1:])))


def waiting_step_bytes(problem: Problem, arena_bytes: int) -> int:
    """Returns what a step holds until its backward begins: its frame, and results that are kept."""
    return arena_bytes + (problem.fixed.outputs if problem.keeps_outputs else 0)


def heap_slack(step_bytes: int) -> int:
    """Returns the slack (CPU) for ``step_bytes`` that a step takes beside constant memory."""
    return min(int(step_bytes * HEAP_SLACK), MAX_HEAP_SLACK_BYTES)


def step_constant_bytes(problem: Problem) -> int:
    """Returns the memory that exists from the forward's entry to the backward's exit."""
    fixed = problem.fixed
    old_gradients = max(0, fixed.gradients - fixed.new_gradients)
    before_step = fixed.parameters + fixed.buffers + fixed.optimizer_state + fixed.inputs
    return before_step + old_gradients + fixed.earlier_outputs + fixed.libraries


def beside_arena_bytes(problem: Problem) -> int:
    """Returns the most memory of the step beside its arena."""
    return step_constant_bytes(problem) + max(ordinary_bytes(problem).most, default=0)


def retained_peak_bytes(problem: Problem, plan: Plan) -> int:
    """Returns the peak with ``retain_graph=True``: two frames exist while the backward runs."""
    ordinary = ordinary_bytes(problem)
    stays = zip(plan.resident_bytes, ordinary.most, strict=True)
    call_bytes = [resident + outside for resident, outside in stays]
    end = plan.arena_bytes + sum(ordinary.after[-1:])
    retained = plan.arena_bytes + max([end, *call_bytes[problem.first_backward :]])
    return plan.peak_bytes + max(0, retained - max(call_bytes, default=0))


class OrdinaryMemory(NamedTuple):
    """Bytes of ordinary memory for each call: memory of kernels, and outputs made so far."""

    before: list[int]
    """When the call begins; for the first of the backward, with the gradients of the results."""
    most: list[int]
    """The most at one of the call's lines."""
    after: list[int]
    """When the call has ended."""


def ordinary_bytes(problem: Problem) -> OrdinaryMemory:
    """Returns what the step holds in ordinary memory, call by call."""
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
    """Returns the bytes of ordinary memory at each line; arguments as of ``ordinary_events``."""
    starts = call_starts(problem) if starts is None else starts
    last_read = last_reads(problem, starts) if last_read is None else last_read
    events = [
        *unplanned_outputs(problem, starts, last_read),
        *ordinary_events(problem, starts, last_read),
    ]
    between_calls = np.array(events, dtype=np.int64).reshape(-1, 2).T
    lines, changes = np.concatenate([between_calls, *_inside_calls(problem, starts)], axis=1)
    return level_of(lines, changes, starts[-1])


def _inside_calls(problem: Problem, starts: Starts) -> Iterator[Any]:
    """Yields for each region (2, events): lines, and bytes that its kernels allocate or free."""
    begins_of: dict[str, list[int]] = {
        name: [] for name, region in problem.regions.items() if region.outside
    }
    for call, start in zip(problem.calls, starts, strict=False):
        if call.region in begins_of:
            begins_of[call.region].append(start)
    for name, begins in begins_of.items():
        outside = problem.regions[name].outside
        lines = [line for buffer in outside for line in (buffer.start, buffer.end)]
        changes = [
            change for buffer in outside for change in (buffer.size_bytes, -buffer.size_bytes)
        ]
        all_lines = np.add.outer(np.array(begins, dtype=np.int64), np.array(lines, dtype=np.int64))
        all_changes = np.tile(np.array(changes, dtype=np.int64), len(begins))
        yield np.stack([all_lines.ravel(), all_changes])


def level_of(lines: Sequence[int], changes: Sequence[int], num_lines: int) -> Any:
    """Returns for each line the sum of ``changes`` (bytes) up to it, without those at the end."""
    level = np.zeros(num_lines + 1, dtype=np.int64)
    places = np.minimum(np.array(lines, dtype=np.int64), num_lines)
    np.add.at(level, places, np.array(changes, dtype=np.int64))
    return np.cumsum(level)[:-1]


def _tails(
    problem: Problem, buffers: Iterable[ArenaBuffer], offsets: Mapping[str, int]
) -> list[int]:
    """Returns for each call the highest end of a buffer that is alive in it or later."""
    starts = call_starts(problem)
    ends = sorted((buffer.end, offsets[buffer.id] + buffer.size_bytes) for buffer in buffers)
    tails, highest = [], 0
    for start in reversed(starts[:-1]):
        while ends and ends[-1][0] >= start:  # an unused input dies on the first line
            highest = max(highest, ends.pop()[1])
        tails.append(highest)
    return tails[::-1]
