"""Lets no backward recompute from an input that the forward overwrites, and saves its old value.

A buffer that the forward reads and then updates (a running average, a step counter) has another
value by the time of the backward. Torch's own min-cut saves the buffer itself, whose memory holds
the new value then.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from memo_compile.analysis.joint_units import tangent_dependents
from memo_compile.analysis.purity import READS_OVERWRITTEN, is_write, overwritten
from memo_compile.analysis.views import is_view, results_of, storage_of, viewed


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOverwritten:
    """Tags the readers of overwritten inputs, and lets the backward read a copy of the old value.

    Rewrite; the forward writes into ``buffer`` (tagged nodes are marked with !):
        add   = add(mm, buffer)                  add   = add(mm, buffer)         !
        new   = mul(buffer, 0.9)                 old   = clone(buffer)           !
        grad  = mul(tangent, buffer)      ->     new   = mul(buffer, 0.9)        !
        copy_(buffer, new)                       grad  = mul(tangent, old)
                                                 copy_(buffer, new)

    Tagged nodes are never recomputed (``passes.equal_cut``, ``passes.recompute``), so ``old``
    and ``add`` are saved if the backward needs them.
    """

    num_fwd_outputs: int
    name: ClassVar[str] = "keep-overwritten"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        written = overwritten(gm.graph)
        if not written:
            return PassResult(gm, False)
        backward = tangent_dependents(gm.graph)
        old = _OldValues(written)
        for node in list(gm.graph.nodes):
            if node in backward and node.op == "call_function" and not is_write(node):
                node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), old.of)
        output, results = gm.graph.output_node(), results_of(gm.graph)
        gradients = fx.node.map_arg(list(results[self.num_fwd_outputs :]), old.of)
        if old.copies:
            output.args = ((*results[: self.num_fwd_outputs], *gradients),)
        for node in gm.graph.nodes:
            computes = node.op == "call_function" and not is_view(node) and not is_write(node)
            if computes and any(storage_of(source) in written for source in node.all_input_nodes):
                node.meta[READS_OVERWRITTEN] = True
        return PassResult(gm, bool(old.copies))


@dataclass(slots=True)
class _OldValues:
    """Copies of overwritten inputs, and views of those copies, made when first asked for."""

    written: set[fx.Node]
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def of(self, node: fx.Node) -> fx.Node:
        """Returns a node with the value that ``node`` had before the write."""
        if storage_of(node) not in self.written:
            return node
        if node not in self.copies:
            self.copies[node] = self._view(node) if is_view(node) else self._copy(node)
        return self.copies[node]

    def _copy(self, buffer: fx.Node) -> fx.Node:
        with buffer.graph.inserting_before(min(buffer.users)):
            copied = buffer.graph.call_function(torch.ops.aten.clone.default, (buffer,))
        copied.meta = {"val": buffer.meta["val"].clone(), "partitioner_tag": "is_forward"}
        return copied

    def _view(self, node: fx.Node) -> fx.Node:
        source, old = viewed(node), self.of(viewed(node))
        with node.graph.inserting_after(node):
            return node.graph.node_copy(node, lambda arg: old if arg is source else arg)
