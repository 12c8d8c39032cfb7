"""Which operators jump: where a last digit of what they read differs, their result is another.

What is computed twice may differ in its last digits: a product of fewer rows takes another kernel,
a recomputation is fused otherwise than the forward. Sums and products pass such a difference on as
it is. An index, an equality or a rounding to whole numbers does not: with ``h == h.amax()``, the
maximum kept and ``h`` made again, no entry is equal any more, and its gradient is 0 / 0. So what
jumps runs once (``passes.keep_jumps``), and everything else may run as often as a plan likes.
"""

import enum
import math
from collections.abc import Collection, Iterator, Mapping, Set

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from memo_compile.analysis.joint_units import tangent_dependents
from memo_compile.analysis.purity import is_known, is_random
from memo_compile.analysis.structure import has_tag, op_name
from memo_compile.analysis.views import is_item, is_tensor, is_view


class Digits(enum.IntEnum):
    """What is known of the last digits of a value, were it made again."""

    SAME = 0
    """They are the same: it is made of weights alone or of whole numbers, or it is a jump."""
    OWN = 1
    """They may differ."""
    PICKED = 2
    """They are those of entries of another value: a maximum's, a slice's."""
    BOTH = 3
    """It is made of such entries and of whole values: of ``h - h.amax()`` an entry is exactly 0,
    which it no longer is where only one of the two is made again."""


_JUMPING = frozenset(
    "floor ceil round trunc frac fix floor_divide fmod remainder sign sgn heaviside nextafter "
    "copysign histc".split()
)
"""Operators that jump though their results are fractions."""

_JUMP_AS_A_WHOLE = frozenset(
    "_to_copy sign sgn threshold hardshrink heaviside isclose isin any all bernoulli".split()
)
"""Of the operators that torch takes apart those that jump; the others are activations."""

_SURE = frozenset("isnan isinf isfinite isposinf isneginf is_nonzero isreal".split())
"""What no last digit changes."""

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
    """The operators of a joint graph, or of a forward's, that jump; in graph order.

    Not among them is what reads ``weights`` and nothing else that is given: it is made again by
    the same kernels. Nor is what depends on an incoming gradient: it runs once as it is. Of the
    backward's own formulas, and of activations that torch took apart, those are left out that
    compare a value with a constant: a kink (relu at 0), on both sides of which a gradient is right.
    """
    after = tangent_dependents(graph)
    fixed = _made_of(graph, weights)
    digits: dict[fx.Node, Digits] = {}
    found = []
    for node in graph.nodes:
        if node.op == "placeholder":
            varies = node not in fixed and _has_fractions(node)
            digits[node] = Digits.OWN if varies else Digits.SAME
        elif node.op != "call_function" or node in fixed or node in after:
            digits[node] = Digits.SAME
        elif _is_jump(node, digits):
            found.append(node)
            digits[node] = Digits.SAME if is_tensor(node) else _passed_on(node, digits, fixed)
        else:
            digits[node] = _passed_on(node, digits, fixed)
    return found


def _made_of(graph: fx.Graph, weights: Collection[fx.Node]) -> set[fx.Node]:
    """``weights``, and what is made of them and constants alone."""
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
    """True where a last digit of an input changes a result by more than a last digit."""
    read = [digits[source] for source in node.all_input_nodes if digits[source] != Digits.SAME]
    if not read or not is_known(node) or is_item(node) or is_view(node):
        return False
    if "attention" in op_name(node):  # the integers that these kernels return are their seeds
        return False
    if any(map(_is_whole, _results(node))):
        return True
    rounds = op_name(node) in _JUMPING or node.kwargs.get("rounding_mode") is not None
    asks = any(map(_is_truth, _results(node))) and _reads_fractions(node)
    if not rounds and (not asks or _is_sure(node)):
        return False
    return len(read) > 1 or Digits.BOTH in read or _is_the_users(node)


def _is_sure(node: fx.Node) -> bool:
    """True for a question that no last digit answers otherwise: is it a number, is it infinite."""
    infinite = any(isinstance(value, float) and math.isinf(value) for value in node.args)
    return op_name(node) in _SURE or (infinite and op_name(node) in _COMPARISONS)


def _is_the_users(node: fx.Node) -> bool:
    """True for an operator of the forward that is no part of an activation that torch took apart.

    A derivative that compares with a constant does so where the function has a kink, and so do
    activations: what they return is the same on both sides.
    """
    if node.meta.get("partitioner_tag") == "is_backward":
        return False
    if op_name(node) in _JUMPING and op_name(node) not in ("sign", "sgn"):
        return True
    origin = getattr(node.meta.get("original_aten"), "overloadpacket", None)
    name = "" if origin is None else origin.__name__
    return name in ("", op_name(node)) or name in _JUMP_AS_A_WHOLE


def _passed_on(node: fx.Node, digits: Mapping[fx.Node, Digits], fixed: Set[fx.Node]) -> Digits:
    """What is known of the results' digits; of those of a tuple, where they are fractions."""
    read = {digits[source] for source in node.all_input_nodes} - {Digits.SAME}
    if is_item(node):
        return digits[node.all_input_nodes[0]] if _has_fractions(node) else Digits.SAME
    if _is_sure(node):
        return Digits.SAME
    if not read:  # an embedding: what ids choose of a table
        is_looked_up = not fixed.isdisjoint(node.all_input_nodes)
        return Digits.OWN if is_looked_up and _has_fractions(node) else Digits.SAME
    if op_name(node) in _PICKS and not (is_view(node) and _shows_all(node)):
        return Digits.BOTH if Digits.BOTH in read else Digits.PICKED
    if not is_entrywise(node):
        return Digits.OWN
    return read.pop() if len(read) == 1 else Digits.BOTH


def is_entrywise(node: fx.Node) -> bool:
    """True for an operator that makes an entry of one of each input, or puts entries elsewhere."""
    if has_tag(node, torch.Tag.pointwise) or is_view(node) or is_item(node):
        return True
    return op_name(node) in _COPIES or op_name(node) in _PICKS


def _shows_all(node: fx.Node) -> bool:
    source = node.all_input_nodes[0]
    return (
        is_tensor(node)
        and is_tensor(source)
        and node.meta["val"].numel() == source.meta["val"].numel()
    )


def _results(node: fx.Node) -> Iterator[torch.Tensor]:
    leaves = tree_leaves(node.meta.get("val"))
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def _has_fractions(node: fx.Node) -> bool:
    return any(not (_is_whole(value) or _is_truth(value)) for value in _results(node))


def _reads_fractions(node: fx.Node) -> bool:
    return any(map(_has_fractions, node.all_input_nodes))


def _is_truth(value: torch.Tensor) -> bool:
    return value.dtype == torch.bool


def _is_whole(value: torch.Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex() or _is_truth(value))
