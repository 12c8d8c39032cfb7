"""Computes the gradient of a loss head in the forward, where its logits are, and scales it later.

A backward is linear in the incoming gradient. For one scalar loss that gradient is a number, which
is not known in the forward but may be multiplied in at the end. So the logits are computed once,
are not saved, and in tiles never exist as a whole (Liger-Kernel, ALST).
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils.checkpoint import CheckpointPolicy

from memo_compile.analysis.joint_units import UNIT, is_tangent, tag_units, tangent_dependents
from memo_compile.analysis.purity import is_pure
from memo_compile.analysis.structure import GRADIENT, op_name
from memo_compile.analysis.views import base_of, bytes_of, is_tensor, is_view, viewed

MIN_BYTES = 2**20
"""The pass changes nothing if the widest value has fewer bytes, because it would gain nothing."""

_IN_FIRST = frozenset("neg sum mean convert_element_type _to_copy clone".split())
"""Operators that are linear in their first argument, and have no other tensor argument."""

_aten = torch.ops.aten
_to_dtype = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientOfLoss:
    """Moves the head's backward, from the loss to the first narrow gradients, to the forward.

    Rewrite, with one tangent t, a number (in brackets the half that runs it):
        p  = softmax(logits)  [forward]        p   = softmax(logits)  [forward]
        dz = mul(p, t)        [backward]       dz  = mul(p, 1)        [forward]
        dw = mm(dz.T, x)      [backward]  ->   dw1 = mm(dz.T, x)      [forward, saved]
        dx = mm(dz, w)        [backward]       dx1 = mm(dz, w)        [forward, saved]
                                               dw  = mul(dw1, t)      [backward]
                                               dx  = mul(dx1, t)      [backward]

    Only operators that are known to be linear move, and none in float16 or float8, whose small
    gradients need t. The pass changes nothing if the saved gradients are larger than the widest
    value.
    """

    name: ClassVar[str] = "loss-gradient"
    is_required: ClassVar[bool] = False

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        tangents = [node for node in gm.graph.find_nodes(op="placeholder") if is_tangent(node)]
        if len(tangents) != 1 or not is_tensor(tangents[0]) or tangents[0].meta["val"].dim():
            return PassResult(gm, False)
        (tangent,) = tangents
        head = _head(gm, tangent)
        ends = [node for node in head if any(user not in head for user in node.users)]
        if not head or sum(map(bytes_of, ends)) > max(map(bytes_of, head)):
            return PassResult(gm, False)
        if any(is_view(base_of(end)) for end in ends):  # a part of a value: more would be saved
            return PassResult(gm, False)
        _move(gm, tangent, head, ends)
        return PassResult(gm, True)


def _head(gm: fx.GraphModule, tangent: fx.Node) -> dict[fx.Node, None]:
    """Returns the nodes to move, in order; empty: too small, coarse, or not known to be linear.

    They are the wide values of the last unit's backward, all that makes them, and their readers.
    """
    linear = _linear(gm, tangent)
    widest = max(map(bytes_of, linear), default=0)
    wide = {node for node in linear if 2 * bytes_of(node) >= widest}
    if widest < MIN_BYTES or any(map(_is_coarse, linear)):
        return {}
    head = set(wide)
    for node in wide:
        head.update(node.users)
    for node in reversed(linear):
        if node in head:
            head.update(source for source in node.all_input_nodes if source in linear)
    return {node: None for node in linear if node in head} if head <= linear.keys() else {}


def _linear(gm: fx.GraphModule, tangent: fx.Node) -> dict[fx.Node, None]:
    """Returns the nodes of the last unit's backward known to be linear in ``tangent``, in order."""
    last_unit = tag_units(gm).num_units - 1
    dependent = tangent_dependents(gm.graph)
    linear: dict[fx.Node, None] = {}
    for node in gm.graph.nodes:
        sources = dependent.intersection(node.all_input_nodes)
        if (
            node in dependent
            and node.op == "call_function"
            and node.meta.get(UNIT) in (None, last_unit)
            and is_tensor(node)
            and node.meta["val"].is_floating_point()
            and is_pure(node)
            and all(source in linear or source is tangent for source in sources)
            and _is_linear(node, dependent)
        ):
            linear[node] = None
    return linear


