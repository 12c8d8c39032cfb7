"""The step program as text, a line for each call: what runs, what is copied, what runs beside what.

      P                    in -> x0
      offload              x0  8.00 KiB -> host[0:8192]
      L@0                  x0 -> x1, y0                              | out x0
      wait                 offload.x0

After ``|`` come the copies and collectives in flight while a region runs: issued, and not yet
waited for.
"""

from collections.abc import Iterator, Mapping, Sequence

from memo_compile.step.problem import (
    CallKind,
    Into,
    Phase,
    Problem,
    RegionProfile,
    StepCall,
    Storage,
)
from memo_compile.units import format_bytes

NAME_WIDTH = 20
TEXT_WIDTH = 60
"""Characters of a line before the copies in flight."""

MAX_VALUES = 6
"""Most values of one kind that are listed; of the others only their number is told."""


def program_text(problem: Problem) -> str:
    """The calls of ``problem`` in order; equal programs have equal texts."""
    return "\n".join(_lines(problem)) + "\n"


def _lines(problem: Problem) -> Iterator[str]:
    if problem.host_bytes:
        yield f"host frame {format_bytes(problem.host_bytes)}"
    phase: Phase | None = None
    flying: dict[str, tuple[CallKind, str]] = {}
    for call in problem.calls:
        if call.phase is not phase:
            phase = call.phase
            yield f"{phase.value}:"
        if call.waits_for is not None:
            flying.pop(call.waits_for, None)
        name = call.name if call.kind is CallKind.RUN else call.kind.value
        line = f"  {name:<{NAME_WIDTH}} {_text(call, problem.regions[call.region])}"
        if call.kind in (CallKind.RUN, CallKind.RECOMPUTE) and flying:
            line = f"{line:<{TEXT_WIDTH}} | {_in_flight(flying)}"
        yield line.rstrip()
        if call.copy is not None or call.kind is CallKind.ISSUE:
            flying[call.name] = (call.kind, (*call.inputs, *call.outputs)[0])


def _text(call: StepCall, region: RegionProfile) -> str:
    if call.kind is CallKind.WAIT:
        return call.waits_for or ""
    if call.kind is CallKind.COMM_WAIT:
        return f"{call.waits_for} -> {call.outputs[0]}"
    copy = call.copy
    if copy is not None:
        value = call.inputs[0] if call.kind is CallKind.OFFLOAD else call.outputs[0]
        arrow = "->" if call.kind is CallKind.OFFLOAD else "<-"
        part = f"[{copy.start_bytes}:{copy.end_bytes}]" if copy.start_bytes else ""
        host = f"host[{copy.host_offset}:{copy.host_offset + copy.num_bytes}]"
        return f"{value}{part}  {format_bytes(copy.num_bytes)} {arrow} {host}"
    text = f"{_listed(call.inputs)} -> {_listed(call.outputs)}"
    if call.kind is CallKind.ISSUE:
        place = ", in place" if region.outputs[0].storage is Storage.INPUT else ""
        text = f"{call.name}  {call.region}  {text}{place}"
    if call.kind is CallKind.RECOMPUTE:
        text = f"{call.region}  {text}"
    if call.into:
        text += f"  into {_listed([_into_text(target, region) for target in call.into])}"
    return text


def _into_text(into: Into, region: RegionProfile) -> str:
    end = into.offset_bytes + region.buffers[into.buffer].size_bytes
    return f"{into.value}[{into.offset_bytes}:{end}]"


def _listed(values: Sequence[str]) -> str:
    shown = ", ".join(value or "_" for value in values[:MAX_VALUES])
    more = len(values) - MAX_VALUES
    return f"{shown} and {more} more" if more > 0 else shown


def _in_flight(flying: Mapping[str, tuple[CallKind, str]]) -> str:
    """The values that are on their way, by direction."""
    texts = []
    for word, kind in (
        ("out", CallKind.OFFLOAD),
        ("back", CallKind.RELOAD),
        ("among ranks", CallKind.ISSUE),
    ):
        values = [value for flying_kind, value in flying.values() if flying_kind is kind]
        if values:
            texts.append(f"{word} {_listed(values)}")
    return "; ".join(texts)
