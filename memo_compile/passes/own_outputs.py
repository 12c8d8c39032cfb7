"""Gives kernels that allocate their own results a planned buffer to copy them into."""

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from memo_runtime.ops import into
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from memo_compile.analysis.purity import is_write
from memo_compile.analysis.random_states import is_random_state
from memo_compile.analysis.structure import argument, namespace, schema_of
from memo_compile.analysis.views import is_tensor, results_of, storage_of
from memo_compile.torch_private import inductor_api

_aten = torch.ops.aten
_ALLOCATING = ("convolution", "scaled_dot_product", "flash_attn", "efficient_attention", "cudnn")
"""Parts of operator names whose Inductor lowering is an extern kernel without ``out=``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnOutputs:
    """Every result that leaves a region lies in a buffer of its own.

    Rewrite (``out`` and ``lse`` leave the region):
        t = attention(q, k, v)            out = empty_strided(...); lse = empty_strided(...)
        out = t[0]; lse = t[1]       ->   attention_into(out, lse, q, k, v)
        return out, lse                   return out, lse

    Where ``t`` holds more than tensors, or an attention kernel's random state, ``copy_into(out,
    t[0])`` follows it. Results that stay inside are left alone: a copy would cost time and save
    nothing. Results that the user keeps are left alone too: they are not in the arena. So are
    random states: outside of CUDA graphs the kernels put them into the host's memory, whatever
    their fake results say, and the backward reads them there.
    """

    external_outputs: frozenset[int]
    """Positions of results that go to the user."""
    name: ClassVar[str] = "own-outputs"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        outputs = results_of(gm.graph)
        nodes = {at: node for at, node in enumerate(outputs) if isinstance(node, fx.Node)}
        external = {storage_of(nodes[at]) for at in self.external_outputs}
        leaving = {storage_of(node) for node in nodes.values()} - external
        changed = False
        for node in list(gm.graph.nodes):
            if not _allocates(node):
                continue
            results = _results(node)
            made = results.values()
            if not results or any(map(is_random_state, made)):
                changed |= _copy_leaving(node, leaving)
            elif leaving.intersection(made) or _may_become(node, made, leaving):
                _rewrite(node, results)
                changed = True
        return PassResult(gm, changed)


def _allocates(node: fx.Node) -> bool:
    """True for an operator that Inductor calls as a kernel which allocates its own results."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or is_write(node):
        return False
    if any(part in target._schema.name for part in _ALLOCATING):
        return True
    if _is_custom(node):
        # A custom operator becomes a fallback when it is first lowered: too late for its region.
        return inductor_api.falls_back(target) or not inductor_api.has_lowering(target)
    return inductor_api.falls_back(target) and target.overloadpacket not in (_aten.empty_strided,)


def _is_custom(node: fx.Node) -> bool:
    return namespace(node) not in ("aten", "prims", "memo")


def _may_become(node: fx.Node, made: Iterable[fx.Node], leaving: Iterable[fx.Node]) -> bool:
    """True for a custom operator's result that Inductor may turn into an output in place.

    A sum that is the result's last reader is written over it when both are of one size; the output
    would then lie in the operator's own memory. Torch's own kernels are left alone: a copy costs
    more often than it helps.
    """
    sizes = {output.meta["val"].nbytes for output in leaving if is_tensor(output)}
    return _is_custom(node) and any(result.meta["val"].nbytes in sizes for result in made)


def _results(node: fx.Node) -> dict[int, fx.Node]:
    """Position -> the node of each tensor result; empty where the results are of another kind."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return {0: node}
    if not isinstance(value, tuple | list):
        return {}
    tensors = all(isinstance(item, torch.Tensor) for item in value)
    declared = all(str(result.type) == "Tensor" for result in schema_of(node).returns)
    if not (tensors and declared and all(user.target is operator.getitem for user in node.users)):
        return {}
    return {int(user.args[1]): user for user in node.users}  # type: ignore[arg-type]


def _rewrite(node: fx.Node, results: dict[int, fx.Node]) -> None:
    """Replace ``node`` by buffers and the operator that fills them."""
    graph, target = node.graph, node.target
    assert isinstance(target, torch._ops.OpOverload)
    value = node.meta["val"]
    values = [value] if isinstance(value, torch.Tensor) else list(value)
    arguments = [argument(node, declared.name) for declared in schema_of(node).arguments]
    with graph.inserting_before(node):
        buffers = [_empty(graph, value) for value in values]
        call = graph.call_function(into(target), (*buffers, *arguments))
        call.meta["val"] = None
    for position, old in results.items():
        old.replace_all_uses_with(buffers[position])
        if old is not node:
            graph.erase_node(old)
    graph.erase_node(node)


def _copy_leaving(node: fx.Node, leaving: set[fx.Node]) -> bool:
    """Copy the tensors that leave the region out of a result that holds other things too.

    CUDA's attention kernels return sizes and random states beside their tensors, so that they
    cannot be called as one operator that fills buffers. Random states stay where they are.
    """
    items = [
        user
        for user in node.users
        if user.target is operator.getitem and user in leaving and not is_random_state(user)
    ]
    for item in items:
        with node.graph.inserting_before(item.next):
            buffer = _empty(node.graph, item.meta["val"])
            item.replace_all_uses_with(buffer)
            call = node.graph.call_function(torch.ops.memo.copy_into.default, (buffer, item))
            call.meta["val"] = None
    return bool(items)


def _empty(graph: fx.Graph, value: torch.Tensor) -> fx.Node:
    node = graph.call_function(
        _aten.empty_strided.default,
        (list(value.shape), list(value.stride())),
        {"dtype": value.dtype, "device": value.device},
    )
    node.meta["val"] = value
    return node
