"""Splits a region so that its widest values exist for a few rows at a time.

The peak of a long-context step is often one chain inside one region: the loss head, whose logits
are as wide as the vocabulary, or an MLP. Where every row of the chain depends on the same row of
its inputs only, the chain runs tile by tile: one region, lowered once for ``rows / tiles`` rows
and called ``tiles`` times. Sums over the rows at its end are accumulated, those of 16-bit numbers
in float32 (``passes/tile_sums.py``).

Rewrite, x [4096, 64], w [64, 32768], 8 tiles:
    logits = mm(x, w)                          # before    acc = full([], 0)
    logp   = log_softmax(logits, 1)            # tile, of rows [512 i, 512 (i + 1)), 8 times:
    picked = gather(logp, 1, labels)     ->    logits = mm(x_i, w)     # [512, 32768]
    total  = sum(picked)                       logp   = log_softmax(logits, 1)
    loss   = mul(total, scale)                 acc    = add(acc, sum(gather(logp, 1, labels_i)))
                                               # after     loss = mul(acc, scale)
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import fx

from memo_compile.analysis.purity import has_effect, is_check, is_collective, is_constant, is_wait
from memo_compile.analysis.regions import RegionGraph, layout_of
from memo_compile.analysis.row_rules import RowDim
from memo_compile.analysis.rows import is_row_wise, row_layout
from memo_compile.analysis.tile_chains import Chain, chains, head_chains, transient_bytes
from memo_compile.analysis.views import (
    base_of,
    bytes_of,
    is_item,
    is_tensor,
    is_view,
    makers_of,
    results_of,
    shape_of,
    storage_of,
)
from memo_compile.passes.extract import Extract, call_like, extract
from memo_compile.passes.slice_rows import slice_rows
from memo_compile.passes.tile_sums import Totals, is_short_product, take_sums_out
from memo_compile.step.tilings import Operand, Ref, Rows, Slice, Source, TileRun, Tiling

ALIGNMENT_BYTES = 16
"""A tile's slices begin at multiples of this: Inductor's kernels load so many bytes at once."""

MIN_SAVING = 1 / 8
"""Tiles must save this share of a region's transient bytes, since each reads the weights again."""

FEW_SAVING = 1 / 4
"""If tiles with sums in float32 save less, two tiles that add products up in 16 bits are tried, as
the sums may be most of the bytes. Two tiles round a sum once more than the whole region does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledRegion:
    """A region in parts: before, the tile, an addition to each running sum, after."""

    parts: Mapping[str, RegionGraph]
    """Parts by name, in that order. The first also allocates values that tiles fill, and totals."""
    tiling: Tiling
    """The calls of the parts that make up the region."""
    num_rows: int
    transient_bytes: int
    """Peak of live bytes but for outputs of the region; see :func:`transient_bytes`."""
    chain: RegionGraph
    """The part ``tile`` for all rows and without the sums."""
    chain_dims: Mapping[fx.Node, RowDim | None]
    """The dimensions of rows in ``chain``."""

    def chain_of(self, rows: int) -> RegionGraph:
        """Returns ``chain`` for ``rows`` rows."""
        gm = slice_rows(self.chain.gm, self.chain_dims, rows, self.num_rows)
        return replace(self.chain, gm=gm)


def tilings(region: RegionGraph, tiles: int, *, by_heads: bool = False) -> list[TiledRegion]:
    """Returns ``region`` with one of its wide chains in tiles, fewest transient bytes first.

    With ``by_heads`` its attention runs in tiles of heads instead, if that saves bytes of the
    chain. Those of the region do not count: kernels of attention take memory that no graph shows.

    Tilings that save too little are left out. There are none for a region with an effect (it
    prints, or writes into its inputs), or with an output that is an input or comes twice. Checks
    run once, before the tiles or behind them. If ``tiles`` does not divide the rows there may be
    fewer tiles, or a shorter last one. Cost: a few analyses and slicings of the graph.
    """
    graph, results = region.gm.graph, results_of(region.gm.graph)
    collectives = [node for node in graph.nodes if is_collective(node) and not is_wait(node)]
    is_plain = (
        all(isinstance(node, fx.Node) and node.op != "placeholder" for node in results)
        and len(set(results)) == len(results)
        and len(collectives) < 2  # their order is that of ranks which have no tiles
        and all(is_check(node) or not has_effect(node) for node in graph.nodes)
    )
    if tiles < 2 or not is_plain:
        return []
    whole_bytes = transient_bytes(region.gm)
    if by_heads:
        of_heads = [_Splitter(region, chain).run() for chain in head_chains(region, tiles)]
        if saving := [form for form in of_heads if form is not None and _saves_in_chain(form)]:
            return sorted(saving, key=lambda form: form.transient_bytes)
    forms = [_Splitter(region, chain).run() for chain in chains(region, tiles)]
    tiled = [form for form in forms if form is not None]
    saves_little = all(form.transient_bytes > whole_bytes * (1 - FEW_SAVING) for form in tiled)
    if saves_little and any(map(is_short_product, graph.nodes)):
        forms = [_Splitter(region, chain, widens=False).run() for chain in chains(region, 2)]
        tiled += [form for form in forms if form is not None]
    saving = [form for form in tiled if form.transient_bytes < whole_bytes * (1 - MIN_SAVING)]
    return sorted(saving, key=lambda form: form.transient_bytes)


def _saves_in_chain(form: TiledRegion) -> bool:
    """True if a tile and its totals take less than the chain for all rows."""
    run, before = form.tiling.runs[0], results_of(form.parts[form.tiling.before].gm.graph)
    totals = {running_sum.total for running_sum in run.sums}
    tile_bytes = transient_bytes(form.parts[run.region].gm)
    tile_bytes += sum(bytes_of(before[total]) for total in totals)
    return tile_bytes < transient_bytes(form.chain.gm) * (1 - MIN_SAVING)


class _Crossing(NamedTuple):
    """What the parts of a chain hand out, in the order of the parts' outputs; see ``_Splitter``."""

    early: list[fx.Node]
    rows: list[fx.Node]
    totals: list[fx.Node]
    late: list[fx.Node]


