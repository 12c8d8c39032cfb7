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
"""How many values of a list are printed; of the others only the number."""


def program_text(problem: Problem) -> str:
    """Returns the calls of ``problem`` in order; equal programs have equal texts."""
    return "\n".join(_lines(problem)) + "\n"


def _lines(problem: Problem) -> Iterator[str]:
    """Yields a line for each call, with the transfers in flight beside computation on its right."""
    if problem.host_bytes:
        yield f"host frame {format_bytes(problem.host_bytes)}"
    phase: Phase | None = None
    in_flight: dict[str, tuple[CallKind, str]] = {}
    for call in problem.calls:
        if call.phase is not phase:
            phase = call.phase
            yield f"{phase.value}:"
        if call.waits_for is not None:
            in_flight.pop(call.waits_for, None)
        name = call.name if call.kind is CallKind.RUN else call.kind.value
        line = f"  {name:<{NAME_WIDTH}} {_text(call, problem.regions[call.region])}"
        if call.kind in (CallKind.RUN, CallKind.RECOMPUTE) and in_flight:
            line = f"{line:<{TEXT_WIDTH}} | {_in_flight(in_flight)}"
        yield line.rstrip()
        if call.copy is not None or call.kind is CallKind.ISSUE:
            in_flight[call.name] = (call.kind, (*call.outputs, *call.inputs)[-1])


def _text(call: StepCall, region: RegionProfile) -> str:
    """Returns what a call reads and makes, or which bytes it copies."""
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
        if call.kind is CallKind.RELOAD and call.inputs:
            host = f"weight {call.inputs[0]}"
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
    num_hidden = len(values) - MAX_VALUES
    return f"{shown} and {num_hidden} more" if num_hidden > 0 else shown


def _in_flight(in_flight: Mapping[str, tuple[CallKind, str]]) -> str:
    """Returns the text of the values that copies and collectives move, by direction."""
    texts = []
    for label, kind in (
        ("out", CallKind.OFFLOAD),
        ("back", CallKind.RELOAD),
        ("among ranks", CallKind.ISSUE),
    ):
        values = [value for flight_kind, value in in_flight.values() if flight_kind is kind]
        if values:
            texts.append(f"{label} {_listed(values)}")
    return "; ".join(texts)
