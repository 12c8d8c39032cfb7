"""Rules that say for each operator where the rows of its inputs appear in its result.

A rule gets the inputs of a node that carry rows. It returns the dimension of the rows in the
result, and the other inputs that must carry rows too. It returns None if one row of the result
depends on several rows of an input (the operator mixes rows), and if it cannot tell.

Rules go by what a dimension means to the operator, never by sizes that agree: batch, tokens, heads
and width may all be equal, and any but the rows may be 1 (there are always two rows or more). An
operand without rows is read whole by every row. That is right where the operator broadcasts it
along the rows (pointwise operators, products' addends, an attention's mask: the operand has size 1
there or lacks the dimension), and where it has no rows (weights, tables).
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memo_compile.analysis.purity import is_declared, is_repeatable
from memo_compile.analysis.structure import argument, has_tag, op_name, schema_of
from memo_compile.analysis.views import is_tensor, shape_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDim:
    """Row r is entries ``[r * factor, (r + 1) * factor)`` of ``dim``, num_rows * factor in all."""

    dim: int
    factor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """The result carries rows at ``out``, provided that every input in ``needs`` does as well."""

    out: RowDim
    needs: tuple[tuple[fx.Node, RowDim], ...] = ()


Rows = Mapping[fx.Node, RowDim]
Rule = Callable[[fx.Node, Rows], Carried | None]

DimRule = Callable[[fx.Node, int, tuple[int, ...]], int | None]
"""(node, dimension ``row_dim`` of the rows in its first argument, that argument's ``shape``) ->
dimension of the rows in the result; None: it mixes them."""


def rule_of(node: fx.Node) -> Rule | None:
    """Returns the node's rule; None: it is unknown, random, custom, a collective or a write."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        return _getitem
    if not is_repeatable(node) or is_declared(node):
        return None
    name = op_name(node)
    if is_attention(node):
        return _attention
    if node.target in _BY_OVERLOAD:
        return _BY_OVERLOAD[node.target]
    if name in _BY_NAME:
        return _BY_NAME[name]
    return _broadcast if has_tag(node, torch.Tag.pointwise) else None


def _node(value: object) -> fx.Node:
    assert isinstance(value, fx.Node), f"expected a node, got {value!r}"
    return value


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [source for source in node.all_input_nodes if is_tensor(source)]


def _of_first(dim_rule: DimRule) -> Rule:
    """Makes a rule of a DimRule; it answers only if the first argument alone carries rows."""

    @functools.wraps(dim_rule)
    def rule(node: fx.Node, rows: Rows) -> Carried | None:
        source = node.args[0]
        if not isinstance(source, fx.Node) or set(rows) != {source}:
            return None
        row = rows[source]
        dim = dim_rule(node, row.dim, shape_of(source))
        if dim is None or _num_uses(node, source) > 1:
            return None
        return Carried(out=RowDim(dim=dim, factor=row.factor))

    return rule


def _num_uses(node: fx.Node, source: fx.Node) -> int:
    """Counts the arguments that are ``source``: in two roles its rows mean different things."""
    arguments: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), arguments.append)
    return arguments.count(source)


def _dims(node: fx.Node, name: str, ndim: int) -> set[int] | None:
    """Returns the dimensions that an argument names, counted from 0; None: it names all."""
    value = argument(node, name)
    if value is None or value == []:
        return None
    return {dim % ndim for dim in (value if isinstance(value, list | tuple) else [value])}


def _broadcast(node: fx.Node, rows: Rows) -> Carried | None:
    """Inputs are aligned at their last dimension, like those of pointwise operators.

    Where the rows are, an operand has size 1 or lacks the dimension, and is broadcast, or it has
    the rows' size and must carry rows: ``x[T, C] * w[T]`` with T == C reads w along C.
    """
    return _join(rows, _tensors(node), len(shape_of(node)), broadcasts=True)