class _EqualTiles(NamedTuple):
    """A run of tiles with the same number of rows, from row ``start`` on."""

    name: str
    num_tiles: int
    length: int
    start: int

    def slice(self, row: RowDim) -> Slice:
        """Returns the slices of a value with its rows at ``row``."""
        return Slice(dim=row.dim, length=self.length * row.factor, start=self.start * row.factor)


class _Splitter:
    """Builds the parts of one chain; ``run`` returns None if the chain cannot run in tiles.

    ``early`` are values that ``before`` hands out, ``late`` results that ``after`` makes, ``rows``
    values of the chain that tiles fill for other parts, ``sums`` those over rows that end it.
    """

    def __init__(self, region: RegionGraph, chain: Chain, *, widens: bool = True) -> None:
        """``widens``: sums of 16-bit products are float32, see ``FEW_SAVING``."""
        self.region = region
        self.chain = chain
        self.totals = Totals(device=region.device, rounds_products=not widens)
        self.dims = chain.dims
        self.nodes = list(region.gm.graph.nodes)
        self.placeholders = region.gm.graph.find_nodes(op="placeholder")
        self.checks = set(filter(is_check, self.nodes))
        self.static = {self.placeholders[at] for at in region.static_inputs}
        self.results = list(results_of(region.gm.graph))
        self.external = region.external_storages()
        self.first_sum = {total: node for node, total in chain.sums.items()}
        """Total -> one of the sums in it."""
        self.inside = chain.nodes | makers_of(self.first_sum, lambda node: node not in chain.sums)
        self.behind = self._behind()
        self.turned_dims: dict[fx.Node, RowDim | None] = {}
        """The rows of copies in the chain that have them outermost."""
        num_equal, last_rows = divmod(chain.num_rows, chain.tile_rows)
        self.runs = [_EqualTiles("tile", num_equal, chain.tile_rows, 0)]
        if last_rows:
            self.runs.append(_EqualTiles("last", 1, last_rows, chain.num_rows - last_rows))

    def run(self) -> TiledRegion | None:
        """Returns the parts; None: a value cannot cross between them, or tiles cannot fill it."""
        # What each part makes, from the last to the first: after, the tiles, before.
        late = [node for node in self.results if node in self.behind or self._is_finished(node)]
        after = extract(self.region.gm, [*late, *(self.checks & self.behind)], self._ends_after)
        wanted = {*after.inputs, *self.results} & self.chain.nodes
        rows = [node for node in self.nodes if node in wanted and not is_view(node)]
        totals = [node for node in self.nodes if node in self.first_sum]
        if not all(map(is_tensor, [*after.inputs, *rows])):
            return None  # a tuple that the parts would have to share
        not_in_tiles = [node for node in rows if not self._fills_ranges(node)]
        if not_in_tiles:
            return self._without(not_in_tiles)
        chain = self._whole_chain(rows, _inputs_of(self._sums()))
        if chain is None:
            return None
        early = self._early([*after.inputs, *map(self._value_of, chain.inputs)])
        crossing = _Crossing(early, rows, totals, late)
        return self._tiled_region(self._before(crossing), chain, after, crossing)

    def _whole_chain(self, rows: list[fx.Node], sources: list[fx.Node]) -> Extract | None:
        """Returns the chain for all rows, which makes ``rows``, and ``sources`` of the sums.

        None: tiles cannot run it.
        """
        ends = [*rows, *sources]
        if not ends:
            return None  # nothing reads what the chain makes
        chain = extract(self.region.gm, ends, self._ends_tile)
        if not all(map(is_tensor, chain.inputs)):
            return None
        for node in chain.inputs:
            if is_view(node) and self._value_of(node) is node:  # before makes a dense copy
                chain.copies[node].meta["val"] = _dense(node.meta["val"])
        if not all(self._is_aligned(node, chain) for node in chain.inputs):
            return None
        filled = [self._turned(node, chain) for node in rows]
        chain.graph.output((*filled, *(chain.copies[node] for node in sources)))
        if all(copy.op != "call_function" for copy in chain.copies.values()):
            return None  # nothing but sums of inputs
        return chain

    def _turned(self, node: fx.Node, chain: Extract) -> fx.Node:
        """Returns the copy of ``node`` in ``chain``, as tiles fill it."""
        copy, row = chain.copies[node], self.dims[node]
        if row is None or row.dim == 0 or not self._is_turned(node):
            return copy
        dense = _moved(chain.graph, copy, row.dim, 0)
        for new_node in (dense, *dense.all_input_nodes):
            self.turned_dims[new_node] = RowDim(dim=0, factor=row.factor)
        return dense

    def _is_aligned(self, node: fx.Node, chain: Extract) -> bool:
        """True if every tile's slice of input ``node`` begins at a multiple of ALIGNMENT_BYTES.

        That is so if the second begins there: a shorter last tile lies behind tiles of full length.
        """
        whole = layout_of(chain.copies[node].meta["val"])
        if whole is None or self.dims.get(node) is None:
            return True
        rows = self._slice(node, self.runs[0])
        return rows.length * whole.stride[rows.dim] * whole.item_bytes % ALIGNMENT_BYTES == 0

    def _before(self, crossing: _Crossing) -> Extract:
        """Returns the part that makes early values, and allocates sums and rows."""
        ends = [*crossing.early, *(self.checks - self.behind)]
        before = extract(self.region.gm, ends, lambda node: node.op == "placeholder")
        self._finish_before(before, crossing.early, crossing.totals, crossing.rows)
        return before

    def _tiled_region(
        self, before: Extract, chain: Extract, after: Extract, crossing: _Crossing
    ) -> TiledRegion:
        """Returns the region that calls the parts; cuts ``chain`` into tiles for that."""
        early, rows, totals, late = crossing
        # Where the values lie for the parts that read them.
        places = _refs(Source.REGION_INPUT, self.placeholders)
        places |= _refs(Source.BEFORE, [*early, *totals, *rows])
        results = places | _refs(Source.AFTER, late)
        self._finish_after(after, late)
        dims = {copy: self.dims.get(node) for node, copy in chain.copies.items()}
        dims |= self.turned_dims
        tiles = [self._tiles(equal, chain, dims, rows, places) for equal in self.runs]
        transients = [*map(transient_bytes, (before.gm, after.gm)), *(size for _, _, size in tiles)]
        parts = [self._part("before", before, [*early, *totals])]
        parts += [tile for _, regions, _ in tiles for tile in regions]
        has_after = bool(late or self.checks & self.behind)
        parts += [self._part("after", after, late)] if has_after else []
        tiling = Tiling(
            before=parts[0].name,
            before_inputs=tuple(places[node].index for node in before.inputs),
            runs=tuple(run for run, _, _ in tiles),
            after=parts[-1].name if has_after else None,
            after_inputs=tuple(places[node] for node in after.inputs),
            outputs=tuple(results[result] for result in self.results),
            output_layouts=self.region.output_layouts(),
        )
        return TiledRegion(
            parts={region.name: region for region in parts},
            tiling=tiling,
            num_rows=self.chain.num_rows,
            transient_bytes=max(transients) + self._shared_bytes([*early, *rows], totals),
            chain=self._tile_region("tile", chain.gm, chain),
            chain_dims=dims,
        )

    def _tiles(
        self,
        equal: _EqualTiles,
        part: Extract,
        dims: Mapping[fx.Node, RowDim | None],
        rows: list[fx.Node],
        places: Mapping[fx.Node, Ref],
    ) -> tuple[TileRun, list[RegionGraph], int]:
        """Returns a run, the regions of a tile and of its sums, and a tile's transient bytes.

        ``part`` is the chain for all rows, with rows at ``dims``; its values lie at ``places``.
        """
        sums = self._sums()
        gm = self._tile_graph(part, dims, len(rows), sums, equal.length)
        tile_bytes = transient_bytes(gm)
        tile = self._tile_region(equal.name, gm, part)
        inputs = [self._operand(node, part, places, equal) for node in part.inputs]
        totals = [places[self.chain.sums[node]].index for node in sums]
        additions = take_sums_out(tile, inputs, len(rows), totals)
        run = TileRun(
            num_tiles=equal.num_tiles,
            region=tile.name,
            inputs=tuple(inputs),
            rows=tuple(
                Rows(whole=places[node].index, slice=equal.slice(self._filled(node)[1]))
                for node in rows
            ),
            sums=tuple(running_sum for _, running_sum in additions),
        )
        return run, [tile, *(sum_region for sum_region, _ in additions)], tile_bytes

    def _sums(self) -> list[fx.Node]:
        return [node for node in self.nodes if node in self.chain.sums]

    def _is_rounded(self, node: fx.Node) -> bool:
        """True for a total that ``after`` must round, or give its shape."""
        part = self.first_sum.get(node)
        return part is not None and (self.totals.is_wide(part) or shape_of(part) != shape_of(node))

    def _is_finished(self, node: fx.Node) -> bool:
        """True for a value that ``after`` converts: its type, its shape, or where its heads are."""
        return self._is_rounded(node) or (node in self.chain.nodes and self._is_turned(node))

    def _is_turned(self, node: fx.Node) -> bool:
        """True for a value that tiles fill with its heads first; ``after`` moves them back.

        A tile fills one range of bytes, and the gradient of an output projection has its heads in
        dimension 1. What goes into the user's memory is always copied: tiles do not fill that.
        """
        row, value = self.dims.get(node), node.meta["val"]
        if not self.chain.by_heads or row is None or not value.is_contiguous():
            return False
        is_range = row_layout(value, row, self.chain.num_rows) is not None
        return storage_of(node) in self.external or not is_range

    def _filled(self, node: fx.Node) -> tuple[torch.Tensor, RowDim]:
        """Returns a fake of the row-wise ``node`` as tiles fill it, and its rows there."""
        row, value = self.dims[node], node.meta["val"]
        assert row is not None, f"{node.name} is in the chain and carries no rows"
        if self._is_turned(node):
            value, row = _dense(value.movedim(row.dim, 0)), RowDim(dim=0, factor=row.factor)
        return value, row

    def _without(self, values: Sequence[fx.Node]) -> TiledRegion | None:
        """Returns the region with a chain without ``values`` and their makers; None: as ``run``."""
        nodes = self.chain.nodes - makers_of(values)
        if not nodes:
            return None
        chain, widens = replace(self.chain, nodes=nodes), not self.totals.rounds_products
        return _Splitter(self.region, chain, widens=widens).run()

    def _behind(self) -> set[fx.Node]:
        """Returns the nodes that ``after`` runs: those that depend on the chain, and later others.

        What the chain or a check needs, and a check of values before the chain (an index may rely
        on it), stays before. Views of the chain's results are behind as well, so that only whole
        storages leave a tile.
        """
        needed: set[fx.Node] = set()
        for node in reversed(self.nodes):
            if node in self.inside or node in needed or is_check(node):
                needed.update((node, *node.all_input_nodes))
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
        """True for an input of ``after``, which makes views and constants itself."""
        if node.op == "get_attr" or is_constant(node) or node in self.behind:
            return False
        return not is_view(node) or node.op == "placeholder"

    def _ends_tile(self, node: fx.Node) -> bool:
        """True for an input of the tile, which makes constants and views without rows itself."""
        if node in self.inside or node.op == "get_attr":
            return False
        if is_constant(node):  # positions differ from row to row
            return not is_row_wise(node, self.dims)
        return not is_view(node) or node not in self.dims or self.dims[node] is not None

    def _value_of(self, node: fx.Node) -> fx.Node:
        """Returns the value from which a tile reads its input ``node``.

        For ``y = x.view(...)`` that is ``x``, whose rows lie in the same bytes. ``y = x[:, :8]`` is
        a value itself: ``before`` makes a copy of it.
        """
        base = base_of(node)
        return node if is_view(base) else base

    def _early(self, values: Sequence[fx.Node]) -> list[fx.Node]:
        """Returns the outputs of ``before``: inputs of other parts, and results of the region."""
        wanted = {*values, *(node for node in self.results if node not in self.behind)}
        return [
            node
            for node in self.nodes
            if node in wanted and node.op != "placeholder" and node not in self.inside
        ]

    def _fills_ranges(self, node: fx.Node) -> bool:
        """True for a value of which every tile fills one aligned range of bytes."""
        value, row = self._filled(node)
        row_bytes = row_layout(value, row, self.chain.num_rows)
        if row_bytes is None or not value.is_contiguous():
            return False
        return row_bytes * self.chain.tile_rows % ALIGNMENT_BYTES == 0

    def _slice(self, node: fx.Node, equal: _EqualTiles) -> Slice:
        """Returns the slices of ``node``, which carries rows, in the tiles of a run."""
        row = self.dims[node]
        assert row is not None, f"{node.name} is read or made in slices and carries no rows"
        return equal.slice(row)

    def _operand(
        self, node: fx.Node, part: Extract, places: Mapping[fx.Node, Ref], equal: _EqualTiles
    ) -> Operand:
        """Returns how a tile reads ``node``: a slice, or all of a value without separate rows."""
        return Operand(
            value=places[self._value_of(node)],
            whole=layout_of(part.copies[node].meta["val"]),
            slice=None if self.dims.get(node) is None else self._slice(node, equal),
        )

    def _finish_before(
        self, before: Extract, early: list[fx.Node], totals: list[fx.Node], rows: list[fx.Node]
    ) -> None:
        """Gives ``before`` its outputs; the last are zeros for every total and for ``rows``."""
        graph = before.graph
        outputs = []
        for node in early:
            out = before.copies[node]
            if is_view(node) and node not in self.results:
                out = _dense_copy(graph, out)
            outputs.append(out)
        likes = [self.totals.like(self.first_sum[node]) for node in totals]
        likes += [_dense(self._filled(node)[0]) for node in rows]
        for like in likes:
            options = {"dtype": like.dtype, "device": like.device, "pin_memory": False}
            full = torch.ops.aten.full.default
            outputs.append(call_like(graph, full, (list(like.shape), 0), options, like=like))
        graph.output(tuple(outputs))

    def _finish_after(self, after: Extract, late: list[fx.Node]) -> None:
        """Gives ``after`` its outputs; first come those values that tiles fill in another form."""
        first = next((node for node in after.graph.nodes if node.op != "placeholder"), None)
        for node in filter(self._is_finished, after.inputs):
            filled = after.copies[node]
            readers = list(filled.users)
            with after.graph.inserting_before(first) if first else contextlib.nullcontext():
                after.copies[node] = self._finished(after.graph, node, filled)
            for reader in readers:
                reader.replace_input_with(filled, after.copies[node])
        after.finish(late)

    def _finished(self, graph: fx.Graph, node: fx.Node, filled: fx.Node) -> fx.Node:
        """Adds what makes ``node`` of ``filled``, its value as the tiles have left it."""
        if node in self.first_sum:
            filled.meta["val"] = self.totals.like(self.first_sum[node])
            return self.totals.rounded(graph, node, filled)
        filled.meta["val"], _ = self._filled(node)
        row = self.dims[node]
        assert row is not None, f"{node.name} is made in tiles"
        return _moved(graph, filled, 0, row.dim)

    def _tile_graph(
        self,
        part: Extract,
        dims: Mapping[fx.Node, RowDim | None],
        num_outputs: int,
        sums: list[fx.Node],
        tile_rows: int,
    ) -> fx.GraphModule:
        """Returns the chain for the rows of one tile, with its sums added to the totals so far."""
        sources = _inputs_of(sums)
        gm = slice_rows(part.gm, dims, tile_rows, self.chain.num_rows)
        graph = gm.graph
        end, ends = graph.output_node(), results_of(graph)
        graph.erase_node(end)
        tile_value = dict(zip(sources, ends[num_outputs:], strict=True))
        first = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_before(first):
            old_totals = [graph.placeholder(f"acc_{at}") for at in range(len(sums))]
        totals = []
        for node, acc in zip(sums, old_totals, strict=True):
            acc.meta["val"] = self.totals.like(node)
            last = max(tile_value[source] for source in node.all_input_nodes)
            behind = first if last.op == "placeholder" else last.next
            with graph.inserting_before(behind):  # directly: its operands then die early
                share = tile_rows / self.chain.num_rows
                totals.append(self.totals.added(graph, node, acc, tile_value, share))
        graph.output((*ends[:num_outputs], *totals))
        gm.recompile()
        return gm

    def _tile_region(self, name: str, gm: fx.GraphModule, part: Extract) -> RegionGraph:
        """Returns the region of a tile, whose graph ``gm`` has the inputs of ``part``."""
        static = tuple(
            at
            for at, node in enumerate(part.inputs)
            if self.dims.get(node) is None and node in self.static
        )
        name, external = f"{self.region.name}.{name}", frozenset[int]()
        return replace(
            self.region, name=name, gm=gm, external_outputs=external, static_inputs=static
        )

    def _part(self, name: str, part: Extract, outputs: Sequence[fx.Node]) -> RegionGraph:
        """Returns the region ``before`` or ``after``. Totals to be rounded are not the user's."""
        external = {
            at
            for at, output in enumerate(outputs)
            if storage_of(output) in self.external
            and (name != "before" or not self._is_finished(output))
        }
        return replace(
            self.region,
            name=f"{self.region.name}.{name}",
            gm=part.gm,
            external_outputs=frozenset(external),
            static_inputs=tuple(at for at, node in enumerate(part.inputs) if node in self.static),
        )

    def _shared_bytes(self, values: Sequence[fx.Node], totals: Sequence[fx.Node]) -> int:
        """Returns the bytes of values that parts hand on and the region does not return."""
        returned = {storage_of(node) for node in self.results}
        shared = [
            node
            for node in (*values, *totals)
            if self._is_finished(node) or storage_of(node) not in returned
        ]
        likes = {node: node.meta["val"] for node in shared}
        likes |= {node: self.totals.like(self.first_sum[node]) for node in shared if node in totals}
        return sum(int(like.nbytes) for like in likes.values())


def _refs(source: Source, nodes: Sequence[fx.Node]) -> dict[fx.Node, Ref]:
    return {node: Ref(source=source, index=at) for at, node in enumerate(nodes)}


def _inputs_of(sums: Sequence[fx.Node]) -> list[fx.Node]:
    return list(dict.fromkeys(source for node in sums for source in node.all_input_nodes))


def _moved(graph: fx.Graph, node: fx.Node, source: int, target: int) -> fx.Node:
    """Adds a dense copy of ``node`` with dimension ``source`` at ``target``."""
    value = node.meta["val"]
    order = list(range(value.dim()))
    order.insert(target, order.pop(source))
    moved = call_like(
        graph, torch.ops.aten.permute.default, (node, order), like=value.permute(order)
    )
    return _dense_copy(graph, moved)


def _dense_copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Adds a contiguous copy of ``node``."""
    options, like = {"memory_format": torch.contiguous_format}, _dense(node.meta["val"])
    return call_like(graph, torch.ops.aten.clone.default, (node,), options, like=like)


def _dense(value: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous fake of the same shape and dtype."""
    return value.new_empty(value.shape)
