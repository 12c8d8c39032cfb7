"""Finds operators that jump: a last digit of their input may change their result by much.

A value that is computed twice may differ in its last digits: a product of fewer rows takes another
kernel, a recomputation is fused otherwise than the forward. Sums and products pass on a difference
that is as small. An index, an equality or a rounding to whole numbers does not: take
``h == h.amax()``; if ``h`` is recomputed and the maximum is not, no entry is equal any more, and
the gradient is 0 / 0. So operators that jump run once (``passes.keep_jumps``); all others may run
as often as a plan likes.
"""

import enum
import math
from collections.abc import Collection, Mapping, Set

import torch
from torch import fx

from memo_compile.analysis.joint_units import tangent_dependents
from memo_compile.analysis.purity import is_known, is_random
from memo_compile.analysis.structure import has_tag, op_name
from memo_compile.analysis.views import is_item, is_tensor, is_view, tensors_of


class Digits(enum.IntEnum):
    """How the last digits of a value may differ if it is computed again."""

    SAME = 0
    """Not at all: it depends on weights alone or is of whole numbers, or it is a jump."""
    WHOLE = 1
    """All of its entries may, as the result of one kernel."""
    PICKED = 2
    """Its entries are entries of another value (a maximum, a slice) and differ with those."""
    MIXED = 3
    """It depends on picked entries and on whole values. An entry of ``h - h.amax()`` is exactly 0,
    but not if only one of the two is computed again."""


_JUMPING = frozenset(
    "floor ceil round trunc frac fix floor_divide fmod remainder sign sgn heaviside nextafter "
    "copysign histc".split()
)
"""Operators that jump although their results are floating-point numbers."""

_JUMPING_COMPOSITES = frozenset(
    "_to_copy sign sgn threshold hardshrink heaviside isclose isin any all bernoulli".split()
)
"""Operators that torch decomposes and that jump. Comparisons in other operators that it decomposes
are of activations, which compare with the place of a kink."""

_UNAFFECTED = frozenset("isnan isinf isfinite isposinf isneginf is_nonzero isreal".split())
"""Tests whose answer no last digit changes."""

_COMPARISONS = frozenset("eq ne lt le gt ge".split())

_PICKS = frozenset(
    "amax amin max min aminmax median nanmedian kthvalue mode sort topk cummax cummin "
    "linalg_vector_norm gather index _unsafe_index index_select take take_along_dim slice select "
    "split split_with_sizes unbind narrow unfold as_strided diagonal scatter_reduce index_reduce "
    "max_pool1d max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d "
    "adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d "
    "_low_memory_max_pool_with_offsets".split()
)
"""Operators that return some of the entries that they are given."""

_COPIES = frozenset(
    "clone _to_copy convert_element_type copy expand cat constant_pad_nd repeat flip roll "
    "slice_scatter select_scatter index_put _unsafe_index_put scatter masked_scatter".split()
)
"""Operators that put entries elsewhere, beside those that torch tags as pointwise."""


def jumps(graph: fx.Graph, weights: Collection[fx.Node] = ()) -> list[fx.Node]:
    """Returns the operators of a joint graph, or of a forward's, that jump; in graph order.

    Left out are

    * operators that read no input but ``weights``, which the same kernels compute again;
    * operators that depend on an incoming gradient, which run once in any case;
    * comparisons with a constant inside activations that torch decomposed and in formulas of the
      backward: there a function has a kink (relu at 0), and the gradient of either side is right.
    """
    runs_once = tangent_dependents(graph)
    fixed = _made_of_weights(graph, weights)
    digits: dict[fx.Node, Digits] = {}
    jumping = []
    for node in graph.nodes:
        if node.op == "placeholder":
            varies = node not in fixed and _has_fractions(node)
            digits[node] = Digits.WHOLE if varies else Digits.SAME
        elif node.op != "call_function" or node in fixed or node in runs_once:
            digits[node] = Digits.SAME
        elif _is_jump(node, digits):
            jumping.append(node)
            digits[node] = Digits.SAME if is_tensor(node) else _digits_of(node, digits, fixed)
        else:
            digits[node] = _digits_of(node, digits, fixed)
    return jumping


