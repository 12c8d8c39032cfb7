"""Replaces regions of a cut by their tiled form: before, one tile called for each tile, after.

Rewrite, region R in 4 tiles:
    y = R(x, w)    ->    whole, acc = R.before(x)
                         t0 = R.tile(x[0:r], w)      # rows [0, r) of whole
                         R.sum0(acc, t0)             # acc in place
                         t1 = R.tile(x[r:2r], w)     # and so on
                         y = R.after(whole, acc)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from memo_compile.analysis.regions import RegionGraph
from memo_compile.analysis.tile_chains import transient_bytes
from memo_compile.passes.cut import Cut, CutCall, CutInto
from memo_compile.passes.runner import PassRunner
from memo_compile.passes.tiles import TiledRegion, tilings
from memo_compile.step.problem import CallKind, Layout, Layouts
from memo_compile.step.tilings import Operand, Ref, Source, TileRun


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionTiling:
    """A region in tiles as the step program would run it, to be compared with the whole region."""

    region: RegionGraph
    tiled: TiledRegion
    parts: Mapping[str, RegionGraph]
    calls: tuple[CutCall, ...]
    """Calls of the parts. The region's inputs are the values ``in0``, ``in1`` ..., its outputs
    ``out0`` and so on."""

    @classmethod
    def of(cls, region: RegionGraph, tiled: TiledRegion) -> "RegionTiling":
        """Returns ``region`` as the parts of ``tiled``, with what one call of it becomes."""
        reads, results = region.input_layouts(), region.output_layouts()
        call = CutCall(
            name=f"{region.name}@probe",
            region=region.name,
            position=0,
            inputs=tuple(f"in{at}" for at in range(len(reads))),
            outputs=tuple(f"out{at}" for at in range(len(results))),
            reads=reads,
        )
        calls = _PartCalls(tiled, call).run()
        return cls(region=region, tiled=tiled, parts=tiled.parts, calls=tuple(calls))


Accepts = Callable[[RegionTiling], bool]
"""Returns False for tiles that must not run, and reports the reason itself."""

Dropped = Callable[[str, Exception], None]
"""Called with a sentence on the region that stays whole, and the error that is the reason."""


LARGE_TILE_BYTES = 2**30
"""No tile needs to be larger: its products run as fast as those of the whole region."""

MOST_TILES = 64
"""A region has no more tiles than this on account of its size."""


def tile_cut(
    cut: Cut,
    tiles: int,
    runner: PassRunner,
    accepts: Accepts,
    dropped: Dropped,
    *,
    above_bytes: int = 0,
    by_heads: bool = False,
) -> Cut:
    """Returns ``cut`` with its wide regions in ``tiles`` tiles, very large ones in more.

    Those are tiles of tokens; with ``by_heads`` of heads where that leaves fewer bytes.

    A region stays whole if its transients are not above ``above_bytes``, if tiles save too little,
    if it prints, writes into its inputs or returns one value twice, if ``accepts`` refuses all of
    its tilings, and if tiling raises: ``dropped`` gets the error.
    """
    if tiles < 2:
        return cut
    tiled_of: dict[str, TiledRegion] = {}
    for name, region in cut.regions.items():
        if region.kind is not CallKind.RUN:
            continue
        region_bytes = transient_bytes(region.gm)
        if above_bytes and region_bytes <= above_bytes:
            continue
        try:
            tiled = _best(region, tiles_of(tiles, region_bytes), accepts, runner, by_heads=by_heads)
        except Exception as error:  # tiles are a possibility: without them the region runs whole
            dropped(f"region {name} is not run in tiles", error)
            continue
        if tiled is not None:
            tiled_of[name] = tiled
    regions: dict[str, RegionGraph] = {}
    for name, region in cut.regions.items():
        regions.update(tiled_of[name].parts if name in tiled_of else {name: region})
    calls: list[CutCall] = []
    for call in cut.calls:
        tiled = tiled_of.get(call.region)
        calls.extend([call] if tiled is None else _PartCalls(tiled, call).run())
    return replace(
        cut,
        regions=regions,
        calls=tuple(calls),
        whole_calls=cut.calls,
        tilings={name: tiled.tiling for name, tiled in tiled_of.items()},
        whole_regions={name: cut.regions[name] for name in tiled_of},
    )


def tiles_of(tiles: int, region_bytes: int) -> int:
    """Returns in how many tiles a region with transients of ``region_bytes`` runs.

    For example the loss head of 262,144 tokens and 128,256 words, with 180 GiB of logits and their
    gradients, runs in 64 tiles of less than 3 GiB where layers run in 8.
    """
    while tiles < MOST_TILES and region_bytes > tiles * LARGE_TILE_BYTES:
        tiles *= 2
    return tiles


def _best(
    region: RegionGraph, tiles: int, accepts: Accepts, runner: PassRunner, *, by_heads: bool
) -> TiledRegion | None:
    """Returns the first tiling of ``region`` that is accepted, which needs the fewest bytes."""

    def best() -> TiledRegion | None:
        forms = tilings(region, tiles, by_heads=by_heads)
        return next((form for form in forms if accepts(RegionTiling.of(region, form))), None)

    return runner.derive(
        "tile",
        region.gm,
        best,
        stage=region.name,
        graphs=lambda tiled: {name: part.gm for name, part in tiled.parts.items()} if tiled else {},
    )


class _PartCalls:
    """Makes the calls of a region's parts that replace ``call``, with the names of its values."""

    def __init__(self, tiled: TiledRegion, call: CutCall) -> None:
        self.tiled = tiled
        self.call = call
        self.outputs = dict(zip(tiled.tiling.outputs, call.outputs, strict=True))
        """Output of a part that is one of the region -> its name in ``call``."""
        self.values: dict[Ref, str] = {}
        """What parts read or write -> its name; ``layouts`` says how it lies."""
        self.layouts: dict[Ref, Layout | None] = {}
        self._add_values(Source.REGION_INPUT, call.inputs, call.reads)

    def run(self) -> Iterator[CutCall]:
        """Yields the calls in order: before, each tile with its additions to sums, after."""
        tiling = self.tiled.tiling
        inputs = [Ref(source=Source.REGION_INPUT, index=at) for at in tiling.before_inputs]
        yield self._call("before", tiling.before, self._whole_operands(inputs), makes=Source.BEFORE)
        tiles = [(run, number) for run in tiling.runs for number in range(run.num_tiles)]
        for at, (run, number) in enumerate(tiles):
            yield from self._tile(f"tile{at}", run, number)
        if tiling.after is not None:
            operands = self._whole_operands(tiling.after_inputs)
            yield self._call("after", tiling.after, operands, makes=Source.AFTER)

    def _tile(self, suffix: str, run: TileRun, number: int) -> Iterator[CutCall]:
        """Yields the calls of tile ``number`` of a run."""
        into = tuple(self._rows_into(run, number))
        yield self._call(suffix, run.region, run.inputs, number, into, makes=Source.TILE)
        for at, running_sum in enumerate(run.sums):
            total = Ref(source=Source.BEFORE, index=running_sum.total)
            operands = [*self._whole_operands([total]), *running_sum.terms]
            into = (CutInto(output=0, value=self.values[total], offset_bytes=0),)
            yield self._call(f"{suffix}.sum{at}", running_sum.region, operands, number, into)

    def _call(
        self,
        suffix: str,
        region: str,
        operands: Sequence[Operand],
        number: int = 0,
        into: tuple[CutInto, ...] = (),
        *,
        makes: Source | None = None,
    ) -> CutCall:
        """Returns a call of ``region`` for tile ``number``; notes its outputs as of ``makes``."""
        name = f"{self.call.name}.{suffix}"
        layouts = self.tiled.parts[region].output_layouts()
        outputs = tuple(f"{name}:{at}" for at in range(len(layouts)))
        if makes is not None:
            outputs = tuple(
                self.outputs.get(Ref(source=makes, index=at), output)
                for at, output in enumerate(outputs)
            )
            self._add_values(makes, outputs, layouts)
        return CutCall(
            name=name,
            region=region,
            position=self.call.position,
            inputs=tuple(self.values[operand.value] for operand in operands),
            outputs=outputs,
            reads=tuple(_tile_layout(operand, number) for operand in operands),
            into=into,
        )

    def _add_values(self, source: Source, values: Sequence[str], layouts: Layouts) -> None:
        """Notes names and layouts of the values that ``source`` makes."""
        for at, (value, layout) in enumerate(zip(values, layouts, strict=True)):
            ref = Ref(source=source, index=at)
            self.values[ref], self.layouts[ref] = value, layout

    def _whole_operands(self, refs: Sequence[Ref]) -> list[Operand]:
        return [Operand(value=ref, whole=self.layouts[ref]) for ref in refs]

    def _rows_into(self, run: TileRun, number: int) -> Iterator[CutInto]:
        """Yields where the outputs of tile ``number`` of a run lie."""
        for output, rows in enumerate(run.rows):
            whole = Ref(source=Source.BEFORE, index=rows.whole)
            part = _tile_layout(
                Operand(value=whole, whole=self.layouts[whole], slice=rows.slice), number
            )
            assert part is not None, f"{whole} is a tensor"
            offset_bytes = part.offset * part.item_bytes
            yield CutInto(output=output, value=self.values[whole], offset_bytes=offset_bytes)


def _tile_layout(operand: Operand, number: int) -> Layout | None:
    """Returns the layout in which tile ``number`` reads, or writes, ``operand``."""
    if operand.whole is None or operand.slice is None:
        return operand.whole
    part = operand.slice
    return operand.whole.part(part.dim, part.start + number * part.length, part.length)
