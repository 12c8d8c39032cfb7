"""Where a region can run in tiles: its row-wise chains around the values that make its peak."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from memo_compile.analysis.purity import is_check
from memo_compile.analysis.regions import RegionGraph
from memo_compile.analysis.row_rules import RowDim
from memo_compile.analysis.rows import is_row_wise, rows_through
from memo_compile.analysis.structure import op_name
from memo_compile.analysis.views import (
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
"""Chains are looked for around this many of the peak's widest values: mostly the second reads the
first, and where it does not, it belongs to another chain."""

GRANULE = 16
"""Slices of so many rows begin at multiples of ``tiles.ALIGNMENT_BYTES``, whatever a row holds."""

NARROW = 8
"""A value of at most 1/NARROW of the widest's bytes costs next to nothing before the tiles."""


def transient_bytes(gm: fx.GraphModule) -> int:
    """The most bytes alive at once, inputs and outputs not counted, when ``gm`` runs in order."""
    return max(_live_bytes(_lives(gm)).values(), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """What runs in tiles: row-wise nodes, and the sums over rows that end it."""

    nodes: frozenset[fx.Node]
    sums: frozenset[fx.Node]
    dims: Mapping[fx.Node, RowDim | None]
    num_rows: int
    tile_rows: int
    """Rows of every tile but the last, which may have fewer, though never one."""


def chains(region: RegionGraph, tiles: int) -> Iterable[Chain]:
    """Candidates: around each wide value, for each number of rows, for each stage of the region."""
    seen: set[tuple[frozenset[fx.Node], int]] = set()
    for anchor in _anchors(region.gm):
        for num_rows in _row_counts(region.gm, anchor):
            dim = next(at for at, size in enumerate(shape_of(anchor)) if size > 1)
            row = RowDim(dim=dim, factor=shape_of(anchor)[dim] // num_rows)
            dims = rows_through(region.gm, anchor, row, num_rows)
            lengths = _tile_lengths(num_rows, tiles)
            if not lengths or anchor not in dims:
                continue
            for nodes, sums in _stages(region, dims):
                key = (nodes | sums, num_rows)
                if key in seen:
                    continue
                seen.add(key)
                for length in lengths:
                    yield Chain(
                        nodes=nodes, sums=sums, dims=dims, num_rows=num_rows, tile_rows=length
                    )


def _tile_lengths(num_rows: int, tiles: int) -> list[int]:
    """How many rows a tile may have: as many in each, or fewer in the last.

    Equal tiles are left out where there would be less than half as many. Cost: each length that is
    tried splits the graph once, so that there is one for most numbers of rows.
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
    """The largest transient values that are alive at the peak."""
    lives = _lives(gm)
    live = _live_bytes(lives)
    peak = max(live, key=live.__getitem__, default=0)
    alive = [node for node, (start, end, _) in lives.items() if start <= peak <= end]
    alive.sort(key=lambda node: -lives[node][2])
    return [node for node in alive if max(shape_of(node), default=1) > 1][:NUM_ANCHORS]


def _row_counts(gm: fx.GraphModule, anchor: fx.Node) -> list[int]:
    """The anchor's own outermost size; and the batch, where tokens of several are flattened."""
    size = next(length for length in shape_of(anchor) if length > 1)
    batches = {
        shape_of(node)[0]
        for node in gm.graph.nodes
        if is_tensor(node) and len(shape_of(node)) > 2 and shape_of(node)[0] > 1
    }
    flattened = [batch for batch in batches if batch < size and size % batch == 0]
    return [size, *sorted(flattened, reverse=True)]


def _stages(
    region: RegionGraph, dims: Mapping[fx.Node, RowDim | None]
) -> Iterable[tuple[frozenset[fx.Node], frozenset[fx.Node]]]:
    """The row-wise nodes by how often their rows were mixed before; with the sums at their end.

    No path leads from a stage to what mixes its rows and back. A node whose only readers are in a
    later stage moves there. Sums of narrow values that wide ones read (how many labels count), and
    checks of such values (that labels are in range), come before the tiles, and divide nothing into
    stages.
    """
    nodes = [node for node in region.gm.graph.nodes if node.op == "call_function"]
    external = region.external_storages()  # the user's: no memory of the step's to write in parts
    own = {
        node
        for node in nodes
        if dims.get(node) is not None
        and is_row_wise(node, dims)
        and (storage_of(node) not in external or is_view(node))
    }
    own = _with_all_items(own)
    sums = {node for node in nodes if node not in dims and _is_sum(node, dims, own)}
    before = _narrow_ends(nodes, own, sums)
    own, sums = own - before, sums - before
    stage: dict[fx.Node, int] = {}
    for node in region.gm.graph.nodes:
        inside = node in own or node in sums
        stage[node] = max(
            (
                stage[source] + ((source in own and not inside) or source in sums)
                for source in node.all_input_nodes
            ),
            default=0,
        )
    for level in sorted({stage[node] for node in own}):
        chain = {node for node in own if stage[node] == level}
        ends = {node for node in sums if stage[node] == level}
        for node in reversed(nodes):
            if node not in own or node in chain or stage[node] >= level or is_item(node):
                continue
            items = _items(node)
            users = {user for item in items or [node] for user in item.users}
            if users and all(user in chain or user in ends for user in users):
                chain.update((node, *items))
        yield frozenset(chain), frozenset(ends)


def _narrow_ends(nodes: Iterable[fx.Node], own: set[fx.Node], sums: set[fx.Node]) -> set[fx.Node]:
    """Sums that are made of narrow row-wise values, and read for row-wise ones; with those.

    And the narrow row-wise values, and their sums, that checks read.
    """
    widest = max((bytes_of(node) for node in own), default=0)
    mixed: set[fx.Node] = set()  # what is made of a sum
    read: set[fx.Node] = set()
    for node in nodes:
        if node in sums or any(source in mixed for source in node.all_input_nodes):
            mixed.add(node)
            read.update(node.all_input_nodes if node in own else ())
    found: set[fx.Node] = set()
    for end in (*sums, *filter(is_check, nodes)):
        made_of = makers_of([end])
        feeds = end not in sums or any(end in makers_of([node]) for node in read - own)
        if feeds and all(NARROW * bytes_of(node) <= widest for node in made_of & own):
            found |= made_of & (own | sums)
    return found


def _items(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if is_item(user)]


def _with_all_items(own: set[fx.Node]) -> set[fx.Node]:
    """``own`` without operators some of whose results are not in it: a tuple stays in one part."""
    kept = {node for node in own if all(item in own for item in _items(node))}
    return {node for node in kept if not is_item(node) or node.all_input_nodes[0] in kept}


def _is_sum(node: fx.Node, dims: Mapping[fx.Node, RowDim | None], own: set[fx.Node]) -> bool:
    """True for a sum or mean over the rows of the chain, or a product that contracts them."""
    sources = node.all_input_nodes
    rows = [row for source in sources if (row := dims.get(source)) is not None]
    if len(rows) < len(sources) or own.isdisjoint(sources) or not is_tensor(node):
        return False
    if not node.meta["val"].is_contiguous():
        return False
    if op_name(node) in ("sum", "mean"):
        return len(rows) == 1
    ndim = len(shape_of(node))
    is_product = node.target in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
    return is_product and [row.dim for row in rows] == [ndim - 1, ndim - 2]


def _live_bytes(lives: Mapping[fx.Node, tuple[int, int, int]]) -> dict[int, int]:
    """Line -> bytes alive at it, wherever they change."""
    return running_sums(
        change
        for first, last, size in lives.values()
        for change in ((first, size), (last + 1, -size))
    )


def _lives(gm: fx.GraphModule) -> dict[fx.Node, tuple[int, int, int]]:
    """Storage that is neither input nor output -> first line, last line, bytes."""
    nodes = list(gm.graph.nodes)
    line = {node: number for number, node in enumerate(nodes)}
    kept = {storage_of(node) for node in nodes[-1].all_input_nodes}
    lives: dict[fx.Node, tuple[int, int, int]] = {}
    for node in nodes:
        if node.op == "call_function" and is_tensor(node) and not is_view(node):
            maker = node.all_input_nodes[0] if op_name(node) == "" else node
            if node not in kept:
                lives[node] = (line[maker], line[node], bytes_of(node))
        for source in node.all_input_nodes:
            root = storage_of(source)
            if root in lives:
                start, _, size = lives[root]
                lives[root] = (start, line[node], size)
    return lives
