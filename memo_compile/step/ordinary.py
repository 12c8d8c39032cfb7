"""When a step allocates and frees ordinary memory, outside of its arena.

That is memory of results for the user, of incoming gradients, and of what kernels allocate
themselves. An event is (line of the step, bytes allocated or minus bytes freed).
"""

import bisect
from collections.abc import Iterator, Mapping, Sequence

from memo_compile.step.halves import half_starts
from memo_compile.step.hand_over import leaving_after
from memo_compile.step.problem import (
    Phase,
    Problem,
    RegionProfile,
    Storage,
    call_starts,
    last_reads,
    running_sums,
)

Starts = tuple[int, ...]
"""The first line of every call, and the end of the step as last: ``problem.call_starts``."""


def ordinary_events(
    problem: Problem, starts: Starts | None = None, last_read: Mapping[str, int] | None = None
) -> Iterator[tuple[int, int]]:
    """Yields the events of results, incoming gradients, interludes and the loss.

    * A result of the backward stays to the end, but one that leaves the step (``leaving_after``) is
      gone before the next call. Results of a group go where ``held_until`` says.
    * An incoming gradient goes after its last read; one that no call reads stays.
    * What only the loss needs is gone after the backward's first line.
    * What a call is the last to read counts to that call's end: the heap need not put what the
      call makes into the hole that it leaves.

    ``starts`` and ``last_read`` are the results of ``call_starts`` and ``last_reads``, if the
    caller has them.
    """
    starts = call_starts(problem) if starts is None else starts
    backward_line = starts[problem.first_backward]
    last_read = last_reads(problem, starts) if last_read is None else last_read
    if problem.rebound_bytes:
        yield from ((0, problem.rebound_bytes), (backward_line, -problem.rebound_bytes))
    if problem.loss_bytes:
        yield from ((backward_line, problem.loss_bytes), (backward_line + 1, -problem.loss_bytes))
    half_lines = [starts[at] for at in half_starts(problem)]
    yield from _interlude_events(problem, half_lines)
    arrival_line = {
        value: half_lines[at] for at, half in enumerate(problem.halves) for value in half.arguments
    }
    for value, size_bytes in problem.tangents.items():
        begin = arrival_line.get(value, backward_line)
        yield begin, size_bytes
        if value in last_read:
            end = _last_line(starts, last_read[value])
            yield max(begin + 1, end), -size_bytes
    regions_with_results = _regions_with(problem, Storage.EXTERNAL)
    leaving = leaving_after(problem)
    for index, call in enumerate(problem.calls):
        for output, value in problem.made_by(call) if call.region in regions_with_results else ():
            if output.storage is not Storage.EXTERNAL or not output.size_bytes:
                continue
            yield starts[index] + output.start, output.size_bytes
            if value in problem.held_until:
                end = _last_line(starts, last_read.get(value))
                yield max(half_lines[problem.held_until[value] + 1], end), -output.size_bytes
            elif call.phase is Phase.FORWARD and not problem.keeps_outputs:
                end = _last_line(starts, last_read.get(value))
                yield max(backward_line, end), -output.size_bytes
            elif value in leaving and call.phase is Phase.BACKWARD:
                yield starts[max(leaving[value], index) + 1], -output.size_bytes


def _interlude_events(problem: Problem, half_lines: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields bytes that user code leaves (a line before the next half) or frees (on its line)."""
    for interlude in problem.interludes:
        line = half_lines[interlude.half] - (interlude.left_bytes > 0)
        yield line, interlude.left_bytes


def passing_bytes(problem: Problem) -> Iterator[tuple[int, int]]:
    """Yields for each interlude the call before it, and the most bytes that go when it ends.

    The interlude runs on that call's last line, where nothing is alive but values that later calls
    read. What it leaves is among the events: ``ordinary_events``.
    """
    starts = half_starts(problem) if problem.interludes else ()
    for interlude in problem.interludes:
        yield starts[interlude.half] - 1, interlude.most_bytes - max(0, interlude.left_bytes)


def outside_peak(problem: Problem) -> dict[str, int]:
    """Returns the bytes outside the arena by kind, at the line where their sum is largest."""
    alive: dict[str, int] = {}
    peak: dict[str, int] = {}
    for _, size_bytes, kind in sorted(outside_events(problem)):
        alive[kind] = alive.get(kind, 0) + size_bytes
        if sum(alive.values()) > sum(peak.values()):
            peak = {key: value for key, value in alive.items() if value}
    return peak


def outside_bytes(region: RegionProfile) -> int:
    """Returns the most bytes that the region's kernels hold themselves at one line."""
    events = [(buffer.start, buffer.size_bytes) for buffer in region.outside]
    events += [(buffer.end, -buffer.size_bytes) for buffer in region.outside]
    return max(running_sums(events).values(), default=0)


def outside_events(
    problem: Problem, starts: Starts | None = None, last_read: Mapping[str, int] | None = None
) -> Iterator[tuple[int, int, str]]:
    """Yields (line, bytes allocated or minus bytes freed, kind) of what kernels allocate."""
    starts = call_starts(problem) if starts is None else starts
    for call, start in zip(problem.calls, starts, strict=False):
        for buffer in problem.regions[call.region].outside:
            yield start + buffer.start, buffer.size_bytes, buffer.kind
            yield start + buffer.end, -buffer.size_bytes, buffer.kind
    for line, change in unplanned_outputs(problem, starts, last_read):
        yield line, change, "unplanned outputs"


def unplanned_outputs(
    problem: Problem, starts: Starts, last_read: Mapping[str, int] | None = None
) -> Iterator[tuple[int, int]]:
    """Yields the events of outputs that kernels allocate themselves (Storage.OUTSIDE)."""
    returning = _regions_with(problem, Storage.OUTSIDE)
    if not returning:
        return
    last_read = last_reads(problem, starts) if last_read is None else last_read
    for call, start in zip(problem.calls, starts, strict=False):
        for output, value in problem.made_by(call) if call.region in returning else ():
            if output.storage is Storage.OUTSIDE:
                yield start, output.size_bytes
                end = _last_line(starts, last_read.get(value))
                yield max(start + problem.regions[call.region].num_lines, end), -output.size_bytes


def _regions_with(problem: Problem, storage: Storage) -> set[str]:
    """Returns the names of the regions that have an output of that storage."""
    return {
        name
        for name, region in problem.regions.items()
        if any(output.storage is storage for output in region.outputs)
    }


def _last_line(starts: Sequence[int], line: int | None) -> int:
    """Returns the last line of the call that ``line`` is in; 0 for None."""
    return 0 if line is None else starts[bisect.bisect_right(starts, line)] - 1
