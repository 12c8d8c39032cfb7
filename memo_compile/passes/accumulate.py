"""Writes the sum of a gradient that comes in parts over its first part.

A weight that is read in several layers (tied embeddings, a bias of all layers) has a gradient from
each reader. The first part lives from its layer to the last one. In the arena it would take up
room all that time, although the sum is a new tensor in ordinary memory. Plain Inductor, which
reuses buffers, makes the sum where the first part was.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from memo_compile.analysis.joint_units import backward_positions
from memo_compile.analysis.structure import namespace, schema_of, spec_of
from memo_compile.analysis.views import is_movable_view, is_tensor, is_view, viewed

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulateInPlace:
    """Gradients are added up in the memory of their first part.

    Rewrite, in a backward cut into ``num_units`` positions (in brackets):
        part = mm(x, y)          [0]        part = mm(x, y)          [0]
        more = embedding_bwd(z)  [9]        more = embedding_bwd(z)  [9]
        g    = add(part, more)   [9]   ->   sum  = add(part, more)   [9]
        return g                            g    = copy_(part, sum)  [9]
                                            return g

    ``part``, or the tensor that it is a whole view of, has no other reader and is laid out like
    ``g``. A part that is itself such a sum is treated likewise, back to the first.
    """

    num_units: int
    name: ClassVar[str] = "accumulate-in-place"
    is_required: ClassVar[bool] = False

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        positions = backward_positions(gm.graph, self.num_units)
        sums = []
        for node in dict.fromkeys(gm.graph.output_node().all_input_nodes):
            while (part := _part(node, positions)) is not None:
                sums.append((node, part))
                node = part
        for node, part in sums:
            _write_over(node, part)
        return PassResult(gm, bool(sums))


def _part(total: fx.Node, positions: dict[fx.Node, int]) -> fx.Node | None:
    """Returns the part of ``total`` from an earlier position to write over; None: there is none."""
    if total.target is not _aten.add.Tensor or total.kwargs:
        return None
    for part in total.args:
        if (
            isinstance(part, fx.Node)
            and part in positions
            and positions[part] < positions[total]
            and total.args.count(part) == 1
            and _is_new(part)
            and is_tensor(part)
            and spec_of(part.meta["val"]) == spec_of(total.meta.get("val"))
        ):
            return part
    return None


def _is_new(node: fx.Node) -> bool:
    """True for a tensor with one reader, in memory that an operator made and nothing else reads."""
    while is_movable_view(node) and len(node.users) == 1:
        node = viewed(node)
    if len(node.users) != 1 or not namespace(node):
        return False
    returns = schema_of(node).returns
    return all(result.alias_info is None for result in returns) and not is_view(node)


def _write_over(total: fx.Node, part: fx.Node) -> None:
    """Lets all readers of ``total`` read a copy of it that lies in the memory of ``part``."""
    with total.graph.inserting_after(total):
        written = total.graph.call_function(_aten.copy_.default, (part, total))
    written.meta = dict(total.meta)
    total.replace_all_uses_with(written, delete_user_cb=lambda user: user is not written)
