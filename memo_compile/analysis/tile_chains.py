"""Finds chains of row-wise nodes that can run in tiles: of tokens, or of heads of attention.

Tokens are looked for around the values of a region's peak, heads around its attention.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from memo_compile.analysis.purity import is_check, is_collective
from memo_compile.analysis.regions import RegionGraph
from memo_compile.analysis.row_rules import RowDim, is_attention
from memo_compile.analysis.rows import is_row_wise, rows_through
from memo_compile.analysis.structure import argument, is_matmul, op_name
from memo_compile.analysis.views import (
    base_of,
    bytes_of,
    is_item,
    is_tensor,
    is_view,
    makers_of,
    shape_of,
    storage_of,
)
from memo_compile.step.problem import running_sums

NUM_ANCHORS = 2
"""Chains are looked for around this many of the peak's widest values. Mostly the second reads the
first; where it does not, it belongs to another chain."""

GRANULE = 16
"""Tiles of multiples of so many rows begin at multiples of ``tiles.ALIGNMENT_BYTES``."""

NARROW = 8
"""Values of at most 1/NARROW of the widest's bytes may be computed whole, before the tiles."""


def transient_bytes(gm: fx.GraphModule) -> int:
    """Returns the most bytes alive at once when ``gm`` runs, without inputs and outputs."""
    return max(_live_bytes(_lives(gm)).values(), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Row-wise nodes that run in tiles, and the sums over rows that end the chain."""

    nodes: frozenset[fx.Node]
    sums: Mapping[fx.Node, fx.Node]
    """Sum -> the node that is the total: the sum itself, or an addition of several sums."""
    dims: Mapping[fx.Node, RowDim | None]
    num_rows: int
    tile_rows: int
    """Rows of every tile but the last, which may have fewer, but more than one."""
    by_heads: bool = False
    """A row is a head of keys and values, with the heads of queries that read it."""


def chains(region: RegionGraph, tiles: int) -> Iterable[Chain]:
    """Yields candidates: around each wide value, for each number of rows, in each stage.

    ``tiles`` is how many tiles are asked for; a chain's may be fewer.
    """
    keys: set[tuple[frozenset[fx.Node], int]] = set()
    for anchor in _anchors(region.gm):
        dim = next(at for at, size in enumerate(shape_of(anchor)) if size > 1)
        if dim == 1 and any(map(is_attention, anchor.all_input_nodes)):
            continue  # these are heads
        for num_rows in _row_counts(region.gm, anchor):
            row = RowDim(dim=dim, factor=shape_of(anchor)[dim] // num_rows)
            dims = rows_through(region.gm, anchor, row, num_rows)
            lengths = _tile_lengths(num_rows, tiles)
            if not lengths or anchor not in dims:
                continue
            for nodes, sums in _stages(region, dims):
                key = (nodes | sums, num_rows)
                if key in keys:
                    continue
                keys.add(key)
                for length in lengths:
                    yield Chain(
                        nodes=nodes,
                        sums={node: node for node in sums},
                        dims=dims,
                        num_rows=num_rows,
                        tile_rows=length,
                    )


def head_chains(region: RegionGraph, tiles: int) -> Iterable[Chain]:
    """Yields candidates around the first attention, in equal tiles of heads, up to ``tiles``.

    With 8 heads of keys and 6 as ``tiles`` there are 4 tiles of 2 heads.
    """
    attention = next(filter(is_attention, region.gm.graph.nodes), None)
    if attention is None:
        return
    inputs = [argument(attention, name) for name in ("query", "key", "value")]
    counts = [shape_of(source)[1] for source in inputs]
    for source in inputs:  # repeated heads come from a narrower product
        batch, _, tokens, width = shape_of(source)
        products = map(shape_of, filter(is_matmul, projections(source)))
        of_tokens = (shape for shape in products if math.prod(shape[:-1]) == batch * tokens)
        counts += [shape[-1] // width for shape in of_tokens]
    num_rows = math.gcd(*counts)
    if num_rows < 2:
        return
    row = RowDim(dim=1, factor=counts[0] // num_rows)
    dims = rows_through(region.gm, inputs[0], row, num_rows)
    num_tiles = next(n for n in range(min(tiles, num_rows), 0, -1) if num_rows % n == 0)
    for nodes, sums in _stages(region, dims, fills_external=True):
        yield Chain(
            nodes=nodes,
            sums=_added_up(sums),
            dims=dims,
            num_rows=num_rows,
            tile_rows=num_rows // num_tiles,
            by_heads=True,
        )


def projections(source: fx.Node) -> set[fx.Node]:
    """Returns what an attention's input is made of, back to the products that project it."""

    def goes_on(node: fx.Node) -> bool:
        return node.op == "call_function" and not is_matmul(node) and not is_collective(node)

    return makers_of([source], goes_on)


def _tile_lengths(num_rows: int, tiles: int) -> list[int]:
    """Returns numbers of rows of a tile: of equal tiles, and of tiles with a shorter last one.

    Equal tiles are left out if there were less than half as many as asked for. Each length that is
    tried splits the graph once, so mostly one is returned.
    """
    num_equal = next(n for n in range(min(tiles, num_rows), 0, -1) if num_rows % n == 0)
    equal = num_rows // num_equal
    if num_equal == tiles and equal % GRANULE == 0:
        return [equal]
    length = GRANULE * math.ceil(num_rows / tiles / GRANULE)
    while num_rows % length == 1:  # operators may treat a size of 1 apart
        length += GRANULE
    lengths = [equal] if num_equal > 1 and 2 * num_equal >= min(tiles, num_rows) else []
    return lengths + [length] * (length < num_rows and length not in lengths)


def _anchors(gm: fx.GraphModule) -> list[fx.Node]:
    """Returns the largest transient values that are alive at the peak."""
    lives = _lives(gm)
    live = _live_bytes(lives)
    peak = max(live, key=live.__getitem__, default=0)
    alive = [node for node, (start, end, _) in lives.items() if start <= peak <= end]
    alive.sort(key=lambda node: -lives[node][2])
    return [node for node in alive if max(shape_of(node), default=1) > 1][:NUM_ANCHORS]


def _row_counts(gm: fx.GraphModule, anchor: fx.Node) -> list[int]:
    """Returns numbers of rows to try: the anchor's outermost size, and batches flattened into it.

    [8 * 1024, vocabulary] in a region with values [8, 1024, ...] -> 8192 tokens, or 8 sequences.
    """
    size = next(length for length in shape_of(anchor) if length > 1)
    shapes = map(shape_of, filter(is_tensor, gm.graph.nodes))
    batches = {shape[0] for shape in shapes if len(shape) > 2 and shape[0] > 1}
    flattened = [batch for batch in batches if batch < size and size % batch == 0]
    return [size, *sorted(flattened, reverse=True)]


def _stages(
    region: RegionGraph, dims: Mapping[fx.Node, RowDim | None], *, fills_external: bool = False
) -> Iterable[tuple[frozenset[fx.Node], frozenset[fx.Node]]]:
    """Yields (row-wise nodes, sums at their end) of each stage of the region.

    A stage number counts how often rows were mixed on the way to a node, so that no path leaves a
    stage and comes back to it. A node whose only readers are in a later stage moves there. Sums of
    narrow values that wide ones read (how many labels count), and checks of such values (that
    labels are in range), run before the tiles and begin no stage.

    The user's memory is not written in parts. With ``fills_external`` it is a copy of what tiles
    fill.
    """
    nodes = [node for node in region.gm.graph.nodes if node.op == "call_function"]
    external = frozenset() if fills_external else region.external_storages()
    row_wise = {
        node
        for node in nodes
        if dims.get(node) is not None
        and is_row_wise(node, dims)
        and (storage_of(node) not in external or is_view(node))
    }
    row_wise = _without_split_tuples(row_wise)
    sums = {node for node in nodes if node not in dims and _is_sum(node, dims, row_wise)}
    before_tiles = _narrow_ends(nodes, row_wise, sums)
    row_wise, sums = row_wise - before_tiles, sums - before_tiles
    stage: dict[fx.Node, int] = {}
    for node in region.gm.graph.nodes:
        in_tiles = node in row_wise or node in sums
        stage[node] = max(
            (
                stage[source] + ((source in row_wise and not in_tiles) or source in sums)
                for source in node.all_input_nodes
            ),
            default=0,
        )
    for level in sorted({stage[node] for node in row_wise}):
        chain = {node for node in row_wise if stage[node] == level}
        ends = {node for node in sums if stage[node] == level}
        for node in reversed(nodes):
            if node not in row_wise or node in chain or stage[node] >= level or is_item(node):
                continue
            items = _items(node)
            users = {user for item in items or [node] for user in item.users}
            if users and all(user in chain or user in ends for user in users):
                chain.update((node, *items))
        yield frozenset(chain), frozenset(ends)


def _added_up(sums: frozenset[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Returns the total of each of ``sums``: itself, or the addition of it and others.

    The gradient of the input of three projections is the addition of three products. All three add
    to one total in memory, instead of one each.
    """
    parts_of = {node: [node] for node in sums}
    for node in next(iter(sums)).graph.nodes if sums else ():
        operands = node.all_input_nodes if node.target is torch.ops.aten.add.Tensor else []
        bases = [base_of(operand) for operand in operands]
        if (
            len(bases) == 2
            and not node.kwargs
            and all(base in parts_of and is_matmul(parts_of[base][0]) for base in bases)
            and len({_form(parts_of[base][0]) for base in bases}) == 1
            and node.meta["val"].numel() == bases[0].meta["val"].numel()  # none is broadcast
            and all(map(_is_read_once, operands))
            and all(each.meta["val"].is_contiguous() for each in (node, *operands))
        ):
            parts_of[node] = [part for base in bases for part in parts_of.pop(base)]
    return {part: total for total, parts in parts_of.items() for part in parts}


def _form(node: fx.Node) -> tuple[tuple[int, ...], torch.dtype]:
    return shape_of(node), node.meta["val"].dtype


def _is_read_once(node: fx.Node) -> bool:
    """True if nothing but the one reader of ``node`` reads its memory."""
    while len(node.users) == 1 and is_view(node):
        (node,) = node.all_input_nodes
    return len(node.users) == 1


def _narrow_ends(
    nodes: Iterable[fx.Node], row_wise: set[fx.Node], sums: set[fx.Node]
) -> set[fx.Node]:
    """Returns narrow row-wise values, and sums of them, that run before the tiles.

    They make a sum on which a row-wise node depends (``(labels != -100).sum()``, by which the
    loss is divided), or what a check reads.
    """
    widest = max((bytes_of(node) for node in row_wise), default=0)
    depends_on_sum: set[fx.Node] = set()
    read_by_tiles: set[fx.Node] = set()
    for node in nodes:
        if node in sums or any(source in depends_on_sum for source in node.all_input_nodes):
            depends_on_sum.add(node)
            read_by_tiles.update(node.all_input_nodes if node in row_wise else ())
    before_tiles: set[fx.Node] = set()
    for end in (*sums, *filter(is_check, nodes)):
        makers = makers_of([end])
        is_needed = end not in sums or any(
            end in makers_of([node]) for node in read_by_tiles - row_wise
        )
        if is_needed and all(NARROW * bytes_of(node) <= widest for node in makers & row_wise):
            before_tiles |= makers & (row_wise | sums)
    return before_tiles


def _items(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if is_item(user)]


def _without_split_tuples(nodes: set[fx.Node]) -> set[fx.Node]:
    """Removes operators with several results, and these, unless all results are in ``nodes``."""
    complete = {node for node in nodes if all(item in nodes for item in _items(node))}
    return {node for node in complete if not is_item(node) or node.all_input_nodes[0] in complete}


def _is_sum(node: fx.Node, dims: Mapping[fx.Node, RowDim | None], row_wise: set[fx.Node]) -> bool:
    """True for a sum or mean over the rows of a chain, or a matrix product that contracts them."""
    sources = node.all_input_nodes
    rows = [row for source in sources if (row := dims.get(source)) is not None]
    if len(rows) < len(sources) or row_wise.isdisjoint(sources) or not is_tensor(node):
        return False
    if not node.meta["val"].is_contiguous():
        return False
    if op_name(node) in ("sum", "mean"):
        return len(rows) == 1
    ndim = len(shape_of(node))
    is_product = node.target in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
    return is_product and [row.dim for row in rows] == [ndim - 1, ndim - 2]


def _live_bytes(lives: Mapping[fx.Node, tuple[int, int, int]]) -> dict[int, int]:
    """Returns the bytes alive at each line where they change."""
    return running_sums(
        change
        for first, last, size in lives.values()
        for change in ((first, size), (last + 1, -size))
    )


def _lives(gm: fx.GraphModule) -> dict[fx.Node, tuple[int, int, int]]:
    """Returns (first line, last line, bytes) of each storage that is neither input nor output."""
    nodes = list(gm.graph.nodes)
    line = {node: number for number, node in enumerate(nodes)}  # one for each node
    outputs = {storage_of(node) for node in nodes[-1].all_input_nodes}
    lives: dict[fx.Node, tuple[int, int, int]] = {}
    for node in nodes:
        if node.op == "call_function" and is_tensor(node) and not is_view(node):
            maker = node.all_input_nodes[0] if is_item(node) else node  # of the tuple
            if node not in outputs:
                lives[node] = (line[maker], line[node], bytes_of(node))
        for source in node.all_input_nodes:
            root = storage_of(source)
            if root in lives:
                start, _, size = lives[root]
                lives[root] = (start, line[node], size)
    return lives
