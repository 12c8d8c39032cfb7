"""Finds the dimension of every value that carries the rows (tokens, or sequences).

Rows are the outermost dimension of the activations that can be split: tokens when the batch is 1,
else whole sequences, so that a range of rows of a dense tensor is one range of bytes. A node is
separable when every row of its result depends on the same row of its inputs only. Attention,
reductions over the rows and operators that depend on a row's position are not separable, nor are
nodes that depend on them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from memo_compile.analysis.purity import is_repeatable
from memo_compile.analysis.row_rules import Carried, RowDim, contracted_partner, is_counter, rule_of
from memo_compile.analysis.structure import op_name
from memo_compile.analysis.views import is_tensor, shape_of
from memo_compile.errors import UnsupportedGraph

_UNIFORM = frozenset(("full", "zeros", "ones", "empty"))
"""Operators whose results are equal in every row, so that they can be made for fewer rows.

So can an ``expand`` that repeats one entry."""


def row_dims(
    gm: fx.GraphModule, seeds: Mapping[fx.Node, RowDim], num_rows: int
) -> dict[fx.Node, RowDim | None]:
    """Returns every separable node with the dimension of its rows; None: it carries no rows.

    A tuple's dimension is that of its elements. Nodes that mix rows, random operators, collectives,
    writes, custom operators, and all nodes that depend on one of them, are absent. Placeholders
    that an operator reads row by row beside a value with rows (tables of angles, labels, masks)
    carry rows too, and are in the result although ``seeds`` does not name them. Raises
    UnsupportedGraph: a seed has not ``num_rows * factor`` entries in its dimension.
    """
    if num_rows < 2:
        raise UnsupportedGraph(f"rows: expected at least 2 rows to split, got {num_rows}")
    for node, row in seeds.items():
        if not _fits(node, row, num_rows):
            raise UnsupportedGraph(
                f"{node.name}: expected {num_rows} rows x {row.factor} in dimension {row.dim}, "
                f"got shape {shape_of(node)}; seed another dimension"
            )
    return _walk_until_settled(gm, dict(seeds), num_rows, any_source=False)


def rows_through(
    gm: fx.GraphModule, node: fx.Node, row: RowDim, num_rows: int
) -> dict[fx.Node, RowDim | None]:
    """Returns what :func:`row_dims` does if ``node`` has its rows at ``row``, whatever the seeds.

    Rows are followed back through operators that keep them apart. The result of an operator that
    does not (attention, a mask of positions, random numbers) is in the returned dict too, if the
    rows come from it; :func:`is_row_wise` tells the two kinds of nodes apart.
    """
    walk = _Walk(gm, {}, num_rows, any_source=True)
    walk.run()
    if not walk.can_carry(node, row):
        return {}
    return _walk_until_settled(gm, dict(walk.new_seeds), num_rows, any_source=True)


def _walk_until_settled(
    gm: fx.GraphModule, seeds: dict[fx.Node, RowDim], num_rows: int, *, any_source: bool
) -> dict[fx.Node, RowDim | None]:
    """Walks over the graph until no further node has to be a seed."""
    while True:
        walk = _Walk(gm, seeds, num_rows, any_source=any_source)
        walk.run()
        if not walk.new_seeds:
            return walk.dims
        seeds.update(walk.new_seeds)


def attention_rows(
    gm: fx.GraphModule, seeds: Mapping[fx.Node, RowDim], num_rows: int
) -> dict[fx.Node, RowDim]:
    """Returns nodes that mix rows but have a result for each: attention, and its two products.

    With these among its seeds, :func:`row_dims` tells which nodes behind an attention are
    separable once the attention's results exist. Cost: one analysis per node returned.
    """
    attention: dict[fx.Node, RowDim] = {}
    while True:
        dims = row_dims(gm, {**seeds, **attention}, num_rows)
        next_nodes = {
            node: row
            for node in gm.graph.nodes
            if node.op == "call_function"
            and node not in dims
            and (row := _rows_of_queries(node, dims)) is not None
            and _fits(node, row, num_rows)
        }
        if not next_nodes:
            return attention
        attention.update(next_nodes)


def _rows_of_queries(node: fx.Node, dims: Mapping[fx.Node, RowDim | None]) -> RowDim | None:
    """Returns the rows of an attention's, or a product's, left operand; None: none."""
    queries = node.args[0] if node.args else None
    if not isinstance(queries, fx.Node) or any(
        source not in dims for source in node.all_input_nodes
    ):
        return None
    row = dims[queries]
    if row is None or "attention" in op_name(node):
        return row
    is_product = op_name(node) in ("mm", "bmm") and row.dim == len(shape_of(queries)) - 2
    return row if is_product else None


@dataclass(slots=True)
class _Walk:
    """One walk over the graph from ``seeds``; it collects nodes that must be seeds as well.

    With ``any_source`` a node that cannot have its rows from its inputs becomes a seed itself, and
    a tensor of one element that depends on mixed rows (a sum) is read whole by every row.
    """

    gm: fx.GraphModule
    seeds: Mapping[fx.Node, RowDim]
    num_rows: int
    any_source: bool
    dims: dict[fx.Node, RowDim | None] = field(default_factory=dict)
    """Nodes visited so far, as ``row_dims`` returns them."""
    new_seeds: dict[fx.Node, RowDim] = field(default_factory=dict)
    rows_in_next: dict[fx.Node, RowDim] = field(default_factory=dict)
    """Nodes without rows in this walk -> their rows in the next, once the new seeds have theirs."""

    def run(self) -> None:
        """Fills ``dims`` and ``new_seeds`` in graph order, without nodes behind mixed rows."""
        for node in self.gm.graph.nodes:
            if node.op == "output":
                continue
            if node in self.seeds:
                self.dims[node] = self.seeds[node]
            elif node.op == "placeholder" or (node.op == "get_attr" and _is_attribute(node)):
                self.dims[node] = None
            elif all(source in self.dims for source in node.all_input_nodes):
                self._visit(node)
            elif self.any_source and is_tensor(node) and node.meta["val"].numel() == 1:
                self.dims[node] = None

    def _visit(self, node: fx.Node) -> None:
        """Notes the rows of ``node``, all of whose inputs were visited."""
        rows = {
            source: row for source in node.all_input_nodes if (row := self.dims[source]) is not None
        }
        if not rows:
            if is_repeatable(node):
                self.dims[node] = None
            return
        if is_counter(node):  # a seed or an offset of an attention with rows
            self.dims[node] = None
            return
        carried = self._carried(node, rows)
        if carried is not None and self._all_carry(carried):
            self.dims[node] = carried.out
        elif self.any_source:
            partner = contracted_partner(node, rows)  # ``x.T @ y`` sums over rows that y has too
            if partner is not None:
                self.can_carry(*partner)

    def _carried(self, node: fx.Node, rows: Mapping[fx.Node, RowDim]) -> Carried | None:
        """Returns what the operator's rule says, if the result's size agrees; None: it mixes."""
        rule = rule_of(node)
        carried = None if rule is None else rule(node, rows)
        if carried is None or not _fits(node, carried.out, self.num_rows):
            return None
        return carried

    def _all_carry(self, carried: Carried) -> bool:
        """True if all inputs that must carry rows can, which they do from the next walk on."""
        before_tries = dict(self.new_seeds), dict(self.rows_in_next)
        if all(self.can_carry(source, row) for source, row in carried.needs):
            return True
        self.new_seeds, self.rows_in_next = before_tries
        return False

    def can_carry(self, node: fx.Node, row: RowDim) -> bool:
        """True if ``node`` has rows at ``row``, or has them in the next walk; notes its new seeds.

        A placeholder or a constant becomes a seed, another node gets rows from one of its inputs.
        """
        if not _fits(node, row, self.num_rows):
            return False
        if node in self.rows_in_next:
            return row == self.rows_in_next[node]
        present_row = self.dims.get(node)
        if present_row is not None:
            return row == present_row
        before_tries = dict(self.new_seeds), dict(self.rows_in_next)
        self.rows_in_next[node] = row
        if node in self.dims:
            if node.op == "placeholder" or _is_uniform(node, row):
                self.new_seeds[node] = row
                return True
            if self._from_inputs(node, row):
                return True
        self.new_seeds, self.rows_in_next = before_tries
        if self.any_source and node.op == "call_function" and is_tensor(node):
            self.new_seeds[node] = self.rows_in_next[node] = row
            return True
        return False

    def _from_inputs(self, node: fx.Node, row: RowDim) -> bool:
        """True if one of the inputs can carry the rows that ``node`` must have."""
        for source in node.all_input_nodes:
            for dim, size in enumerate(shape_of(source)):
                if self.dims.get(source) is not None or size < 2 or size % self.num_rows:
                    continue
                source_row = RowDim(dim=dim, factor=size // self.num_rows)
                carried = self._carried(node, {source: source_row})
                if carried is not None and carried.out == row:
                    return self.can_carry(source, source_row) and self._all_carry(carried)
        return False


def _fits(node: fx.Node, row: RowDim, num_rows: int) -> bool:
    shape = shape_of(node)
    return len(shape) > row.dim and shape[row.dim] == num_rows * row.factor


def _is_attribute(node: fx.Node) -> bool:
    """True for a tensor that is an attribute of the graph's module."""
    owner = node.graph.owning_module
    return is_tensor(node) or isinstance(getattr(owner, str(node.target), None), torch.Tensor)


