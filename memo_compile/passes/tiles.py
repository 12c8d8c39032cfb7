"""Splits a region so that its widest values exist for a few rows at a time.

The peak of a long-context step is often one chain inside one region: the loss head, whose logits
are as wide as the vocabulary, or an MLP. Where every row of the chain depends on the same row of
its inputs only, the chain runs tile by tile: one region, lowered once for ``rows / tiles`` rows
and called ``tiles`` times. Sums over the rows at its end are accumulated.

Rewrite, x [4096, 64], w [64, 32768], 8 tiles:
    logits = mm(x, w)                          # before    acc = full([], 0)
    logp   = log_softmax(logits, 1)            # tile, of rows [512 i, 512 (i + 1)), 8 times:
    picked = gather(logp, 1, labels)     ->    logits = mm(x_i, w)     # [512, 32768]
    total  = sum(picked)                       logp   = log_softmax(logits, 1)
    loss   = mul(total, scale)                 acc    = add(acc, sum(gather(logp, 1, labels_i)))
                                               # after     loss = mul(acc, scale)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from memo_compile.analysis.purity import is_constant, is_write
from memo_compile.analysis.regions import RegionGraph, ViewSpec, view_spec
from memo_compile.analysis.row_rules import RowDim
from memo_compile.analysis.rows import is_row_wise, row_layout, slice_rows
from memo_compile.analysis.structure import op_name
from memo_compile.analysis.views import base_of, is_item, is_tensor, is_view, results_of, storage_of
from memo_compile.passes.extract import Extract, extract
from memo_compile.passes.tile_chains import Chain, chains, transient_bytes
from memo_compile.passes.tile_sums import TileSum, take_sums_out
from memo_compile.step.tilings import Ref, Source

ALIGNMENT_BYTES = 16
"""Of a tile's slices: Inductor's kernels load 16 bytes at once where the whole tensor allows it."""

MIN_SAVING = 1 / 8
"""Of the region's transient bytes: for less, reading the weights once per tile is not worth it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileInput:
    """Where an input of the tile region comes from.

    ``step_bytes`` is None for a value that every tile reads whole. Else tile i reads ``view``,
    starting ``i * step_bytes`` behind the value's first byte, which is its part of ``whole`` in
    dimension ``dim``.
    """

    value: Ref
    view: ViewSpec
    whole: ViewSpec
    dim: int | None = None
    step_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TileOutput:
    """Where an output of the tile region goes: a range of rows.

    Tile i makes bytes ``[i * step_bytes, (i + 1) * step_bytes)`` of a value that looks like
    ``whole``, ``length`` entries of its dimension ``dim``.
    """

    whole: ViewSpec
    dim: int
    length: int
    step_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledRegion:
    """A region in three parts; ``tile`` runs ``num_tiles`` times between the other two.

    ``before`` reads region inputs. ``after`` reads those, what ``before`` made, and the whole
    values of the tiles' outputs. ``outputs`` are the region's, None where it has none.
    """

    num_tiles: int
    num_rows: int
    before: RegionGraph | None
    before_inputs: tuple[int, ...]
    tile: RegionGraph
    tile_inputs: tuple[TileInput, ...]
    tile_outputs: tuple[TileOutput, ...]
    """The tile's first outputs; what it makes behind them only its sums read."""
    sums: tuple[TileSum, ...]
    after: RegionGraph | None
    after_inputs: tuple[Ref, ...]
    outputs: tuple[Ref | None, ...]
    transient_bytes: int
    """Peak of live bytes that are no outputs of the region; see :func:`transient_bytes`."""
    chain: RegionGraph
    """What ``tile`` does, for all rows and without the sums."""
    chain_dims: Mapping[fx.Node, RowDim | None]
    """Where the values of ``chain`` have their rows."""

    def chain_of(self, rows: int) -> RegionGraph:
        """``chain`` for ``rows`` rows."""
        gm = slice_rows(self.chain.gm, self.chain_dims, rows, self.num_rows)
        return replace(self.chain, gm=gm)


