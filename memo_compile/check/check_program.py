"""The independent check that a step's calls are those of its graphs, tiles included.

A call of a region that runs whole must be there as it is: the same values, read alike. A region in
tiles must be there as its ``Tiling`` says: ``before`` once, then for every slice of the rows its
tile and what the tile adds to each running sum, then ``after``. Which bytes a tile reads and
writes is worked out here from the slices, not taken from who made the calls.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from memo_compile.check.check_reads import reads_text
from memo_compile.step.problem import Into, Layout, Problem, StepCall, Storage
from memo_compile.step.tilings import Operand, Ref, Slice, Source, TileRun, Tiling, WholeStep

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
        for source, region in ((Source.BEFORE, tiling.before), (Source.AFTER, tiling.after)):
            if region is not None:
                self.layouts |= _refs(source, problem.regions[region].output_layouts)

    def run(self, rest: Iterator[StepCall]) -> Iterator[str]:
        """What is wrong, up to the first call that is."""
        if faults := list(self._wrong_slices()):
            yield from faults
            return
        tiling = self.tiling
        inputs = [Ref(source=Source.REGION_INPUT, index=at) for at in tiling.before_inputs]
        steps = [self._take_part(rest, Source.BEFORE, tiling.before, inputs)]
        for tiles in tiling.runs:
            steps += [self._take_tile(rest, tiles, number) for number in range(tiles.num_tiles)]
        if tiling.after is not None:
            steps.append(self._take_part(rest, Source.AFTER, tiling.after, tiling.after_inputs))
        for step in steps:
            if faults := list(step):
                yield from faults
                return
        made = tuple(self.values[ref] for ref in tiling.outputs)
        if made != self.call.outputs:
            yield f"the tiles of {self.call.name} make {made}, expected {self.call.outputs}"

    def _wrong_slices(self) -> Iterator[str]:
        """Slices that leave rows out, take rows twice, or do not fit together."""
        tiling, name = self.tiling, self.call.region
        filled = [[rows.whole for rows in tiles.rows] for tiles in tiling.runs]
        totals = [[added.total for added in tiles.sums] for tiles in tiling.runs]
        if any(run != totals[0] for run in totals) or any(run != filled[0] for run in filled):
            yield f"{name}: its tiles fill {filled} and add to {totals}, which must be the same"
            return
        if len({*filled[0], *totals[0]}) != len(filled[0]) + len(totals[0]):
            yield f"{name}: two outputs of its tiles go into one value: {filled[0] + totals[0]}"
        read = [[*tiles.inputs, *_terms(tiles)] for tiles in tiling.runs]
        if any(len(operands) != len(read[0]) for operands in read):
            yield f"{name}: some of its tiles read more than others"
            return
        for operands in zip(*read, strict=True):
            yield from self._wrong_operands(operands)
        for at, whole in enumerate(filled[0]):
            ref = Ref(source=Source.BEFORE, index=whole)
            yield from self._wrong_cover(ref, [tiles.rows[at].slice for tiles in tiling.runs])
            yield from self._wrong_rows(ref, at)
        for ref, layout in zip(tiling.outputs, tiling.output_layouts, strict=True):
            made = self.layouts[ref]
            if _plainly(made) != _plainly(layout):
                yield f"{name}: its parts make {made}, expected {layout}"

    def _wrong_operands(self, operands: tuple[Operand, ...]) -> Iterator[str]:
        """What is wrong with slices of one value, an operand of each run."""
        first = operands[0]
        slices = [operand.slice for operand in operands]
        if first.slice is None and len(set(slices)) == 1:
            return
        held, whole, value = self.layouts[first.value], first.whole, first.value
        alike = all((operand.value, operand.whole) == (value, whole) for operand in operands)
        if held is None or whole is None or not alike:
            yield f"{self.call.region}: slices of {value}, which is no tensor or read as several"
            return
        yield from self._wrong_cover(value, slices, whole)
        if whole.end > held.end or whole.num_elements < held.num_elements:
            yield f"{self.call.region}: {value} is {held}, its tiles read {whole}"

    def _wrong_cover(
        self, value: Ref, slices: list[Slice | None], whole: Layout | None = None
    ) -> Iterator[str]:
        """``slices`` of the runs, one behind the other, that are not all of ``value``."""
        whole = whole or self.layouts[value]
        dims = {None if part is None else part.dim for part in slices}
        end = 0
        text: list[str] = []
        for tiles, part in zip(self.tiling.runs, slices, strict=True):
            if part is None or part.start != end:
                dims.add(None)
                continue
            end += tiles.num_tiles * part.length
            text.append(f"{tiles.num_tiles} tiles of {part.length} rows")
        (dim, *others) = dims
        if others or dim is None or whole is None or end != whole.size[dim]:
            yield f"{self.call.region}: {' and '.join(text)} are not all of {value}, {whole}"

    def _wrong_rows(self, whole: Ref, output: int) -> Iterator[str]:
        """Runs whose ``output`` does not lie as a slice of ``whole``."""
        held = self.layouts[whole]
        for tiles in self.tiling.runs:
            made = self.problem.regions[tiles.region].output_layouts[output]
            part = tiles.rows[output].slice
            if held is None or _plainly(made) != _plainly(held.part(part.dim, 0, part.length)):
                yield f"{self.call.region}: a tile makes {made} of {held}"

    def _take_part(
        self, rest: Iterator[StepCall], source: Source, region: str, refs: Iterable[Ref]
    ) -> Iterator[str]:
        """The next call runs ``region``, and reads the values of ``refs`` as they lie."""
        operands = [Operand(value=ref, whole=self.layouts[ref]) for ref in refs]
        yield from self._take(next(rest, None), region, 0, operands, (), source)

    def _take_tile(self, rest: Iterator[StepCall], tiles: TileRun, number: int) -> Iterator[str]:
        """The next calls run tile ``number`` of a run, and add it to every running sum, once."""
        into = self._rows_into(tiles, number)
        call = next(rest, None)
        self.layouts |= _refs(Source.TILE, self.problem.regions[tiles.region].output_layouts)
        faults = list(self._take(call, tiles.region, number, tiles.inputs, into, Source.TILE))
        yield from faults or self._take_sums(rest, tiles, number)

    def _take(
        self,
        call: StepCall | None,
        region: str,
        number: int,
        operands: Iterable[Operand],
        into: tuple[Into, ...],
        source: Source | None = None,
    ) -> Iterator[str]:
        """``call`` runs ``region``; with ``source``, what it makes has names from now on."""
        if call is None:
            yield f"tile {number} of {self.call.name}: a call of {region} is missing"
            return
        operands = tuple(operands)
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

    def _take_sums(self, rest: Iterator[StepCall], tiles: TileRun, number: int) -> Iterator[str]:
        """The next calls add tile ``number`` to every running sum, once."""
        for running_sum in tiles.sums:
            total = Ref(source=Source.BEFORE, index=running_sum.total)
            operands = (Operand(value=total, whole=self.layouts[total]), *running_sum.terms)
            (output,) = self.problem.regions[running_sum.region].outputs
            buffer = -1 if output.index is None else output.index
            into = (Into(buffer=buffer, value=self.values[total], offset_bytes=0),)
            yield from self._take(next(rest, None), running_sum.region, number, operands, into)

    def _rows_into(self, tiles: TileRun, number: int) -> tuple[Into, ...]:
        """Where tile ``number`` of a run writes its rows."""
        found = []
        outputs = self.problem.regions[tiles.region].outputs
        for at, rows in enumerate(tiles.rows):
            ref = Ref(source=Source.BEFORE, index=rows.whole)
            whole, output = self.layouts[ref], outputs[at]
            assert whole is not None, f"{ref} was found to be a tensor"
            index = output.index if output.storage is Storage.ARENA else None
            part = _part(whole, rows.slice, number)
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
    return _part(operand.whole, operand.slice, number)


def _part(whole: Layout, part: Slice, number: int) -> Layout:
    """Slice ``number`` of ``whole``."""
    return whole.part(part.dim, part.start + number * part.length, part.length)


def _terms(tiles: TileRun) -> Iterator[Operand]:
    """What the sums of a tile read."""
    for running_sum in tiles.sums:
        yield from running_sum.terms


def _plainly(layout: Layout | None) -> Layout | None:
    """Without the strides that nothing is read by; None: no tensor."""
    if layout is None:
        return None
    pairs = zip(layout.size, layout.stride, strict=True)
    return replace(layout, stride=tuple(0 if size == 1 else step for size, step in pairs))
