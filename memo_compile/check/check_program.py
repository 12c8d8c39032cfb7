"""The independent check that a step's calls are those of its graphs, tiles included.

A call of a region that runs whole must be there as it is: the same values, read alike. A region in
tiles must be there as its ``Tiling`` says: ``before`` once, then for every slice of the rows its
tile and what the tile adds to each running sum, then ``after``. Which bytes a tile reads and
writes is worked out here from the slices, not taken from who made the calls.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from memo_compile.check.check_reads import reads_text
from memo_compile.step.problem import Into, Layout, Problem, StepCall, Storage
from memo_compile.step.tilings import Operand, Ref, Source, Tiling, WholeStep

T = TypeVar("T")


def foreign_calls(whole: WholeStep, problem: Problem) -> tuple[str, ...]:
    """Where ``problem``, which moves nothing, is not ``whole``, up to the first wrong call."""
    found = []
    if problem.halves != whole.halves:
        found.append("the step is given, or returns, other values than its graphs say")
    rest = iter(problem.calls)
    for call in whole.calls:
        tiling = whole.tilings.get(call.region)
        if tiling is None:
            faults = list(_plain(call, next(rest, None)))
        else:
            faults = list(_Tiles(call, tiling, problem).run(rest))
        if faults:
            return (*found, *faults)
    return (*found, *(f"{call.name} is no call of the step's graphs" for call in rest))


def _plain(expected: StepCall, call: StepCall | None) -> Iterator[str]:
    """What ``call`` does otherwise than ``expected``."""
    if call is None:
        yield f"{expected.name} is missing"
        return
    yield from _differences(call, expected)
    if call.outputs != expected.outputs:
        yield f"{call.name} makes {call.outputs}, expected {expected.outputs}"


def _differences(call: StepCall, expected: StepCall) -> Iterator[str]:
    """All but the names of what is made."""
    is_right = (call.region, call.phase) == (expected.region, expected.phase)
    if not is_right or call.kind is not expected.kind:
        yield (
            f"{call.name} is a {call.kind.value} of {call.region} in the {call.phase.value}, where "
            f"{expected.name} must {expected.kind.value} {expected.region} in the "
            f"{expected.phase.value}"
        )
    elif call.member != expected.member:
        yield f"{call.name} is of member {call.member}, expected {expected.member}"
    elif len(call.outputs) != len(expected.outputs):
        yield f"{call.name} makes {len(call.outputs)} values, expected {len(expected.outputs)}"
    if call.inputs != expected.inputs:
        yield f"{call.name} reads {call.inputs}, expected {expected.inputs}"
    if call.reads != expected.reads:
        yield f"{call.name} reads {reads_text(call.reads)}, expected {reads_text(expected.reads)}"
    if call.waits_for != expected.waits_for:
        yield f"{call.name} waits for {call.waits_for}, expected {expected.waits_for}"
    if call.into != expected.into:
        yield f"{call.name} writes {call.into}, expected {expected.into}"


class _Tiles:
    """The calls that stand for one call of a region in tiles, as they must be."""

    def __init__(self, call: StepCall, tiling: Tiling, problem: Problem) -> None:
        self.call = call
        self.tiling = tiling
        self.problem = problem
        self.values: dict[Ref, str] = _refs(Source.REGION_INPUT, call.inputs)
        self.layouts: dict[Ref, Layout | None] = _refs(Source.REGION_INPUT, call.reads)
        parts = {Source.BEFORE: tiling.before, Source.TILE: tiling.tile, Source.AFTER: tiling.after}
        for source, region in parts.items():
            if region is not None:
                self.layouts |= _refs(source, problem.regions[region].output_layouts)

    def run(self, rest: Iterator[StepCall]) -> Iterator[str]:
        """What is wrong, up to the first call that is."""
        if faults := list(self._wrong_slices()):
            yield from faults
            return
        tiling = self.tiling
        inputs = [Ref(source=Source.REGION_INPUT, index=at) for at in tiling.before_inputs]
        calls = [(Source.BEFORE, tiling.before, 0)]
        calls += [(Source.TILE, tiling.tile, number) for number in range(tiling.num_tiles)]
        if tiling.after is not None:
            calls.append((Source.AFTER, tiling.after, 0))
        for source, region, number in calls:
            if source is Source.TILE:
                operands: Sequence[Operand] = tiling.tile_inputs
            else:
                refs = inputs if source is Source.BEFORE else tiling.after_inputs
                operands = [Operand(value=ref, whole=self.layouts[ref]) for ref in refs]
            into = self._rows_into(number) if source is Source.TILE else ()
            faults = list(self._take(next(rest, None), region, number, operands, into, source))
            if source is Source.TILE and not faults:
                faults = list(self._take_sums(rest, number))
            if faults:
                yield from faults
                return
        made = tuple(self.values[ref] for ref in tiling.outputs)
        if made != self.call.outputs:
            yield f"the tiles of {self.call.name} make {made}, expected {self.call.outputs}"

    def _wrong_slices(self) -> Iterator[str]:
        """Slices that leave rows out, take rows twice, or do not fit together."""
        tiling, name = self.tiling, self.call.region
        filled = [rows.whole for rows in tiling.rows] + [added.total for added in tiling.sums]
        if len(set(filled)) != len(filled):
            yield f"{name}: two outputs of its tiles go into one value: {filled}"
        terms = [term for running_sum in tiling.sums for term in running_sum.terms]
        for operand in (*tiling.tile_inputs, *terms):
            held, whole, part = self.layouts[operand.value], operand.whole, operand.slice
            if part is None or held is None or whole is None:
                if part is not None:
                    yield f"{name}: a slice of {operand.value}, which is no tensor"
                continue
            if tiling.num_tiles * part.length != whole.size[part.dim]:
                yield (
                    f"{name}: {tiling.num_tiles} tiles of {part.length} rows of {operand.value}, "
                    f"which has {whole.size[part.dim]}"
                )
            if whole.end > held.end or whole.num_elements < held.num_elements:
                yield f"{name}: {operand.value} is {held}, its tiles read {whole}"
        for at, rows in enumerate(tiling.rows):
            held = self.layouts[Ref(source=Source.BEFORE, index=rows.whole)]
            made = self.layouts[Ref(source=Source.TILE, index=at)]
            part = rows.slice
            if held is None or tiling.num_tiles * part.length != held.size[part.dim]:
                yield f"{name}: {tiling.num_tiles} tiles of {part.length} rows do not fill {held}"
            elif _plainly(made) != _plainly(held.part(part.dim, 0, part.length)):
                yield f"{name}: a tile makes {made} of {held}"
        for ref, layout in zip(tiling.outputs, tiling.output_layouts, strict=True):
            made = self.layouts[ref]
            if _plainly(made) != _plainly(layout):
                yield f"{name}: its parts make {made}, expected {layout}"

    def _take(
        self,
        call: StepCall | None,
        region: str,
        number: int,
        operands: Sequence[Operand],
        into: tuple[Into, ...],
        source: Source | None = None,
    ) -> Iterator[str]:
        """``call`` runs ``region``; with ``source``, what it makes has names from now on."""
        if call is None:
            yield f"tile {number} of {self.call.name}: a call of {region} is missing"
            return
        expected = StepCall(
            name=f"tile {number} of {self.call.name}",
            region=region,
            phase=self.call.phase,
            member=self.call.member,
            inputs=tuple(self.values[operand.value] for operand in operands),
            outputs=("",) * len(self.problem.regions[region].outputs),
            into=into,
            reads=tuple(_layout(operand, number) for operand in operands),
        )
        yield from _differences(call, expected)
        if source is not None:
            self.values |= _refs(source, call.outputs)

    def _take_sums(self, rest: Iterator[StepCall], number: int) -> Iterator[str]:
        """Tile ``number`` is added to every running sum, once."""
        for running_sum in self.tiling.sums:
            total = Ref(source=Source.BEFORE, index=running_sum.total)
            operands = (Operand(value=total, whole=self.layouts[total]), *running_sum.terms)
            (output,) = self.problem.regions[running_sum.region].outputs
            buffer = -1 if output.index is None else output.index
            into = (Into(buffer=buffer, value=self.values[total], offset_bytes=0),)
            yield from self._take(next(rest, None), running_sum.region, number, operands, into)

    def _rows_into(self, number: int) -> tuple[Into, ...]:
        """Where tile ``number`` writes its rows."""
        found = []
        outputs = self.problem.regions[self.tiling.tile].outputs
        for at, rows in enumerate(self.tiling.rows):
            ref = Ref(source=Source.BEFORE, index=rows.whole)
            whole, output = self.layouts[ref], outputs[at]
            assert whole is not None, f"{ref} was found to be a tensor"
            index = output.index if output.storage is Storage.ARENA else None
            part = whole.part(rows.slice.dim, number, rows.slice.length)
            start = part.offset * part.item_bytes
            buffer = -1 if index is None else index
            found.append(Into(buffer=buffer, value=self.values[ref], offset_bytes=start))
        return tuple(found)


def _refs(source: Source, items: Iterable[T]) -> dict[Ref, T]:
    """The items of ``source`` by their place in it."""
    return {Ref(source=source, index=at): item for at, item in enumerate(items)}


def _layout(operand: Operand, number: int) -> Layout | None:
    """What tile ``number`` reads of ``operand``."""
    if operand.whole is None or operand.slice is None:
        return operand.whole
    return operand.whole.part(operand.slice.dim, number, operand.slice.length)


def _plainly(layout: Layout | None) -> Layout | None:
    """Without the strides that nothing is read by; None: no tensor."""
    if layout is None:
        return None
    pairs = zip(layout.size, layout.stride, strict=True)
    return replace(layout, stride=tuple(0 if size == 1 else step for size, step in pairs))
