"""Replaces regions of a cut by their tiled form: before, one tile called for each tile, after.

Rewrite, region R in 4 tiles:
    y = R(x, w)    ->    whole, acc = R.before(x)
                         t0 = R.tile(x[0:r], w)      # rows [0, r) of whole
                         R.sum0(acc, t0)             # acc in place
                         t1 = R.tile(x[r:2r], w)     # and so on
                         y = R.after(whole, acc)
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from memo_compile.analysis.regions import RegionGraph, ViewSpec
from memo_compile.analysis.views import results_of
from memo_compile.passes.cut import Cut, CutCall, CutInto
from memo_compile.passes.runner import PassRunner
from memo_compile.passes.tile_chains import transient_bytes
from memo_compile.passes.tile_sums import Term
from memo_compile.passes.tiles import TiledRegion, TileInput, tilings
from memo_compile.step.problem import Layout
from memo_compile.step.tilings import Operand, Ref, Rows, RunningSum, Slice, Source, Tiling


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionTiling:
    """A region in tiles as the step program would run it, for whoever checks it."""

    region: RegionGraph
    tiled: TiledRegion
    parts: Mapping[str, RegionGraph]
    calls: tuple[CutCall, ...]
    """Of the parts; the region's inputs are the values ``in0``, ``in1`` ..., its outputs ``out0``
    and so on."""


Accepts = Callable[[RegionTiling], bool]
"""False for tiles that must not run; the one who answers says why."""

Dropped = Callable[[str, Exception], None]
"""Told what is left whole, and the error for which it is."""


def tile_cut(
    cut: Cut,
    tiles: int,
    runner: PassRunner,
    accepts: Accepts,
    dropped: Dropped,
    *,
    above_bytes: int = 0,
) -> Cut:
    """``cut`` with every region whose widest chain pays in ``tiles`` tiles, in parts.

    A region whose transients are not above ``above_bytes``, that saves too little, writes into its
    inputs, or returns one value twice stays; so does one none of whose tilings ``accepts`` lets
    through, and one for which an operator is not what the analysis takes it for: ``dropped`` is
    told of the error.
    """
    if tiles < 2:
        return cut
    split = {}
    for name, region in cut.regions.items():
        if above_bytes and transient_bytes(region.gm) <= above_bytes:
            continue
        try:
            found = _split(name, region, tiles, accepts, runner)
        except Exception as error:  # tiles are a possibility: without them the region runs whole
            dropped(f"region {name} is not run in tiles", error)
            continue
        if found is not None:
            split[name] = found
    regions: dict[str, RegionGraph] = {}
    for name, region in cut.regions.items():
        parts = split[name].parts() if name in split else [(name, region)]
        regions.update((key, replace(part, name=key)) for key, part in parts)
    calls: list[CutCall] = []
    for call in cut.calls:
        calls.extend(split[call.region].calls(call) if call.region in split else (call,))
    return replace(
        cut,
        regions=regions,
        calls=tuple(calls),
        whole_calls=cut.calls,
        tilings={name: parts.claim(cut.regions[name]) for name, parts in split.items()},
        whole_regions={name: cut.regions[name] for name in split},
    )


def _split(
    name: str, region: RegionGraph, tiles: int, accepts: Accepts, runner: PassRunner
) -> "_Split | None":
    """The best tiling of ``region`` that is accepted."""

    def best() -> "_Split | None":
        plain = (tiled for tiled in tilings(region, tiles) if _is_plain(tiled))
        splits = (_Split.of(name, region, tiled) for tiled in plain)
        return next((split for split in splits if accepts(split.tiling(region))), None)

    return runner.derive(
        "tile",
        region.gm,
        best,
        stage=name,
        graphs=lambda split: {part: made.gm for part, made in split.parts()} if split else {},
    )


def _is_plain(tiled: TiledRegion) -> bool:
    """True when every output of the region is a value of its own that one of the parts makes."""
    refs = tiled.outputs
    made = all(ref is not None and ref.source is not Source.REGION_INPUT for ref in refs)
    dense = all(_is_contiguous(output.whole) for output in tiled.tile_outputs)
    return made and dense and len(set(refs)) == len(refs)


def _is_contiguous(spec: ViewSpec) -> bool:
    """True when zeros of that size have these strides."""
    step = 1
    for size, stride in zip(reversed(spec.size), reversed(spec.stride), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """A tiled region whose ``before`` also makes the whole tensors that the tiles fill."""

    name: str
    tiled: TiledRegion
    before: RegionGraph
    first_whole: int
    """Output of ``before`` that the tile's first output fills; those behind it follow."""

    @staticmethod
    def of(name: str, region: RegionGraph, tiled: TiledRegion) -> "_Split":
        before = tiled.before or _empty_region(region)
        like = region.gm.graph.find_nodes(op="placeholder")[0].meta["val"]
        first = _add_zeros(before.gm, [output.whole for output in tiled.tile_outputs], like)
        return _Split(name=name, tiled=tiled, before=before, first_whole=first)

    def parts(self) -> Iterator[tuple[str, RegionGraph]]:
        """The regions by name."""
        yield f"{self.name}.before", self.before
        yield f"{self.name}.tile", self.tiled.tile
        for number, running_sum in enumerate(self.tiled.sums):
            yield f"{self.name}.sum{number}", running_sum.region
        if self.tiled.after is not None:
            yield f"{self.name}.after", self.tiled.after

    def tiling(self, region: RegionGraph) -> RegionTiling:
        """One call of ``region`` by its parts."""
        call = CutCall(
            name=f"{self.name}@probe",
            region=self.name,
            position=0,
            inputs=tuple(f"in{at}" for at in range(len(region.example_inputs()))),
            outputs=tuple(f"out{at}" for at in range(_num_outputs(region))),
            reads=region.input_layouts(),
        )
        return RegionTiling(
            region=region,
            tiled=self.tiled,
            parts=dict(self.parts()),
            calls=tuple(self.calls(call)),
        )

    def claim(self, region: RegionGraph) -> Tiling:
        """What the calls of a tiled ``region`` must do, for the checker."""
        tiled = self.tiled
        return Tiling(
            num_tiles=tiled.num_tiles,
            before=f"{self.name}.before",
            before_inputs=tiled.before_inputs,
            tile=f"{self.name}.tile",
            tile_inputs=tuple(map(self._operand, tiled.tile_inputs)),
            rows=tuple(
                Rows(whole=whole, slice=Slice(dim=output.dim, length=output.length))
                for whole, output in enumerate(tiled.tile_outputs, start=self.first_whole)
            ),
            sums=tuple(
                RunningSum(
                    region=f"{self.name}.sum{number}",
                    total=running_sum.total,
                    terms=tuple(map(self._term_operand, running_sum.terms)),
                )
                for number, running_sum in enumerate(tiled.sums)
            ),
            after=None if tiled.after is None else f"{self.name}.after",
            after_inputs=tuple(map(self.made, tiled.after_inputs)),
            outputs=tuple(self.made(ref) for ref in tiled.outputs if ref is not None),
            output_layouts=region.output_layouts(),
        )

    def _operand(self, tile_input: TileInput) -> Operand:
        dim, whole = tile_input.dim, tile_input.whole.layout()
        part = None if dim is None else Slice(dim=dim, length=tile_input.view.size[dim])
        return Operand(value=self.made(tile_input.value), whole=whole, slice=part)

    def _term_operand(self, term: Term) -> Operand:
        if term.is_input:
            return self._operand(self.tiled.tile_inputs[term.index])
        made = self.tiled.tile.output_layouts()[term.index]
        return Operand(value=Ref(source=Source.TILE, index=term.index), whole=made)

    def made(self, ref: Ref) -> Ref:
        """What holds ``ref`` when the tiles have run: for their outputs, what they fill."""
        if ref.source is not Source.TILE:
            return ref
        return Ref(source=Source.BEFORE, index=self.first_whole + ref.index)

    def calls(self, call: CutCall) -> Iterator[CutCall]:
        """The calls that do what ``call`` did, with the same values where it had any."""
        names = _Names(self, call)
        yield CutCall(
            name=f"{call.name}.before",
            region=f"{self.name}.before",
            position=call.position,
            inputs=tuple(call.inputs[at] for at in self.tiled.before_inputs),
            outputs=tuple(names.before(at) for at in range(_num_outputs(self.before))),
            reads=tuple(call.reads[at] for at in self.tiled.before_inputs),
        )
        for number in range(self.tiled.num_tiles):
            yield self._tile_call(call, names, number)
            yield from self._sum_calls(call, names, number)
        if self.tiled.after is not None:
            refs = self.tiled.after_inputs
            yield CutCall(
                name=f"{call.name}.after",
                region=f"{self.name}.after",
                position=call.position,
                inputs=tuple(names.value(ref) for ref in refs),
                outputs=tuple(names.after(at) for at in range(_num_outputs(self.tiled.after))),
                reads=tuple(self._whole(call, ref) for ref in refs),
            )

    def _tile_call(self, call: CutCall, names: "_Names", number: int) -> CutCall:
        inputs = self.tiled.tile_inputs
        return CutCall(
            name=f"{call.name}.tile{number}",
            region=f"{self.name}.tile",
            position=call.position,
            inputs=tuple(names.value(tile_input.value) for tile_input in inputs),
            outputs=tuple(names.tile(number, at) for at in range(_num_outputs(self.tiled.tile))),
            reads=tuple(_slice(tile_input, number) for tile_input in inputs),
            into=tuple(
                CutInto(
                    output=at,
                    value=names.before(self.first_whole + at),
                    offset_bytes=number * output.step_bytes,
                )
                for at, output in enumerate(self.tiled.tile_outputs)
            ),
        )

    def _sum_calls(self, call: CutCall, names: "_Names", number: int) -> Iterator[CutCall]:
        """What tile ``number`` adds to the running sums."""
        for at, running_sum in enumerate(self.tiled.sums):
            total = names.before(running_sum.total)
            terms = [self._term(term, names, number) for term in running_sum.terms]
            values = [total, *(value for value, _ in terms)]
            name = f"{call.name}.tile{number}.sum{at}"
            yield CutCall(
                name=name,
                region=f"{self.name}.sum{at}",
                position=call.position,
                inputs=tuple(values),
                outputs=(f"{name}:0",),
                reads=(
                    self.before.output_layouts()[running_sum.total],
                    *(read for _, read in terms),
                ),
                into=(CutInto(output=0, value=total, offset_bytes=0),),
            )

    def _whole(self, call: CutCall, ref: Ref) -> Layout | None:
        """How what ``ref`` stands for lies, an output of the tiles being the whole."""
        if ref.source is Source.REGION_INPUT:
            return call.reads[ref.index]
        return self.before.output_layouts()[self.made(ref).index]

    def _term(self, term: Term, names: "_Names", number: int) -> tuple[str, Layout | None]:
        """The value that a sum reads, and as what."""
        if term.is_input:
            given = self.tiled.tile_inputs[term.index]
            return names.value(given.value), _slice(given, number)
        return names.tile(number, term.index), self.tiled.tile.output_layouts()[term.index]


