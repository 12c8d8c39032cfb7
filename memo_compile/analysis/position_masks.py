"""Reads attention masks that depend on positions alone: is all allowed, or all before a token?

The graph that makes the mask is evaluated operator by operator. Tensors of up to a few million
numbers are computed. Larger ones, as masks are, are represented by a ``_Triangle`` of two values;
where a comparison of two vectors makes one, the vectors decide these values.
"""

import enum
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from memo_compile.analysis.structure import op_name

log = logging.getLogger("memo")

COMPUTED_NUMBERS = 2**21
"""Larger tensors are not computed; a mask of 1,024 tokens is."""

_aten = torch.ops.aten


class Allowed(enum.Enum):
    """Which tokens a token sees."""

    ALL = "all"
    CAUSAL = "causal"
    """Itself and those before it."""


@dataclass(frozen=True, slots=True)
class _Triangle:
    """A tensor (..., T, T) of two values."""

    shape: tuple[int, ...]
    values: torch.Tensor
    """(2,): the entries where the column is at most the row, and those where it is larger."""


class _Unknown(Exception):
    """The mask cannot be evaluated: an operator, or a value, is not supported."""


_Value = torch.Tensor | _Triangle


def allowed_by(graph: fx.Graph) -> Allowed | None:
    """Returns what a boolean mask (..., T, T), the result of ``graph``, allows; None: unknown.

    ``graph`` has ATen operators, no inputs, and fake tensors in ``val``.
    """
    try:
        return _read(_result(graph))
    except Exception as error:  # the attention then reads the mask as it is
        log.debug("memo: a mask of positions is not followed: %r", error)
        return None


def _result(graph: fx.Graph) -> "_Value":
    """Evaluates ``graph``; a value is dropped behind its last reader."""
    values: dict[fx.Node, _Value] = {}
    reads_left = {node: len(node.users) for node in graph.nodes}
    for node in graph.nodes:
        if node.op == "output":
            break
        values[node] = _value_of(node, values)
        for source in node.all_input_nodes:
            reads_left[source] -= 1
            if not reads_left[source]:
                del values[source]
    (result,) = node.all_input_nodes
    return values[result]


def _read(mask: _Value) -> Allowed | None:
    """Returns what the mask allows; None: neither all nor all before."""
    if len(mask.shape) < 2 or mask.shape[-1] != mask.shape[-2] or mask.shape[-1] < 2:
        return None
    if isinstance(mask, torch.Tensor):
        if mask.dtype is not torch.bool:
            return None
        if mask.all():
            return Allowed.ALL
        causal = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
        return Allowed.CAUSAL if torch.equal(mask, causal.expand_as(mask)) else None
    if mask.values.dtype is not torch.bool:
        return None
    before, behind = mask.values.tolist()
    return {(True, True): Allowed.ALL, (True, False): Allowed.CAUSAL}.get((before, behind))


def _value_of(node: fx.Node, values: Mapping[fx.Node, _Value]) -> _Value:
    """Returns the value of ``node``, given those of its inputs. Raises _Unknown."""
    target, shape = node.target, tuple(node.meta["val"].shape)
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        raise _Unknown  # the user's own may do something else each time
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        raise _Unknown
    if node.meta["val"].dtype.is_floating_point and op_name(node) not in _EXACT:
        raise _Unknown  # devices round in their own way
    args, kwargs = tree_map_only(fx.Node, values.__getitem__, (node.args, node.kwargs))
    inputs = [values[source] for source in node.all_input_nodes]
    if not any(isinstance(value, _Triangle) for value in inputs):
        if math.prod(shape) <= COMPUTED_NUMBERS:
            return _computed(target, args, kwargs)
        return _large(node, shape, args, kwargs)
    if torch.Tag.pointwise in target.tags or target in _COPIES:
        if any(isinstance(value, _Triangle) and value.shape[-2:] != shape[-2:] for value in inputs):
            raise _Unknown
        return _Triangle(shape, _computed(target, *_on_values(args, kwargs)))
    (first, *more_inputs) = inputs
    if more_inputs or not isinstance(first, _Triangle):
        raise _Unknown
    if target in _CUTS:
        return _cut(target, first, shape, *args[1:])
    if target in _VIEWS and _keeps_rows(node, first.shape, shape):
        return _Triangle(shape, first.values)
    raise _Unknown


_EXACT = frozenset(
    "_to_copy _unsafe_view alias clone detach expand full full_like masked_fill new_full new_ones "
    "new_zeros ones ones_like select slice tril triu unsqueeze view where zeros zeros_like".split()
)
"""Operators that make floating-point numbers without computing any, so that none is rounded."""
_COPIES = frozenset(
    getattr(_aten, name).default
    for name in "_to_copy clone full_like lift_fresh_copy ones_like zeros_like".split()
)
_VIEWS = {_aten.select.int, _aten.slice.Tensor} | {
    getattr(_aten, name).default
    for name in "alias detach expand unsqueeze view _unsafe_view".split()
}
_CUTS = frozenset({_aten.tril.default, _aten.triu.default})
_COMPARED = {"le": (True, False), "lt": (False, False), "gt": (True, True), "ge": (False, True)}
"""``column OP row`` -> (equal numbers count as smaller, "the column is smaller" is negated)."""
_COUNTED = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_MIRRORED = {"le": "ge", "lt": "gt", "gt": "lt", "ge": "le"}