def _join(
    rows: Rows, operands: Sequence[fx.Node], ndim: int, *, broadcasts: bool
) -> Carried | None:
    """Returns the rows of the result, of ``ndim`` dimensions; None: operands' rows do not meet.

    Operands are aligned at their last dimension. One of size 1 where the rows are may lack rows
    only if the operator ``broadcasts`` it; others without rows must get them.
    """
    row_dims = {
        RowDim(dim=row.dim + ndim - len(shape_of(source)), factor=row.factor)
        for source, row in rows.items()
    }
    if len(row_dims) != 1:
        return None
    (out,) = row_dims
    needs = []
    for source in operands:
        dim = out.dim - ndim + len(shape_of(source))
        is_broadcast = dim < 0 or (broadcasts and shape_of(source)[dim] == 1)
        if source not in rows and not is_broadcast:
            needs.append((source, RowDim(dim=dim, factor=out.factor)))
    return Carried(out=out, needs=tuple(needs))


def _view(node: fx.Node, rows: Rows) -> Carried | None:
    """The rows' dimension of the result has as many entries before it, and the rows outermost.

    An entry's row follows from its flat position and from the entries inside of one row. Those
    agree where the product of the sizes before the dimension does and the rows divide its size:
    [T, H] -> [T * H] keeps rows T, [H, T] -> [H * T] does not unless H is 1. Of several dimensions
    with the same product before them all but the last have size 1, which holds no two rows.
    """
    source = node.all_input_nodes[0]
    row, shape = rows[source], shape_of(source)
    num_rows, outside = shape[row.dim] // row.factor, math.prod(shape[: row.dim])
    for dim, size in enumerate(shape_of(node)):
        if math.prod(shape_of(node)[:dim]) == outside and size > 1 and size % num_rows == 0:
            return Carried(out=RowDim(dim=dim, factor=size // num_rows))
    return None


@_of_first
def _permute(node: fx.Node, row_dim: int, shape: tuple[int, ...]) -> int:
    """``permute``, ``t``, ``transpose``: the rows move with their dimension, whatever the sizes."""
    order = list(range(len(shape)))
    if op_name(node) == "permute":
        order = [axis % len(order) for axis in argument(node, "dims")]
    elif op_name(node) == "t":
        order.reverse()
    else:
        dim0, dim1 = (argument(node, name) % len(order) for name in ("dim0", "dim1"))
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return order.index(row_dim)


@_of_first
def _unsqueeze(node: fx.Node, row_dim: int, shape: tuple[int, ...]) -> int:
    """A dimension before the rows moves them by one."""
    return row_dim + (argument(node, "dim") % (len(shape) + 1) <= row_dim)


@_of_first
def _squeeze(node: fx.Node, row_dim: int, shape: tuple[int, ...]) -> int:
    """Dimensions of size 1 go, all or those that are named; the rows' own has two entries or more.

    A part of one row is another matter, which the slicer checks: there the rows' own goes as well.
    """
    named = set(range(len(shape)))
    if "dim" in _argument_names(node):
        named = _dims(node, "dim", len(shape)) or set()
    return row_dim - len([axis for axis in range(row_dim) if shape[axis] == 1 and axis in named])


def _argument_names(node: fx.Node) -> set[str]:
    return {declared.name for declared in schema_of(node).arguments}


@_of_first
def _slice(node: fx.Node, row_dim: int, shape: tuple[int, ...]) -> int | None:
    """It cuts another dimension than the rows', or nothing."""
    at = argument(node, "dim") % len(shape)
    return None if at == row_dim and shape_of(node) != shape else row_dim


@_of_first
def _drop_dim(node: fx.Node, row_dim: int, shape: tuple[int, ...]) -> int | None:
    """``select`` and ``unbind`` remove the dimension that they name; it must not be the rows'."""
    at = argument(node, "dim") % len(shape)
    return None if at == row_dim else row_dim - (at < row_dim)


def _along(node: fx.Node, rows: Rows) -> Carried | None:
    """Inputs have the same dimensions; entries are mixed or moved along those that are named.

    None of these operators broadcasts: an index of size 1 along the rows reads, or writes, row 0
    alone. So every operand must have all the rows.
    """
    ndim = len(shape_of(node))
    operands = _tensors(node)
    if any(len(shape_of(source)) != ndim for source in operands):
        return None
    joined = _join(rows, operands, ndim, broadcasts=False)
    name = "dim" if "dim" in _argument_names(node) else "dims"
    mixed = _dims(node, name, ndim)
    if joined is None or mixed is None or joined.out.dim in mixed:
        return None
    return joined


@_of_first
def _reduction(node: fx.Node, row_dim: int, shape: tuple[int, ...]) -> int | None:
    """It reduces along the dimensions that it names, none of which may be the rows'."""
    reduced = _dims(node, "dim", len(shape))
    if reduced is None or row_dim in reduced:
        return None
    keeps_dims = argument(node, "keepdim") or op_name(node) == "prepare_softmax_online"
    return row_dim if keeps_dims else row_dim - len([axis for axis in reduced if axis < row_dim])


def _matmul(node: fx.Node, rows: Rows) -> Carried | None:
    """``mm`` and ``bmm``, with an addend in front for ``addmm`` and ``baddbmm``.

    ``[B, M, K] x [B, K, N] -> [B, M, N]``: rows at M come from the left operand, rows at N from the
    right, and the other is read whole: it may have none. Rows at B must be in both, as the batch is
    not broadcast. Rows at K are summed over: they are mixed. An addend is broadcast.
    """
    *addend, left, right = node.args[: 3 if op_name(node) in ("addmm", "baddbmm") else 2]
    left, right = _node(left), _node(right)
    ndim = len(shape_of(left))
    summed_dim = {left: ndim - 1, right: ndim - 2}
    if left is right or any(
        operand in rows and rows[operand].dim == dim for operand, dim in summed_dim.items()
    ):
        return None
    addends = [item for item in addend if isinstance(item, fx.Node)]
    joined = _join(rows, addends, ndim, broadcasts=True)
    if joined is None:
        return None
    needs = list(joined.needs)
    read_whole = {ndim - 2: right, ndim - 1: left}.get(joined.out.dim)  # None: rows at B
    if read_whole in rows:
        return None
    for source in (left, right):
        if source is not read_whole and source not in rows:
            needs.append((source, joined.out))
    return Carried(out=joined.out, needs=tuple(needs))


def contracted_partner(node: fx.Node, rows: Rows) -> tuple[fx.Node, RowDim] | None:
    """Returns ``y``, and its rows, for a product such as ``x.T @ y`` that sums over rows of x.

    None: it is no such product, or both operands are known to have rows.
    """
    if op_name(node) not in ("mm", "bmm"):
        return None
    left, right = map(_node, node.args[:2])
    ndim = len(shape_of(left))
    for source, dim, other, at in ((left, ndim - 1, right, ndim - 2), (right, ndim - 2, left, -1)):
        if source in rows and rows[source].dim == dim and other not in rows:
            return other, RowDim(dim=at % ndim, factor=rows[source].factor)
    return None


def _embedding(node: fx.Node, rows: Rows) -> Carried | None:
    """The result has the indices' dimensions first; the table is read whole."""
    indices = _node(node.args[1])
    if set(rows) != {indices} or _num_uses(node, indices) > 1:
        return None
    return Carried(out=rows[indices])


def _index(node: fx.Node, rows: Rows) -> Carried | None:
    """``x[i, j]``: the table or the indices carry rows, not both; indices stand side by side.

    Indices broadcast against each other. Their dimensions stand in the result where the first
    indexed dimension of the table was; the table's other dimensions are read whole.
    """
    table, index_args = _node(node.args[0]), node.args[1]
    assert isinstance(index_args, list | tuple)
    dims = [position for position, index in enumerate(index_args) if index is not None]
    indices = [index for index in index_args if isinstance(index, fx.Node)]
    if not dims or dims != list(range(dims[0], dims[-1] + 1)) or table in indices:
        return None
    if any(index.meta["val"].dtype in (torch.bool, torch.uint8) for index in indices):
        return None
    index_ndim = max(len(shape_of(index)) for index in indices)
    if table not in rows:
        joined = _join(rows, indices, index_ndim, broadcasts=True)
        if joined is None:
            return None
        out = RowDim(dim=joined.out.dim + dims[0], factor=joined.out.factor)
        return Carried(out=out, needs=joined.needs)
    row = rows[table]
    if len(rows) > 1 or row.dim in dims:
        return None
    shift = index_ndim - len(dims) if row.dim > dims[-1] else 0
    return Carried(out=RowDim(dim=row.dim + shift, factor=row.factor))


def _index_select(node: fx.Node, rows: Rows) -> Carried | None:
    """The only dimension of the indices replaces the table's dimension that they select from."""
    table, indices = _node(node.args[0]), argument(node, "index")
    if table is indices:
        return None
    at = argument(node, "dim") % len(shape_of(table))
    if set(rows) == {indices}:
        return Carried(out=RowDim(dim=at, factor=rows[indices].factor))
    if set(rows) == {table} and rows[table].dim != at:
        return Carried(out=rows[table])
    return None


@_of_first
def _norm(node: fx.Node, row_dim: int, shape: tuple[int, ...]) -> int | None:
    """The last ``len(normalized_shape)`` dimensions are mixed; statistics keep them with size 1."""
    return row_dim if row_dim < len(shape) - len(argument(node, "normalized_shape")) else None


_BATCHED = frozenset("query key value grad_out grad_out_ out logsumexp".split())
"""Arguments of the attention operators with the batch in dimension 0: [B, H, T, ...]."""

_MASKS = frozenset(("attn_mask", "attn_bias"))
"""Arguments that are broadcast, aligned at their last dimension, against [B, H, T, S]."""

_COUNTERS = frozenset(
    "philox_seed philox_offset rng_state unused debug_attn_mask "
    "cum_seq_q cum_seq_k max_q max_k".split()
)
"""Arguments and results that depend on no row: random states (dropout is off), and the bounds of
nested tensors, which dense ones do not have."""

_ATTENTION_KERNELS = (
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable"
).split()


def is_attention(node: fx.Node) -> bool:
    """True for an attention kernel, forward or backward, whose arguments are known here."""
    return op_name(node).removesuffix("_backward") in _ATTENTION_KERNELS


def _attention(node: fx.Node, rows: Rows) -> Carried | None:
    """It keeps the sequences of a batch apart, and heads, but not tokens.

    Several heads of queries may share one of keys and values: a row is then such a group. A mask of
    four dimensions has batch and heads in front, of size 1 where it is broadcast. A mask of fewer
    has none: dimension 0 of [T, S] is the queries', also where there are as many sequences.
    """
    at = {(row.dim, shape_of(source)[row.dim] // row.factor) for source, row in rows.items()}
    if len(at) != 1:
        return None
    ((dim, num_rows),) = at
    if dim not in (0, 1):
        return None
    row_of: dict[fx.Node, RowDim | None] = {}
    for name in _argument_names(node):
        source = argument(node, name)
        if not isinstance(source, fx.Node):
            continue
        shape = shape_of(source)
        if name in _BATCHED:
            has_rows = True
            if (len(shape) != 4 and name != "logsumexp") or shape[dim] % num_rows:
                return None
        elif name in _MASKS:
            has_rows = len(shape) == 4 and shape[dim] != 1
            if dim == 1 and (len(shape) == 3 or (has_rows and shape[1] % num_rows)):
                return None
        elif name in _COUNTERS:
            has_rows = False
        else:
            return None
        row = RowDim(dim=dim, factor=shape[dim] // num_rows) if has_rows else None
        if row_of.setdefault(source, row) != row:
            return None
    if any(row_of[source] != row for source, row in rows.items()):
        return None
    needs = ((source, row) for source, row in row_of.items() if row and source not in rows)
    query = row_of[argument(node, "query")]
    return None if query is None else Carried(out=query, needs=tuple(needs))


def is_counter(node: fx.Node) -> bool:
    """True for a result of an attention kernel that depends on no row: a seed, an offset."""
    if node.target is not operator.getitem:
        return False
    maker, position = _node(node.args[0]), node.args[1]
    assert isinstance(position, int)
    if op_name(maker) not in _ATTENTION_KERNELS:
        return False
    return schema_of(maker).returns[position].name in _COUNTERS


@_of_first
def _images(node: fx.Node, row_dim: int, shape: tuple[int, ...]) -> int | None:
    """Convolutions and pooling: rows are images, dimension 0 of the first input.

    Groups, stride and padding concern the other dimensions only. A convolution's input without a
    batch, which has a dimension less than the weight, has channels there. Pooling treats every
    channel by itself, so that channels in front are rows as well.
    """
    weight = argument(node, "weight")
    has_batch = not isinstance(weight, fx.Node) or len(shape_of(weight)) == len(shape)
    return 0 if row_dim == 0 and len(shape) >= 3 and has_batch else None


@_of_first
def _pad(node: fx.Node, row_dim: int, shape: tuple[int, ...]) -> int | None:
    """It must not pad the rows' dimension; ``pad`` has two sides a dimension, the last first."""
    from_end = len(shape) - 1 - row_dim
    return None if any(argument(node, "pad")[2 * from_end : 2 * from_end + 2]) else row_dim


def _repeat(node: fx.Node, rows: Rows) -> Carried | None:
    """Inputs are aligned at their last dimension; the rows' dimension must not be repeated."""
    joined = _broadcast(node, rows)
    if joined is None or argument(node, "repeats")[joined.out.dim] != 1:
        return None
    return joined


def _getitem(node: fx.Node, rows: Rows) -> Carried | None:
    """An element of a tuple has its rows at the dimension that the operator's rule names.

    The rule names it for the first element. All others have theirs there too, except for the
    gradient of an attention's mask, which is a sum over what the mask is broadcast along. They may
    have another number of entries in each row: of 8 heads of queries that share 2 of keys, a row is
    4 in the gradient of queries and 1 in that of keys.
    """
    maker, position = _node(node.args[0]), node.args[1]
    of_mask = op_name(maker).endswith("attention_backward") and position == 3
    if not is_tensor(node) or is_counter(node) or of_mask:
        return None
    row = rows[maker]
    if row.dim >= len(shape_of(node)):
        return Carried(out=row)
    factor, left = divmod(shape_of(node)[row.dim] * row.factor, shape_of(maker)[row.dim])
    return None if left else Carried(out=RowDim(dim=row.dim, factor=factor))


def _select_scatter(node: fx.Node, rows: Rows) -> Carried | None:
    """``out[.., index, ..] = src`` along one dimension, which ``src`` does not have.

    Nothing is broadcast, so that both must carry rows.
    """
    into, source = _node(node.args[0]), argument(node, "src")
    ndim = len(shape_of(into))
    at = argument(node, "dim") % ndim
    out_dims = set()
    if into in rows:
        out_dims.add(rows[into])
    if source in rows:
        row = rows[source]
        out_dims.add(RowDim(dim=row.dim + (at <= row.dim), factor=row.factor))
    if len(out_dims) != 1:
        return None
    (out,) = out_dims
    if out.dim == at:
        return None
    source_row = RowDim(dim=out.dim - (at < out.dim), factor=out.factor)
    operands = ((into, out), (source, source_row))
    return Carried(out=out, needs=tuple((node, row) for node, row in operands if node not in rows))


_aten = torch.ops.aten

_NAMES: tuple[tuple[Rule, str], ...] = (
    (_broadcast, "clone _to_copy alias detach lift_fresh_copy convert_element_type copy expand"),
    (_broadcast, "full_like zeros_like ones_like empty_like masked_fill"),
    (_view, "view reshape _unsafe_view"),
    (_permute, "permute transpose t"),
    (_unsqueeze, "unsqueeze"),
    (_squeeze, "squeeze"),
    (_slice, "slice"),
    (_drop_dim, "select unbind"),
    (_along, "cat split split_with_sizes unsafe_split unsafe_split_with_sizes flip sort topk"),
    (_along, "_softmax _log_softmax _safe_softmax _softmax_backward_data"),
    (_along, "_log_softmax_backward_data cumsum cumprod logcumsumexp"),
    (_along, "gather scatter scatter_add scatter_reduce slice_scatter"),
    (_select_scatter, "select_scatter"),
    (_reduction, "sum mean prod amax amin argmax argmin var std var_mean std_mean logsumexp"),
    (_reduction, "any all max min median linalg_vector_norm prepare_softmax_online"),
    (_matmul, "mm addmm bmm baddbmm"),
    (_embedding, "embedding"),
    (_index, "index _unsafe_index"),
    (_index_select, "index_select"),
    (_norm, "native_layer_norm _fused_rms_norm"),
    (_images, "convolution max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d"),
    (_pad, "constant_pad_nd"),
    (_repeat, "repeat"),
)
"""Operators of aten and prims by their rule, without namespace and overload. To add one see
CONTRIBUTING; tests/graph/test_row_rules.py compares each with the whole."""

_BY_NAME = {name: rule for rule, names in _NAMES for name in names.split()}
_BY_OVERLOAD: dict[Any, Rule | None] = {
    _aten.view.dtype: None,
    _aten.max.default: None,
    _aten.min.default: None,
    _aten.max.other: _broadcast,
    _aten.min.other: _broadcast,
    _aten.median.default: None,
}
"""Overloads that differ from others of their name."""
