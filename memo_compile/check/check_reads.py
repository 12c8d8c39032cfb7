"""What a step's calls read: that it is what the code was made for, and that it is there.

Part of the independent checker; it needs no plan. A read looks like the region's input (type, size,
strides), is of the type that the value's maker left, and lies within it. A buffer's size is rounded
up, so that the last bytes of a copy may be missing elsewhere in the checker; here it is known which
of them hold numbers, and those are copied.

From which element a call reads is the program's to say (``check_program.py``). A recomputation is
no part of that: it reads from the first element.
"""

from collections.abc import Iterator
from dataclasses import replace

from memo_compile.step.halves import HalfKey
from memo_compile.step.problem import (
    CallKind,
    Layout,
    Layouts,
    Problem,
    RegionProfile,
    StepCall,
)

COPIES = (CallKind.OFFLOAD, CallKind.RELOAD, CallKind.WAIT)


def misread_calls(problem: Problem) -> tuple[str, ...]:
    """What calls read that they must not, in words."""
    return tuple(_Reads(problem).run())


class _Reads:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.given = {(half.phase, half.member): half.given() for half in problem.halves}
        self.held: dict[str, Layout | None] = {}
        """Value -> how its maker left it; None for what is no tensor."""
        self.copied: dict[int, str] = {}
        """Host offset -> the value that was copied there last."""
        self.reloaded_from: dict[str, int] = {}
        """RELOADed value -> the first byte of it that the copy brings."""
        self.half: HalfKey | None = None

    def run(self) -> Iterator[str]:
        for call in self.problem.calls:
            if call.kind in COPIES:
                yield from self._copy(call)
            else:
                if (call.phase, call.member) != self.half:
                    self.half = (call.phase, call.member)
                    self.held.update(self.given.get(self.half, {}))
                yield from self._run(call, self.problem.regions[call.region])

    def _copy(self, call: StepCall) -> Iterator[str]:
        if call.reads:
            yield f"{call.name} copies bytes and reads nothing, got {reads_text(call.reads)}"
        if call.copy is None:
            return
        if call.kind is CallKind.OFFLOAD:
            source = self.copied[call.copy.host_offset] = call.inputs[0]
        else:
            source = self.copied.get(call.copy.host_offset, "")
            self.reloaded_from[call.outputs[0]] = call.copy.start_bytes
            if source in self.held:
                self.held[call.outputs[0]] = self.held[source]
        held = self.held.get(source)
        if held is not None and call.copy.end_bytes < held.end * held.item_bytes:
            yield (
                f"{call.name} copies to byte {call.copy.end_bytes} of {source}, which has "
                f"{held.end * held.item_bytes}"
            )

    def _gaps(self, call: StepCall, region: RegionProfile) -> Iterator[str]:
        """Bytes between what is recomputed and what is reloaded, which only rounding up covers."""
        buffers = (output.index for output in region.outputs)
        made = dict(zip(buffers, region.output_layouts, strict=False))
        for into in call.into:
            layout, start = made.get(into.buffer), self.reloaded_from.get(into.value)
            if layout is None or start is None:
                continue
            end = into.offset_bytes + layout.end * layout.item_bytes
            if end < start:
                yield f"{call.name} leaves bytes [{end}, {start}) of {into.value} unwritten"

    def _run(self, call: StepCall, region: RegionProfile) -> Iterator[str]:
        if len(call.reads) != len(region.input_layouts):
            yield (
                f"{call.name}: expected {len(region.input_layouts)} reads of {call.region}, "
                f"got {len(call.reads)}"
            )
        else:
            taken = zip(call.inputs, call.reads, region.input_layouts, strict=True)
            for value, read, expected in taken:
                yield from self._read(call, value, read, expected)
        yield from self._gaps(call, region)
        for value in call.outputs:
            self.held.pop(value, None)
        if region.output_layouts:
            self.held.update(zip(call.outputs, region.output_layouts, strict=True))

    def _read(
        self, call: StepCall, value: str, read: Layout | None, expected: Layout | None
    ) -> Iterator[str]:
        if read is None or expected is None:
            if read is not expected:
                yield f"{call.name} reads {value} as {read}, {call.region} takes {expected}"
            return
        if replace(read, offset=expected.offset) != expected:
            yield f"{call.name} reads {value} as {read}, {call.region} takes {expected}"
        if call.kind is CallKind.RECOMPUTE and read.offset:
            yield f"{call.name} reads {value} from element {read.offset}, expected its first rows"
        if value not in self.held:
            return
        held = self.held[value]
        if held is None or (held.dtype, held.item_bytes) != (read.dtype, read.item_bytes):
            yield f"{call.name} reads {value} as {read}, which is {held}"
        elif read.offset < 0 or read.end > held.end:
            yield (
                f"{call.name} reads elements [{read.offset}, {read.end}) of {value}, which has "
                f"{held.end}"
            )


def reads_text(reads: Layouts) -> str:
    """What a call reads, in words."""
    return ", ".join(str(layout) for layout in reads)
