"""The parts that steps are written with, in few words."""

from collections.abc import Sequence

from memo_compile.step.problem import (
    Phase,
    RegionBuffer,
    RegionOutput,
    RegionProfile,
    StepCall,
    Storage,
)

KIB = 1024
MIB = 1024 * KIB


def buffer(name: str, size_bytes: int, start: int, end: int) -> RegionBuffer:
    return RegionBuffer(name=name, size_bytes=size_bytes, start=start, end=end)


def arena(index: int) -> RegionOutput:
    return RegionOutput(storage=Storage.ARENA, index=index)


def external(size_bytes: int) -> RegionOutput:
    return RegionOutput(storage=Storage.EXTERNAL, size_bytes=size_bytes)


def region(
    name: str,
    buffers: Sequence[RegionBuffer],
    input_ends: Sequence[int],
    outputs: Sequence[RegionOutput],
    num_lines: int = 4,
) -> RegionProfile:
    return RegionProfile(
        name=name,
        num_lines=num_lines,
        buffers=tuple(buffers),
        input_ends=tuple(input_ends),
        outputs=tuple(outputs),
    )


def call(
    name: str, region: str, phase: Phase, inputs: Sequence[str], outputs: Sequence[str], **more
) -> StepCall:
    return StepCall(
        name=name, region=region, phase=phase, inputs=tuple(inputs), outputs=tuple(outputs), **more
    )