def _is_linear(node: fx.Node, dependent: Container[object]) -> bool:
    """True if it is known that c times the ``dependent`` arguments give c times the result."""
    flags = [argument in dependent for argument in (*node.args, *node.kwargs.values())]
    name, first, num_dependent = op_name(node), flags[0], sum(flags)
    if is_view(node) or name in _IN_FIRST:
        return first and num_dependent == 1
    if name in ("mul", "mm", "bmm"):
        return num_dependent == 1
    if name in ("add", "sub"):
        return num_dependent == 2
    if name == "div":
        return first and num_dependent == 1 and "rounding_mode" not in node.kwargs
    if name == "where" and not first:
        branches = node.args[1:]
        return all(branch in dependent or _is_zero(branch) for branch in branches)
    if name == "constant_pad_nd":
        return first and num_dependent == 1 and all(map(_is_zero, node.args[2:]))
    return False


def _is_zero(value: object) -> bool:
    if isinstance(value, fx.Node):
        return op_name(value) in ("full", "scalar_tensor") and _is_zero(value.args[-1])
    return isinstance(value, int | float) and value == 0


def _move(
    gm: fx.GraphModule, tangent: fx.Node, head: Mapping[fx.Node, None], ends: Sequence[fx.Node]
) -> None:
    """Moves ``head`` to the forward, for a gradient of 1.

    The backward's readers of its ``ends`` get these times ``tangent``, the true gradient.
    """
    value = tangent.meta["val"]
    first = next(iter(head))
    with gm.graph.inserting_before(first):
        options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        ones = gm.graph.call_function(_aten.full.default, ([], 1), options)
    ones.meta = {**_forward(first), "val": torch.ones_like(value)}
    for node in head:
        node.meta = {**_forward(node), GRADIENT: True}
        node.replace_input_with(tangent, ones)
    scaled = {ones: tangent}  # a node of the head -> the node times ``tangent``
    for end in ends:
        later = [user for user in end.users if user not in head]
        scaled_end = _scaled(end, tangent, scaled)
        for user in later:
            user.replace_input_with(end, scaled_end)


def _scaled(node: fx.Node, tangent: fx.Node, scaled: dict[fx.Node, fx.Node]) -> fx.Node:
    """Returns ``tangent`` times ``node``, of its dtype; for a view the same view of its source.

    What was made is in ``scaled``, and what it is made of is saved.
    """
    if node in scaled:
        return scaled[node]
    backward = {**node.meta, "partitioner_tag": "is_backward"}
    if is_view(node):
        source = _scaled(viewed(node), tangent, scaled)
        with node.graph.inserting_after(node):
            product = node.graph.node_copy(node, lambda _: source)
        product.meta = backward
    else:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        with node.graph.inserting_after(node):
            product = node.graph.call_function(_aten.mul.Tensor, (node, tangent))
        product.meta = {**backward, "val": node.meta["val"] * tangent.meta["val"]}
        dtype = node.meta["val"].dtype
        if product.meta["val"].dtype != dtype:  # of two numbers the wider type counts
            with node.graph.inserting_after(product):
                product = node.graph.call_function(_to_dtype, (product, dtype))
            product.meta = backward
    scaled[node] = product
    return product


def _is_coarse(node: fx.Node) -> bool:
    """True for float16 and float8, in which small numbers of float32 and bfloat16 are zero."""
    return torch.finfo(node.meta["val"].dtype).tiny > torch.finfo(torch.float32).tiny


def _forward(node: fx.Node) -> dict[str, object]:
    return {**node.meta, "partitioner_tag": "is_forward"}