def _is_uniform(node: fx.Node, row: RowDim) -> bool:
    """True for a value with equal rows: a constant, or one entry of its input repeated."""
    if op_name(node) in _UNIFORM:
        return True
    if op_name(node) != "expand":
        return False
    source = node.all_input_nodes[0]
    dim = row.dim - len(shape_of(node)) + len(shape_of(source))
    return dim < 0 or shape_of(source)[dim] == 1


def is_row_wise(node: fx.Node, dims: Mapping[fx.Node, RowDim | None]) -> bool:
    """True when row r of ``node`` needs row r of its inputs only, or for a placeholder.

    Inputs that carry no rows, or are absent from ``dims``, are read whole by every row.
    """
    if node not in dims:
        return False
    row = dims[node]
    if row is None or node.op == "placeholder":
        return True
    rows = {
        source: source_row
        for source in node.all_input_nodes
        if (source_row := dims.get(source)) is not None
    }
    if not rows and _is_uniform(node, row):
        return True
    rule = rule_of(node)
    carried = None if rule is None or not rows else rule(node, rows)
    return carried == Carried(out=row)


def row_layout(value: torch.Tensor, dim: RowDim, num_rows: int) -> int | None:
    """Returns the bytes b of a row, if row r is bytes ``[r * b, (r + 1) * b)`` of a dense storage.

    None when rows are scattered, as in a transposed copy, or when the storage has gaps.
    """
    if value.dim() <= dim.dim or value.shape[dim.dim] != num_rows * dim.factor:
        return None
    order = sorted((axis for axis in range(value.dim()) if value.shape[axis] > 1), key=value.stride)
    expected = 1
    for axis in order:
        if value.stride(axis) != expected:
            return None
        expected *= value.shape[axis]
    if not order or order[-1] != dim.dim:
        return None
    return int(dim.factor * value.stride(dim.dim) * value.element_size())
