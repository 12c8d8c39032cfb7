"""Profiles of collectives and of their waits, which the runtime runs.

A collective writes a buffer of its own, over its input, or ordinary memory where its result goes to
the user. Its wait returns the same tensor.
"""

from collections.abc import Mapping
from dataclasses import replace

from memo_compile.analysis.regions import LoweredRegion, RegionGraph, storage_bytes, view_spec
from memo_compile.analysis.splittable import collective_of
from memo_compile.analysis.views import results_of
from memo_compile.step.problem import (
    CallKind,
    Problem,
    RegionBuffer,
    RegionOutput,
    RegionProfile,
    StepCall,
    Storage,
    align,
)


def lower(region: RegionGraph, *, in_place: bool | None = None) -> LoweredRegion:
    """Lowers an ISSUE or a COMM_WAIT; ``in_place`` by default where the graph allows it."""
    (result,) = results_of(region.gm.graph)
    num_inputs = len(region.gm.graph.find_nodes(op="placeholder"))
    size_bytes = align(storage_bytes(result.meta["val"]))
    is_wait = region.kind is CallKind.COMM_WAIT
    buffers: tuple[RegionBuffer, ...] = ()
    if is_wait or (region.may_reuse_input if in_place is None else in_place):
        output = RegionOutput(storage=Storage.INPUT, index=0)
    elif region.external_outputs:
        output = RegionOutput(storage=Storage.EXTERNAL, size_bytes=size_bytes)
    else:
        buffers = (RegionBuffer(name=result.name, size_bytes=size_bytes, start=0, end=1),)
        output = RegionOutput(storage=Storage.ARENA, index=0)
    ends, outputs = (1,) * num_inputs, (output,)
    profile = RegionProfile(
        name=region.name, num_lines=1, buffers=buffers, input_ends=ends, outputs=outputs
    )
    views = (view_spec(result.meta["val"]),) if buffers else ()
    collective = None if is_wait else collective_of(result)
    return LoweredRegion(profile=profile, views=views, run=_never, collective=collective)


def _never(inputs: list[object]) -> list[object]:
    raise AssertionError("the runtime runs collectives and their waits itself")


def apart(lowered: LoweredRegion, region: RegionGraph) -> LoweredRegion:
    """Returns the collective ``lowered`` with a buffer of its own in place of its input's."""
    inputs, outputs = lowered.profile.input_layouts, lowered.profile.output_layouts
    moved = lower(region, in_place=False)
    profile = replace(moved.profile, input_layouts=inputs, output_layouts=outputs)
    return replace(moved, profile=profile)


def overwriting(problem: Problem) -> frozenset[str]:
    """Returns the regions of collectives that write over an input which is still needed.

    Only lowered regions show that: a compiler may return an input where the graph makes a copy of
    it. Cost: linear.
    """
    storage_of: dict[str, str | None] = {}
    """Value -> the arena buffer that it lies in; None in ordinary memory."""
    taken_by: dict[str, tuple[str, str]] = {}
    """Value whose place a collective has taken -> the collective's region, and its call."""
    overwriting_regions: set[str] = set()
    for call in problem.calls:
        for value in call.touched:
            if value in taken_by and call.waits_for != taken_by[value][1]:
                overwriting_regions.add(taken_by[value][0])
        first_output = problem.regions[call.region].outputs[:1]
        if call.kind is CallKind.ISSUE and first_output[0].storage is Storage.INPUT:
            buffer = storage_of.get(call.inputs[0])
            if buffer is None:  # its input is not the step's to write over
                overwriting_regions.add(call.region)
            in_buffer = (value for value, other in storage_of.items() if other == buffer)
            taken_by.update((value, (call.region, call.name)) for value in in_buffer)
        for output, value in problem.made_by(call):
            storage_of[value] = _storage(call, output, storage_of)
    results = (value for half in problem.halves for value in half.results if value in taken_by)
    overwriting_regions.update(taken_by[value][0] for value in results if value is not None)
    return frozenset(overwriting_regions)


def _storage(
    call: StepCall, output: RegionOutput, storage_of: Mapping[str, str | None]
) -> str | None:
    """Returns the arena buffer that the output lies in; None: ordinary memory."""
    if output.index is None or output.storage not in (Storage.ARENA, Storage.INPUT):
        return None
    if output.storage is Storage.INPUT:
        return storage_of.get(call.inputs[output.index])
    whole = call.value_around(output.index)  # into which a tile writes
    return f"{call.name}/{output.index}" if whole is None else storage_of.get(whole)
