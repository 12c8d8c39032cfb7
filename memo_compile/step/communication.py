"""The collectives of a step program: what they leave in the arena, and how long they take."""

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


def value_sizes(problem: Problem, wanted: Set[str] | None = None) -> dict[str, int]:
    """Value -> bytes of its arena buffer, for what calls make there, and what waits show.

    A wait shows the buffer that its collective has written. That stands under the wait's name too.
    ``wanted`` are those values that are asked for, if no wait shows them.
    """
    sizes: dict[str, int] = {}
    made = {name: _arena_outputs(region) for name, region in problem.regions.items()}
    talking = []
    for call in problem.calls:
        if call.region == COPY_REGION or (wanted and wanted.isdisjoint(call.outputs)):
            continue
        inside = call.into_buffers()
        for position, buffer, size_bytes in made[call.region]:
            if buffer not in inside:
                sizes[call.outputs[position]] = size_bytes
        if call.kind is CallKind.ISSUE or call.kind is CallKind.COMM_WAIT:
            talking.append(call)
    for call in talking:
        for output, value in problem.made_by(call):
            shown = call.inputs[0] if output.index == 0 else ""
            if value not in sizes and shown in sizes:
                sizes[value] = sizes[shown]
    return sizes


def _arena_outputs(region: RegionProfile) -> list[tuple[int, int, int]]:
    """(position, index of its buffer, bytes of that) of each output in the arena."""
    return [
        (position, output.index, region.buffers[output.index].size_bytes)
        for position, output in enumerate(region.outputs)
        if output.storage is Storage.ARENA and output.index is not None
    ]


def handed_on(problem: Problem) -> frozenset[str]:
    """Values that only a collective and its wait read: what is in flight, and in its place."""
    found: set[str] = set()
    readers: dict[str, set[CallKind]] = {}
    for call in problem.calls:
        for value in call.inputs:
            readers.setdefault(value, set()).add(call.kind)
    for call in problem.calls:
        if call.kind is CallKind.COMM_WAIT:
            found.update(
                value
                for value in call.inputs
                if readers[value] <= {CallKind.ISSUE, CallKind.COMM_WAIT}
            )
    return frozenset(found)


def comm_bytes(problem: Problem, call: StepCall) -> int:
    """Bytes of the larger of what the ISSUE ``call`` reads and makes."""
    region = problem.regions[call.region]
    return max(layouts_bytes(call.reads), layouts_bytes(region.output_layouts))


def layouts_bytes(layouts: Layouts) -> int:
    """Bytes of the numbers of all tensors among ``layouts``."""
    return sum(layout.num_elements * layout.item_bytes for layout in layouts if layout is not None)