class _Names:
    """The values of one call's parts: the call's own names where its outputs are meant."""

    def __init__(self, split: _Split, call: CutCall) -> None:
        self.split = split
        self.call = call
        outputs = zip(split.tiled.outputs, call.outputs, strict=True)
        self.known = {split.made(ref): value for ref, value in outputs if ref is not None}

    def before(self, index: int) -> str:
        """Output ``index`` of the part before the tiles."""
        ref = Ref(source=Source.BEFORE, index=index)
        return self.known.get(ref, f"{self.call.name}.before:{index}")

    def tile(self, number: int, index: int) -> str:
        """Output ``index`` of tile ``number``."""
        return f"{self.call.name}.tile{number}:{index}"

    def after(self, index: int) -> str:
        """Output ``index`` of the part after the tiles."""
        ref = Ref(source=Source.AFTER, index=index)
        return self.known.get(ref, f"{self.call.name}.after:{index}")

    def value(self, ref: Ref) -> str:
        """What ``ref`` stands for, an output of the tiles being the whole that they fill."""
        if ref.source is Source.REGION_INPUT:
            return self.call.inputs[ref.index]
        if ref.source is Source.AFTER:
            return self.after(ref.index)
        return self.before(self.split.made(ref).index)


def _slice(tile_input: TileInput, number: int) -> Layout:
    """What tile ``number`` reads of an input's value."""
    offset = number * (tile_input.step_bytes or 0) // tile_input.view.dtype.itemsize
    return replace(tile_input.view.layout(), offset=offset)


def _num_outputs(region: RegionGraph) -> int:
    return len(results_of(region.gm.graph))


def _empty_region(region: RegionGraph) -> RegionGraph:
    """A region that makes nothing yet."""
    graph = fx.Graph()
    graph.output(())
    gm = fx.GraphModule(region.gm, graph)
    return replace(region, gm=gm, external_outputs=frozenset(), static_inputs=())


def _add_zeros(gm: fx.GraphModule, specs: list[ViewSpec], like: torch.Tensor) -> int:
    """``gm`` returns zeros for each of ``specs`` too; the first one's position.

    ``like`` is a fake tensor of the same device; what is made is fake as it is.
    """
    graph = gm.graph
    end, results = graph.output_node(), results_of(graph)
    made = []
    for spec in specs:
        with graph.inserting_before(end):
            node = graph.call_function(
                torch.ops.aten.full.default,
                (list(spec.size), 0),
                {"dtype": spec.dtype, "device": like.device, "pin_memory": False},
            )
        node.meta["val"] = like.new_empty(spec.size, dtype=spec.dtype)
        made.append(node)
    end.args = ((*results, *made),)
    gm.recompile()
    return len(results)