def _made_of_weights(graph: fx.Graph, weights: Collection[fx.Node]) -> set[fx.Node]:
    """Returns ``weights``, attributes, and nodes that depend on some and else on constants only."""
    constant: set[fx.Node] = set()
    fixed = set(weights)
    for node in graph.nodes:
        if node.op == "get_attr":
            fixed.add(node)
        elif node.op == "call_function" and not is_random(node):
            sources = set(node.all_input_nodes)
            if sources <= constant:
                constant.add(node)
            elif sources <= constant | fixed:
                fixed.add(node)
    return fixed


def _is_jump(node: fx.Node, digits: Mapping[fx.Node, Digits]) -> bool:
    """True if a last digit of an input may change a result by more than a last digit."""
    varying = [digits[source] for source in node.all_input_nodes if digits[source] != Digits.SAME]
    if not varying or not is_known(node) or is_item(node) or is_view(node):
        return False
    if "attention" in op_name(node):  # the integers that these kernels return are their seeds
        return False
    if any(map(_is_integer, tensors_of(node))):
        return True
    rounds = op_name(node) in _JUMPING or node.kwargs.get("rounding_mode") is not None
    compares = any(map(_is_boolean, tensors_of(node))) and any(
        map(_has_fractions, node.all_input_nodes)
    )
    if not rounds and (not compares or _is_unaffected(node)):
        return False
    # A single value is compared with a constant: an activation does so where it has a kink.
    return len(varying) > 1 or Digits.MIXED in varying or _is_called_by_program(node)


def _is_unaffected(node: fx.Node) -> bool:
    """True for a test whose answer no last digit changes: is it a number, is it infinite."""
    infinite = any(isinstance(value, float) and math.isinf(value) for value in node.args)
    return op_name(node) in _UNAFFECTED or (infinite and op_name(node) in _COMPARISONS)


def _is_called_by_program(node: fx.Node) -> bool:
    """True for an operator that the program's forward calls as it is.

    False for a part of an activation that torch decomposed, and for a derivative: both compare with
    a constant where a function has a kink, and return about the same on both sides of it.
    """
    if node.meta.get("partitioner_tag") == "is_backward":
        return False
    if op_name(node) in _JUMPING and op_name(node) not in ("sign", "sgn"):
        return True
    origin = getattr(node.meta.get("original_aten"), "overloadpacket", None)
    name = "" if origin is None else origin.__name__
    return name in ("", op_name(node)) or name in _JUMPING_COMPOSITES


def _digits_of(node: fx.Node, digits: Mapping[fx.Node, Digits], fixed: Set[fx.Node]) -> Digits:
    """Returns the digits of ``node``, from its inputs'; of a tuple, those of its fractions.

    ``fixed`` are weights, and what depends on them and constants alone (``_made_of_weights``).
    """
    varying = {digits[source] for source in node.all_input_nodes} - {Digits.SAME}
    if is_item(node):
        return digits[node.all_input_nodes[0]] if _has_fractions(node) else Digits.SAME
    if _is_unaffected(node):
        return Digits.SAME
    if not varying:  # an embedding: rows of a table of weights that ids choose
        is_looked_up = not fixed.isdisjoint(node.all_input_nodes)
        return Digits.WHOLE if is_looked_up and _has_fractions(node) else Digits.SAME
    if op_name(node) in _PICKS and not (is_view(node) and _shows_all(node)):
        return Digits.MIXED if Digits.MIXED in varying else Digits.PICKED
    if not is_entrywise(node):
        return Digits.WHOLE
    return varying.pop() if len(varying) == 1 else Digits.MIXED


def is_entrywise(node: fx.Node) -> bool:
    """True if each entry of the result depends on one entry of each input at most."""
    if has_tag(node, torch.Tag.pointwise) or is_view(node) or is_item(node):
        return True
    return op_name(node) in _COPIES or op_name(node) in _PICKS


def _shows_all(view: fx.Node) -> bool:
    """True for a view with as many entries as its source."""
    source = view.all_input_nodes[0]
    both = is_tensor(view) and is_tensor(source)
    return both and view.meta["val"].numel() == source.meta["val"].numel()


def _has_fractions(node: fx.Node) -> bool:
    return any(not (_is_integer(value) or _is_boolean(value)) for value in tensors_of(node))


def _is_boolean(value: torch.Tensor) -> bool:
    return value.dtype == torch.bool


def _is_integer(value: torch.Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex() or _is_boolean(value))
