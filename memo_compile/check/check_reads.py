"""Checks that every call reads tensors as its code expects them, and within the value.

Part of the independent checker; it needs no plan. A read has the dtype, sizes and strides of the
region's input and the dtype that the value's maker gave it, and lies within the value. Copies must
bring all elements: elsewhere in the checker the last bytes of a copy may be missing, because a
buffer's size is rounded up.

From which element a call reads is checked in ``check_program.py``; a recomputation, which is not in
the graphs' program, must read from the first element.
"""

from collections.abc import Iterator
from dataclasses import replace

from memo_compile.step.halves import HalfKey
from memo_compile.step.problem import CallKind, Layout, Layouts, Problem, RegionProfile, StepCall

COPIES = (CallKind.OFFLOAD, CallKind.RELOAD, CallKind.WAIT)


def misread_calls(problem: Problem) -> tuple[str, ...]:
    """Returns the wrong reads of the step's calls, a sentence each."""
    return tuple(_Reads(problem).run())


class _Reads:
    """Follows the layouts of values through the calls of a step."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.given = {(half.phase, half.member): half.given() for half in problem.halves}
        """Half -> the layouts of what autograd gives it, by value."""
        self.held: dict[str, Layout | None] = {}
        """Value -> the layout that its maker gave it; None: no tensor."""
        self.copied: dict[int, str] = {}
        """Host offset -> the value that was copied there last."""
        self.reloaded_from: dict[str, int] = {}
        """RELOADed value -> the first byte of it that the copy writes."""
        self.half: HalfKey | None = None
        """That of the last call that ran a region."""

    def run(self) -> Iterator[str]:
        """Yields the wrong reads of all calls, in order."""
        for call in self.problem.calls:
            if call.kind in COPIES:
                yield from self._copy(call)
            else:
                if call.half != self.half:
                    self.half = call.half
                    self.held.update(self.given.get(self.half, {}))
                yield from self._run_region(call, self.problem.regions[call.region])

    def _copy(self, call: StepCall) -> Iterator[str]:
        """Notes the layout of a copied value; yields a fault unless all elements are copied."""
        if call.reads:
            yield f"{call.name} copies bytes and reads nothing, got {reads_text(call.reads)}"
        if call.copy is None:
            return
        if call.kind is CallKind.OFFLOAD:
            source = self.copied[call.copy.host_offset] = call.inputs[0]
        elif call.inputs:  # of a weight on the host, maybe ahead of its half's first region
            source = call.inputs[0]
            given = self.given.get(call.half, {})
            self.held[call.outputs[0]] = given.get(source, self.held.get(source))
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
        """Yields the gaps between the recomputed and the reloaded part of a value."""
        buffers = (output.index for output in region.outputs)
        layout_of = dict(zip(buffers, region.output_layouts, strict=False))
        for into in call.into:
            layout, start = layout_of.get(into.buffer), self.reloaded_from.get(into.value)
            if layout is None or start is None:
                continue
            end = into.offset_bytes + layout.end * layout.item_bytes
            if end < start:
                yield f"{call.name} leaves bytes [{end}, {start}) of {into.value} unwritten"

    def _run_region(self, call: StepCall, region: RegionProfile) -> Iterator[str]:
        """Yields the wrong reads of a call; notes the layouts that its region makes."""
        if len(call.reads) != len(region.input_layouts):
            yield (
                f"{call.name}: expected {len(region.input_layouts)} reads of {call.region}, "
                f"got {len(call.reads)}"
            )
        else:
            operands = zip(call.inputs, call.reads, region.input_layouts, strict=True)
            for value, read, expected in operands:
                yield from self._read(call, value, read, expected)
        yield from self._gaps(call, region)
        for value in call.outputs:
            self.held.pop(value, None)
        if region.output_layouts:
            self.held.update(zip(call.outputs, region.output_layouts, strict=True))

    def _read(
        self, call: StepCall, value: str, read: Layout | None, expected: Layout | None
    ) -> Iterator[str]:
        """Yields faults of one read, given the region's input and the value's layout."""
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
    """Returns the layouts in which a call reads, as text."""
    return ", ".join(str(layout) for layout in reads)
