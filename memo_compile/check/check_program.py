"""The independent check that a step's calls are those of its graphs, tiles included.

A region that runs whole must be one call with the same inputs, outputs and layouts. A region in
tiles must be the calls of its ``Tiling``: ``before`` once, then for every slice of the rows its
tile and what the tile adds to each running sum, then ``after``. Which bytes a tile reads and
writes is computed here from the slices, not taken from the code that made the calls.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from memo_compile.check.check_reads import reads_text
from memo_compile.step.problem import Into, Layout, Problem, StepCall, Storage
from memo_compile.step.tilings import Operand, Ref, Slice, Source, TileRun, Tiling, WholeStep

T = TypeVar("T")


def foreign_calls(whole: WholeStep, problem: Problem) -> tuple[str, ...]:
    """Returns how ``problem``, which moves nothing, differs from ``whole`` first, in words."""
    faults = []
    if problem.halves != whole.halves:
        faults.append("the step is given, or returns, other values than its graphs say")
    calls = iter(problem.calls)
    for call in whole.calls:
        tiling = whole.tilings.get(call.region)
        if tiling is None:
            call_faults = list(_wrong_call(call, next(calls, None)))
        else:
            call_faults = list(_Tiles(call, tiling, problem).run(calls))
        if call_faults:
            return (*faults, *call_faults)
    return (*faults, *(f"{call.name} is no call of the step's graphs" for call in calls))


def _wrong_call(expected: StepCall, call: StepCall | None) -> Iterator[str]:
    """Yields how ``call`` differs from ``expected``."""
    if call is None:
        yield f"{expected.name} is missing"
        return
    yield from _differences(call, expected)
    if call.outputs != expected.outputs:
        yield f"{call.name} makes {call.outputs}, expected {expected.outputs}"


def _differences(call: StepCall, expected: StepCall) -> Iterator[str]:
    """Yields how ``call`` differs from ``expected``, but for names of outputs."""
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
    """Compares the next calls of a step with one call of a region that runs in tiles."""

    def __init__(self, call: StepCall, tiling: Tiling, problem: Problem) -> None:
        self.call = call
        self.tiling = tiling
        self.problem = problem
        self.values: dict[Ref, str] = _refs(Source.REGION_INPUT, call.inputs)
        """The names of the values that parts have made so far, and of the region's inputs."""
        self.layouts: dict[Ref, Layout | None] = _refs(Source.REGION_INPUT, call.reads)
        for source, region in ((Source.BEFORE, tiling.before), (Source.AFTER, tiling.after)):
            if region is not None:
                self.layouts |= _refs(source, problem.regions[region].output_layouts)

    def run(self, calls: Iterator[StepCall]) -> Iterator[str]:
        """Takes calls as long as they are right; yields the faults of the first wrong one."""
        if faults := list(self._wrong_slices()):
            yield from faults
            return
        tiling = self.tiling
        inputs = [Ref(source=Source.REGION_INPUT, index=at) for at in tiling.before_inputs]
        parts = [self._take_part(calls, Source.BEFORE, tiling.before, inputs)]
        for tiles in tiling.runs:
            parts += [self._take_tile(calls, tiles, number) for number in range(tiles.num_tiles)]
        if tiling.after is not None:
            parts.append(self._take_part(calls, Source.AFTER, tiling.after, tiling.after_inputs))
        for part in parts:  # which takes its calls now
            if faults := list(part):
                yield from faults
                return
        outputs = tuple(self.values[ref] for ref in tiling.outputs)
        if outputs != self.call.outputs:
            yield f"the tiles of {self.call.name} make {outputs}, expected {self.call.outputs}"

    def _wrong_slices(self) -> Iterator[str]:
        """Yields faults of the tiling: slices that leave rows out, take rows twice, or differ."""
        tiling, name = self.tiling, self.call.region
        filled = [[rows.whole for rows in tiles.rows] for tiles in tiling.runs]
        totals = [[added.total for added in tiles.sums] for tiles in tiling.runs]
        if any(run != totals[0] for run in totals) or any(run != filled[0] for run in filled):
            yield f"{name}: its tiles fill {filled} and add to {totals}, which must be the same"
            return
        taken = [*filled[0], *set(totals[0])]  # several sums may be added to one total
        if len(set(taken)) != len(taken):
            yield f"{name}: two outputs of its tiles go into one value: {filled[0] + totals[0]}"
        operands_of = [
            [*tiles.inputs, *(term for added in tiles.sums for term in added.terms)]
            for tiles in tiling.runs
        ]
        if any(len(operands) != len(operands_of[0]) for operands in operands_of):
            yield f"{name}: some of its tiles read more than others"
            return
        for operands in zip(*operands_of, strict=True):
            yield from self._wrong_operands(operands)
        for at, whole in enumerate(filled[0]):
            ref = Ref(source=Source.BEFORE, index=whole)
            yield from self._wrong_cover(ref, [tiles.rows[at].slice for tiles in tiling.runs])
            yield from self._wrong_rows(ref, at)
        for ref, layout in zip(tiling.outputs, tiling.output_layouts, strict=True):
            part_layout = self.layouts[ref]
            if _plainly(part_layout) != _plainly(layout):
                yield f"{name}: its parts make {part_layout}, expected {layout}"

    def _wrong_operands(self, operands: tuple[Operand, ...]) -> Iterator[str]:
        """Yields faults of the slices of one value; ``operands`` has its operand in each run."""
        first = operands[0]
        slices = [operand.slice for operand in operands]
        if first.slice is None and len(set(slices)) == 1:  # all tiles read it whole
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
        """Yields a fault unless ``slices``, one of each run, end to end are all of ``value``."""
        whole = whole or self.layouts[value]
        dims: set[int | None] = set()
        end = 0
        text: list[str] = []
        for tiles, part in zip(self.tiling.runs, slices, strict=True):
            if part is None or part.start != end:
                dims.add(None)  # a gap, or no slice at all
                continue
            dims.add(part.dim)
            end += tiles.num_tiles * part.length
            text.append(f"{tiles.num_tiles} tiles of {part.length} rows")
        (dim, *more_dims) = dims
        if more_dims or dim is None or whole is None or end != whole.size[dim]:
            yield f"{self.call.region}: {' and '.join(text)} are not all of {value}, {whole}"

    def _wrong_rows(self, whole: Ref, output: int) -> Iterator[str]:
        """Yields runs whose ``output`` has not the layout of a slice of ``whole``."""
        held = self.layouts[whole]
        for tiles in self.tiling.runs:
            layout = self.problem.regions[tiles.region].output_layouts[output]
            part = tiles.rows[output].slice
            if held is None or _plainly(layout) != _plainly(held.part(part.dim, 0, part.length)):
                yield f"{self.call.region}: a tile makes {layout} of {held}"

    def _take_part(
        self, calls: Iterator[StepCall], source: Source, region: str, refs: Iterable[Ref]
    ) -> Iterator[str]:
        """Takes the next call, which must run ``region`` on the values of ``refs``, as they lie."""
        operands = [Operand(value=ref, whole=self.layouts[ref]) for ref in refs]
        yield from self._compare(next(calls, None), region, 0, operands, (), source)

    def _take_tile(self, calls: Iterator[StepCall], tiles: TileRun, number: int) -> Iterator[str]:
        """Takes the next calls, which must be tile ``number`` of a run, and its running sums."""
        into = self._rows_into(tiles, number)
        call = next(calls, None)
        self.layouts |= _refs(Source.TILE, self.problem.regions[tiles.region].output_layouts)
        faults = list(self._compare(call, tiles.region, number, tiles.inputs, into, Source.TILE))
        yield from faults or self._take_sums(calls, tiles, number)

    def _compare(
        self,
        call: StepCall | None,
        region: str,
        number: int,
        operands: Iterable[Operand],
        into: tuple[Into, ...],
        source: Source | None = None,
    ) -> Iterator[str]:
        """Compares ``call`` with what tile ``number`` must be, but for the names of its outputs.

        Later parts read these as the values of ``source``; None: no part reads them.
        """
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

    def _take_sums(self, calls: Iterator[StepCall], tiles: TileRun, number: int) -> Iterator[str]:
        """Takes the next calls, which must add tile ``number`` to every running sum, once."""
        for running_sum in tiles.sums:
            total = Ref(source=Source.BEFORE, index=running_sum.total)
            operands = (Operand(value=total, whole=self.layouts[total]), *running_sum.terms)
            (output,) = self.problem.regions[running_sum.region].outputs
            buffer = -1 if output.index is None else output.index
            into = (Into(buffer=buffer, value=self.values[total], offset_bytes=0),)
            yield from self._compare(next(calls, None), running_sum.region, number, operands, into)

    def _rows_into(self, tiles: TileRun, number: int) -> tuple[Into, ...]:
        """Returns where tile ``number`` of a run writes its rows."""
        targets = []
        outputs = self.problem.regions[tiles.region].outputs
        for at, rows in enumerate(tiles.rows):
            ref = Ref(source=Source.BEFORE, index=rows.whole)
            whole, output = self.layouts[ref], outputs[at]
            assert whole is not None, f"{ref} was found to be a tensor"
            index = output.index if output.storage is Storage.ARENA else None
            part = _part(whole, rows.slice, number)
            start = part.offset * part.item_bytes
            buffer = -1 if index is None else index  # -1: no call writes it, which is a fault
            targets.append(Into(buffer=buffer, value=self.values[ref], offset_bytes=start))
        return tuple(targets)


def _refs(source: Source, items: Iterable[T]) -> dict[Ref, T]:
    """Returns the items of the list ``source`` by their ``Ref``."""
    return {Ref(source=source, index=at): item for at, item in enumerate(items)}


def _layout(operand: Operand, number: int) -> Layout | None:
    """Returns the layout in which tile ``number`` reads ``operand``."""
    if operand.whole is None or operand.slice is None:
        return operand.whole
    return _part(operand.whole, operand.slice, number)


def _part(whole: Layout, part: Slice, number: int) -> Layout:
    """Returns the layout of slice ``number`` of ``whole``."""
    return whole.part(part.dim, part.start + number * part.length, part.length)


def _plainly(layout: Layout | None) -> Layout | None:
    """Returns ``layout`` without the strides of dimensions of size 1, which mean nothing."""
    if layout is None:
        return None
    pairs = zip(layout.size, layout.stride, strict=True)
    return replace(layout, stride=tuple(0 if size == 1 else step for size, step in pairs))
