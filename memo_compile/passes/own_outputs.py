"""Makes kernels that allocate their own results write them into planned buffers."""

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
from memo_compile.passes.extract import call_like
from memo_compile.torch_private import inductor_api

_aten = torch.ops.aten
_ALLOCATING = ("convolution", "scaled_dot_product", "flash_attn", "efficient_attention", "cudnn")
"""Parts of operator names whose Inductor lowering is an extern kernel without ``out=``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnOutputs:
    """Puts every result that leaves a region into a buffer of its own.

    Rewrite (``out`` and ``lse`` leave the region):
        t = attention(q, k, v)            out = empty_strided(...); lse = empty_strided(...)
        out = t[0]; lse = t[1]       ->   attention_into(out, lse, q, k, v)
        return out, lse                   return out, lse

    If ``t`` holds more than tensors, or an attention kernel's random state, the operator stays and
    ``copy_into(out, t[0])`` follows it. The pass leaves alone results that stay inside the region
    (a copy would cost time and save nothing), results that the user keeps (they are not in the
    arena), and random states: outside of CUDA graphs the kernels return them in host memory,
    whatever their fake results say, and the backward reads them there.
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
            tensors = results.values()
            if not results or any(map(is_random_state, tensors)):
                changed |= _copy_leaving(node, leaving)
            elif leaving.intersection(tensors) or _may_hold_output(node, tensors, leaving):
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


def _may_hold_output(node: fx.Node, results: Iterable[fx.Node], leaving: Iterable[fx.Node]) -> bool:
    """True for a custom operator's result over which Inductor may write an output of the region.

    If a sum is the result's last reader and of the same size, Inductor writes it over the result;
    the output would then lie in the operator's own memory. Torch's own kernels are left alone: a
    copy would cost more often than it helps.
    """
    sizes = {output.meta["val"].nbytes for output in leaving if is_tensor(output)}
    return _is_custom(node) and any(result.meta["val"].nbytes in sizes for result in results)


def _results(node: fx.Node) -> dict[int, fx.Node]:
    """Returns the node of each tensor result by its position; empty: some are no tensors."""
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
    """Replaces ``node`` by buffers and the operator that fills them."""
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
    """Copies the tensors that leave the region out of a result that also holds other values.

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
    """Adds a buffer with the layout of ``value`` that is yet to be filled."""
    layout = (list(value.shape), list(value.stride()))
    settings = {"dtype": value.dtype, "device": value.device}
    return call_like(graph, _aten.empty_strided.default, layout, settings, like=value)