def tilings(region: RegionGraph, tiles: int) -> list[TiledRegion]:
    """``region`` with one of its wide chains in tiles, what needs the fewest bytes first.

    Those that save too little are left out. ``tiles`` is lowered to the next number that divides
    the rows. Cost: a few analyses and slicings of the graph.
    """
    graph = region.gm.graph
    if tiles < 2 or any(is_write(node) for node in graph.nodes):
        return []
    limit = transient_bytes(region.gm) * (1 - MIN_SAVING)
    tiled = [_Splitter(region, chain).run() for chain in chains(region, tiles)]
    found = [form for form in tiled if form is not None and form.transient_bytes < limit]
    return sorted(found, key=lambda form: form.transient_bytes)


class _Splitter:
    """Builds the three parts of one chain; ``run`` is None where a result cannot be put in rows."""

    def __init__(self, region: RegionGraph, chain: Chain) -> None:
        self.region = region
        self.chain = chain
        self.dims = chain.dims
        self.nodes = list(region.gm.graph.nodes)
        self.placeholders = region.gm.graph.find_nodes(op="placeholder")
        self.results = results_of(region.gm.graph)
        self.made = [node for node in dict.fromkeys(self.results) if isinstance(node, fx.Node)]
        self.external = region.external_storages()
        self.inside = chain.nodes | chain.sums
        self.behind = self._behind()
        self.rows = chain.num_rows // chain.num_tiles

    def run(self) -> TiledRegion | None:
        late = [node for node in self.made if node in self.behind]
        after = extract(self.region.gm, late, self._ends_after)
        wanted = {*after.inputs, *self.made}
        row_outputs = [
            node
            for node in self.nodes
            if node in self.chain.nodes and node in wanted and not is_view(node)
        ]
        if not all(map(is_tensor, [*after.inputs, *row_outputs])):
            return None  # a tuple that the parts would have to share
        sums = [node for node in self.nodes if node in self.chain.sums]
        outputs = [row for row in map(self._row_output, row_outputs) if row is not None]
        if len(outputs) < len(row_outputs) or not (row_outputs or sums):
            return None
        ends = [*row_outputs, *_inputs_of(sums)]
        part = extract(self.region.gm, ends, self._ends_tile)
        if not all(map(is_tensor, part.inputs)):
            return None
        for node in part.inputs:
            if self._is_copied(node):
                part.made[node].meta["val"] = _dense(node.meta["val"])
        early = self._early([*after.inputs, *map(self._value_of, part.inputs)])
        before = extract(self.region.gm, early, lambda node: node.op == "placeholder")
        zeros = self._finish_before(before, early, sums)
        places = {node: Ref(source=Source.BEFORE, index=at) for at, node in enumerate(early)}
        places |= {
            node: Ref(source=Source.REGION_INPUT, index=at)
            for at, node in enumerate(self.placeholders)
        }
        inputs = [self._tile_input(node, places) for node in part.inputs]
        steps = [given.step_bytes or 0 for given in inputs] + [row.step_bytes for row in outputs]
        if any(step % ALIGNMENT_BYTES for step in steps):
            return None
        part.finish(ends)
        dims = {made: self.dims.get(node) for node, made in part.made.items()}
        tile_gm = self._tile_graph(part, dims, len(row_outputs), sums)
        places |= {node: Ref(source=Source.BEFORE, index=at) for node, at in zeros.items()}
        places |= {node: Ref(source=Source.TILE, index=at) for at, node in enumerate(row_outputs)}
        after.finish(late)
        places |= {node: Ref(source=Source.AFTER, index=at) for at, node in enumerate(late)}
        needed = max(transient_bytes(gm) for gm in (before.gm, tile_gm, after.gm))
        tile = self._tile_region(tile_gm, part)
        return TiledRegion(
            num_tiles=self.chain.num_tiles,
            num_rows=self.chain.num_rows,
            before=self._part("before", before, [*early, *sums]) if early or sums else None,
            before_inputs=tuple(self.placeholders.index(node) for node in before.inputs),
            tile=tile,
            tile_inputs=tuple(inputs),
            tile_outputs=tuple(outputs),
            sums=take_sums_out(tile, len(row_outputs), tuple(zeros.values())),
            after=self._part("after", after, late) if late else None,
            after_inputs=tuple(places[node] for node in after.inputs),
            outputs=tuple(
                places[result] if isinstance(result, fx.Node) else None for result in self.results
            ),
            transient_bytes=needed + self._shared_bytes(early, row_outputs, sums),
            chain=self._tile_region(part.gm, part),
            chain_dims=dims,
        )

    def _behind(self) -> set[fx.Node]:
        """What comes after the chain: depends on it, or is not needed by it and stands behind it.

        Views of the chain's results are behind as well, so that only whole storages leave a tile.
        """
        needed: set[fx.Node] = set()
        for node in reversed(self.nodes):
            if node in self.inside or node in needed:
                needed.update(node.all_input_nodes)
        behind: set[fx.Node] = set()
        started = False
        for node in self.nodes[:-1]:
            started = started or node in self.inside
            if node in self.inside:
                if node in self.chain.nodes and is_view(node):
                    behind.add(node)
                continue
            if is_item(node):  # a tuple never crosses from one part to another
                if node.all_input_nodes[0] in behind:
                    behind.add(node)
                continue
            depends = any(
                source in self.inside or source in behind for source in node.all_input_nodes
            )
            if depends or (started and node not in needed and node.op == "call_function"):
                behind.add(node)
        return behind

    def _ends_after(self, node: fx.Node) -> bool:
        """True for what ``after`` is given; views and constants it makes itself."""
        if node.op == "get_attr" or is_constant(node) or node in self.behind:
            return False
        return not is_view(node) or node.op == "placeholder"

    def _ends_tile(self, node: fx.Node) -> bool:
        """True for what the tile is given; constants and views without rows it makes itself."""
        if node in self.inside or node.op == "get_attr":
            return False
        if is_constant(node):  # positions differ from row to row
            return not is_row_wise(node, self.dims)
        return not is_view(node) or node not in self.dims or self.dims[node] is not None

    def _value_of(self, node: fx.Node) -> fx.Node:
        """The value that a tile's input is read from: its whole storage, where it shows all of it.

        A part of a storage is a value by itself: ``before`` makes a copy of it.
        """
        base = base_of(node)
        return node if is_view(base) else base

    def _is_copied(self, node: fx.Node) -> bool:
        """True for an input of the tile that ``before`` copies, which lies dense then."""
        return is_view(node) and self._value_of(node) is node

    def _early(self, values: Sequence[fx.Node]) -> list[fx.Node]:
        """What ``before`` makes: inputs of the other parts, and results of the region."""
        wanted = {*values, *(node for node in self.made if node not in self.behind)}
        return [
            node
            for node in self.nodes
            if node in wanted and node.op != "placeholder" and node not in self.inside
        ]

    def _row_output(self, node: fx.Node) -> TileOutput | None:
        dim = self.dims[node]
        assert dim is not None, f"{node.name} is in the chain and carries no rows"
        row_bytes = row_layout(node.meta["val"], dim, self.chain.num_rows)
        if row_bytes is None:
            return None
        return TileOutput(
            whole=view_spec(node.meta["val"]),
            dim=dim.dim,
            length=self.rows * dim.factor,
            step_bytes=row_bytes * self.rows,
        )

    def _tile_input(self, node: fx.Node, places: Mapping[fx.Node, Ref]) -> TileInput:
        value = self._value_of(node)
        fake = node.meta["val"]
        if self._is_copied(node):
            fake = _dense(fake)
        spec, dim = view_spec(fake), self.dims.get(node)
        if dim is None:  # read whole, as is what an earlier stage mixed
            return TileInput(value=places[value], view=spec, whole=spec)
        count = self.rows * dim.factor
        size = (*spec.size[: dim.dim], count, *spec.size[dim.dim + 1 :])
        return TileInput(
            value=places[value],
            view=ViewSpec(dtype=spec.dtype, size=size, stride=spec.stride),
            whole=spec,
            dim=dim.dim,
            step_bytes=count * spec.stride[dim.dim] * fake.element_size(),
        )

    def _finish_before(
        self, before: Extract, early: list[fx.Node], sums: list[fx.Node]
    ) -> dict[fx.Node, int]:
        """Give ``before`` its outputs, zeros for every sum last; returns where the zeros are."""
        graph = before.graph
        outputs = []
        for node in early:
            out = before.made[node]
            if is_view(node) and node not in self.made:
                out = _call(graph, torch.ops.aten.clone.default, (out,), _CONTIGUOUS)
            outputs.append(out)
        for node in sums:
            value = node.meta["val"]
            options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
            full = torch.ops.aten.full.default
            outputs.append(_call(graph, full, (list(value.shape), 0), options, like=value))
        graph.output(tuple(outputs))
        return {node: len(early) + at for at, node in enumerate(sums)}

    def _tile_graph(
        self,
        part: Extract,
        dims: Mapping[fx.Node, RowDim | None],
        num_outputs: int,
        sums: list[fx.Node],
    ) -> fx.GraphModule:
        """The chain for the rows of one tile, its sums added to what came before."""
        sources = _inputs_of(sums)
        gm = slice_rows(part.gm, dims, self.rows, self.chain.num_rows)
        graph = gm.graph
        end, ends = graph.output_node(), results_of(graph)
        graph.erase_node(end)
        found = dict(zip(sources, ends[num_outputs:], strict=True))
        line = {node: number for number, node in enumerate(graph.nodes)}
        first = next(node for node in graph.nodes if node.op != "placeholder")
        totals = []
        for at, node in enumerate(sums):
            with graph.inserting_before(first):
                acc = graph.placeholder(f"acc_{at}")
            acc.meta["val"] = node.meta["val"]
            last = max(
                (found[source] for source in node.all_input_nodes), key=lambda source: line[source]
            )
            with graph.inserting_before(last.next):  # so that what it sums dies as early as it can
                totals.append(self._total(graph, node, acc, found))
        graph.output((*ends[:num_outputs], *totals))
        gm.recompile()
        return gm

    def _total(
        self, graph: fx.Graph, node: fx.Node, acc: fx.Node, found: Mapping[fx.Node, Any]
    ) -> fx.Node:
        """``acc`` and the sum over this tile's rows."""
        value = node.meta["val"]
        if node.target in _ACCUMULATING:
            args = (acc, *(found[source] for source in node.all_input_nodes))
            return _call(graph, _ACCUMULATING[node.target], args, like=value)
        partial = graph.node_copy(node, lambda source: found[source])
        alpha = {"alpha": 1 / self.chain.num_tiles} if op_name(node) == "mean" else {}
        return _call(graph, torch.ops.aten.add.Tensor, (acc, partial), alpha, like=value)

    def _tile_region(self, gm: fx.GraphModule, part: Extract) -> RegionGraph:
        static = tuple(
            at
            for at, node in enumerate(part.inputs)
            if self.dims.get(node) is None and self._is_static(node)
        )
        return replace(
            self.region,
            name=f"{self.region.name}.tile",
            gm=gm,
            external_outputs=frozenset(),
            static_inputs=static,
        )

    def _part(self, name: str, part: Extract, outputs: Sequence[fx.Node]) -> RegionGraph:
        external = {at for at, output in enumerate(outputs) if storage_of(output) in self.external}
        return replace(
            self.region,
            name=f"{self.region.name}.{name}",
            gm=part.gm,
            external_outputs=frozenset(external),
            static_inputs=tuple(at for at, node in enumerate(part.inputs) if self._is_static(node)),
        )

    def _is_static(self, node: fx.Node) -> bool:
        return any(self.placeholders[at] is node for at in self.region.static_inputs)

    def _shared_bytes(self, *values: Sequence[fx.Node]) -> int:
        """Of what one part hands to another and the region does not return."""
        kept = {storage_of(node) for node in self.made}
        shared = {node for group in values for node in group if storage_of(node) not in kept}
        return sum(int(node.meta["val"].nbytes) for node in shared)


def _inputs_of(sums: Sequence[fx.Node]) -> list[fx.Node]:
    return list(dict.fromkeys(source for node in sums for source in node.all_input_nodes))


_ACCUMULATING = {
    torch.ops.aten.mm.default: torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default: torch.ops.aten.baddbmm.default,
}
"""Products that contract the rows, and those that add to what the tiles before made."""

_CONTIGUOUS = {"memory_format": torch.contiguous_format}


def _call(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    like: torch.Tensor | None = None,
) -> fx.Node:
    """A new node; its value looks like ``like``, or like its first argument made dense."""
    node = graph.call_function(target, args, kwargs or {})
    node.meta["val"] = _dense(args[0].meta["val"]) if like is None else like
    return node


def _dense(value: torch.Tensor) -> torch.Tensor:
    """A fake of the same shape, contiguous."""
    return value.new_empty(value.shape)