def _computed(target: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Returns the operator's result, computed on the CPU."""
    on_cpu = {"device": torch.device("cpu"), "pin_memory": None}
    kwargs = {key: on_cpu.get(key, value) for key, value in kwargs.items()}
    try:
        value = target(*args, **kwargs)
    except Exception as error:  # an operator that two values do not describe
        raise _Unknown from error
    if not isinstance(value, torch.Tensor):
        raise _Unknown
    return value


def _on_values(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns a pointwise operator's arguments, two values for a triangle. Raises _Unknown."""

    def value(arg: Any) -> Any:
        if isinstance(arg, _Triangle):
            return arg.values
        return _two_values(arg) if isinstance(arg, torch.Tensor) else arg

    return tuple(map(value, args)), {key: value(arg) for key, arg in kwargs.items()}


def _two_values(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the two values of a tensor that is a triangle, or one where all entries are equal."""
    tokens = tensor.shape[-1] if tensor.dim() > 1 else 0
    if tokens < 2 or tensor.shape[-2] != tokens or not tensor.numel():
        return _one_entry(tensor)
    first = tensor[(0,) * (tensor.dim() - 2)]
    values = torch.stack((first[0, 0], first[0, 1]))
    before = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if not torch.equal(torch.where(before, values[0], values[1]).expand_as(tensor), tensor):
        raise _Unknown
    return values


def _one_entry(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the value of all entries, (1,); of shape () if ``tensor`` is, for dtype promotion."""
    first = tensor.reshape(-1)[:1]
    if not first.numel() or not bool((tensor == first).all()):
        raise _Unknown
    return first.reshape((1,) if tensor.dim() else ())


def _large(node: fx.Node, shape: tuple[int, ...], args: Any, kwargs: Any) -> _Triangle:
    """Returns a large tensor (..., T, T) that an operator makes of small ones."""
    assert isinstance(node.target, torch._ops.OpOverload)
    name = op_name(node)
    if len(shape) < 2 or shape[-1] != shape[-2] or shape[-1] < 2:
        raise _Unknown
    if name in ("full", "ones", "zeros"):
        return _Triangle(shape, _computed(node.target, ([2], *args[1:]), kwargs))
    if name in ("new_full", "new_ones", "new_zeros"):
        return _Triangle(shape, _computed(node.target, (args[0], [2], *args[2:]), kwargs))
    if name == "expand":
        return _Triangle(shape, _two_values(args[0]).expand(2))
    if name in ("eq", "ne", *_COMPARED):
        return _Triangle(shape, _compared(node.target, name, shape, args))
    raise _Unknown


def _compared(
    target: torch._ops.OpOverload, name: str, shape: tuple[int, ...], args: Any
) -> torch.Tensor:
    """Returns the two values of a comparison of ``rows`` (..., T, 1) with ``columns`` (..., 1, T).

    Either may be the first argument. If the columns' numbers do not fall, the smaller ones come
    first: counting them for each row tells which entries of the row are true.
    """
    try:  # all entries of each argument may be equal
        return _computed(target, tuple(map(_one_entry, args)), {}).reshape(-1).expand(2)
    except _Unknown:
        pass
    if name not in _COMPARED or not all(isinstance(arg, torch.Tensor) for arg in args):
        raise _Unknown
    first, second = (arg.reshape((1,) * (len(shape) - arg.dim()) + arg.shape) for arg in args)
    if first.shape[-1] == 1 and second.shape[-2] == 1:
        first, second, name = second, first, _MIRRORED[name]
    elif first.shape[-2] != 1 or second.shape[-1] != 1:
        raise _Unknown
    leading, tokens = shape[:-2], shape[-1]
    columns = first.expand(*leading, 1, tokens).reshape(-1, tokens)
    rows = second.expand(*leading, tokens, 1).reshape(-1, tokens)
    if columns.dtype not in _COUNTED or columns.dtype != rows.dtype:
        raise _Unknown
    if bool((columns[:, 1:] < columns[:, :-1]).any()):
        raise _Unknown
    counts_equal, is_opposite = _COMPARED[name]
    counts = torch.searchsorted(columns.contiguous(), rows.contiguous(), right=counts_equal)
    before, behind = _values_of_counts(counts, tokens)
    return torch.tensor([before != is_opposite, behind != is_opposite])


def _values_of_counts(counts: torch.Tensor, tokens: int) -> tuple[bool, bool]:
    """Returns the two values of a tensor that is true in the first ``counts[:, i]`` of row i."""
    if bool((counts == tokens).all()):
        return True, True
    if bool((counts == 0).all()):
        return False, False
    if bool((counts == torch.arange(1, tokens + 1)).all()):
        return True, False
    raise _Unknown


def _cut(
    target: torch._ops.OpOverload, triangle: _Triangle, shape: tuple[int, ...], diagonal: int = 0
) -> _Triangle:
    """Returns the triangle after ``tril`` or ``triu`` along its own diagonal."""
    is_lower = target is _aten.tril.default
    if diagonal != (0 if is_lower else 1):
        raise _Unknown
    values = triangle.values.clone()
    values[1 if is_lower else 0] = 0
    return _Triangle(shape, values)


def _keeps_rows(node: fx.Node, source_shape: Sequence[int], shape: Sequence[int]) -> bool:
    """True if the view's last two dimensions are those of its source."""
    if tuple(shape[-2:]) != tuple(source_shape[-2:]) or len(shape) < 2:
        return False
    dim = node.args[1] if len(node.args) > 1 else 0
    rank = len(shape) if node.target is _aten.unsqueeze.default else len(source_shape)
    is_leading = isinstance(dim, int) and dim % rank < rank - 2
    if node.target is _aten.slice.Tensor:
        return is_leading or tuple(shape) == tuple(source_shape)
    return is_leading or node.target not in (_aten.unsqueeze.default, _aten.select.int)
