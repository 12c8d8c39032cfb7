"""The collectives of a step program: what they leave in the arena, and how long they take."""

import itertools
from collections.abc import Set

from memo_compile.step.problem import (
    COPY_REGION,
    CallKind,
    Layouts,
    Problem,
    RegionProfile,
    StepCall,
    Storage,
)


def has_collectives(problem: Problem) -> bool:
    """True where the step talks to other ranks at places of its program."""
    return any(call.kind is CallKind.ISSUE for call in problem.calls)


def value_sizes(problem: Problem, wanted: Set[str] | None = None) -> dict[str, int]:
    """Returns the bytes of the arena buffer of every value that a call makes there.

    The output of a COMM_WAIT is listed as well: it lies in the buffer that the collective wrote.
    With ``wanted`` only calls that make one of these values are looked at; no COMM_WAIT's output
    may be among them.
    """
    sizes: dict[str, int] = {}
    buffers_of = {name: _arena_outputs(region) for name, region in problem.regions.items()}
    collective_calls = []
    for call in problem.calls:
        if call.region == COPY_REGION or (wanted and wanted.isdisjoint(call.outputs)):
            continue
        inside_others = call.into_buffers()
        for position, buffer, size_bytes in buffers_of[call.region]:
            if buffer not in inside_others:
                sizes[call.outputs[position]] = size_bytes
        if call.kind is CallKind.ISSUE or call.kind is CallKind.COMM_WAIT:
            collective_calls.append(call)
    for call in collective_calls:
        for output, value in problem.made_by(call):
            written = call.inputs[0] if output.index == 0 else ""
            if value not in sizes and written in sizes:
                sizes[value] = sizes[written]
    return sizes


def _arena_outputs(region: RegionProfile) -> list[tuple[int, int, int]]:
    """Returns (position, index of its buffer, bytes of that) of each output in the arena."""
    return [
        (position, output.index, region.buffers[output.index].size_bytes)
        for position, output in enumerate(region.outputs)
        if output.storage is Storage.ARENA and output.index is not None
    ]


def handed_on(problem: Problem) -> frozenset[str]:
    """Returns the values that only collectives and their waits read, such as what is in flight."""
    readers: dict[str, set[CallKind]] = {}
    for call in problem.calls:
        for value in call.inputs:
            readers.setdefault(value, set()).add(call.kind)
    waits = (call for call in problem.calls if call.kind is CallKind.COMM_WAIT)
    handed = itertools.chain.from_iterable(wait.inputs for wait in waits)
    collectives = {CallKind.ISSUE, CallKind.COMM_WAIT}
    return frozenset(value for value in handed if readers[value] <= collectives)


def comm_bytes(problem: Problem, call: StepCall) -> int:
    """Returns the bytes that the ISSUE ``call`` reads, or those that it makes if they are more."""
    region = problem.regions[call.region]
    return max(layouts_bytes(call.reads), layouts_bytes(region.output_layouts))


def layouts_bytes(layouts: Layouts) -> int:
    """Returns the bytes of the elements of all tensors among ``layouts``."""
    return sum(layout.num_elements * layout.item_bytes for layout in layouts if layout is not None)
