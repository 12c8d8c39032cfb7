"""Replaces inputs whose memory does not hold their values: negated ones, running collectives.

Of a negated tensor (``z.conj().imag``) torch only notes the sign (``Tensor.is_neg``), and
Inductor's kernels read the memory without it (seen in torch 2.13). So the graph gets copies of such
inputs, with the sign applied. Where a copy is not enough, because other code sees the input's
memory too, the graph runs operator by operator.

A collective's result (AsyncCollectiveTensor) is waited for when it is first used. AOTAutograd loses
the gradient of one that ``fully_shard()``'s hooks have handed on (seen in torch 2.13, with every
backend: it is zero). So the graph gets the tensor behind it, once that has arrived.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from memo_compile.errors import UnsupportedGraph
from memo_compile.torch_private import autograd, distributed

Run = Callable[..., Any]

SHARED = "an input that is shown negated lies in memory of another, and one is written"

BY_PLACE = {
    *("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"),
    *("set_", "storage", "untyped_storage"),
}
"""Operators that read a tensor's memory by places in it."""


def _resolved(value: Any) -> Any:
    """Returns ``value``; a negated tensor copied, an unfinished one awaited; differentiable."""
    if distributed.is_in_flight(value):
        value = distributed.arrived(value)
    return value.resolve_neg() if _is_negated(value) else value


def _is_unresolved(value: Any) -> bool:
    return _is_negated(value) or distributed.is_in_flight(value)


def resolving(
    compile_graph: Callable[[Sequence[Any]], Run],
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    step_aside: Callable[[UnsupportedGraph], Run],
) -> Run:
    """Compiles ``gm`` for resolved inputs, and resolves those of each call.

    Dynamo compiles anew where an input comes with another sign. What the graph writes into a copy
    is written into the input as well. ``step_aside`` returns what runs where copies are not enough.
    """
    if not any(map(_is_unresolved, example_inputs)):
        return compile_graph(example_inputs)
    # Dynamo's own fake tensors, whose sizes are known to be numbers.
    fakes = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    has_negated = any(map(_is_negated, example_inputs))
    if has_negated and (reason := _needs_its_memory(gm, fakes)):
        return step_aside(UnsupportedGraph(f"an input that is shown negated {reason}"))
    compiled = compile_graph(
        [
            _resolved(fake) if _is_unresolved(value) else value
            for fake, value in zip(fakes, example_inputs, strict=True)
        ]
    )
    if not has_negated:
        return lambda *inputs: compiled(*map(_resolved, inputs))
    aside = functools.cache(lambda: step_aside(UnsupportedGraph(SHARED)))  # said once
    written = autograd.written_now(sum(isinstance(value, torch.Tensor) for value in fakes))

    def call(*inputs: Any) -> Any:
        if _shares_written_memory(inputs, written):
            return aside()(*inputs)
        resolved = [_resolved(value) for value in inputs]
        versions = [_version(value) for value in resolved]
        results = compiled(*resolved)
        for original, value, version in zip(inputs, resolved, versions, strict=True):
            if _is_negated(original) and _is_written(original, value, version):
                original.copy_(value)
        return results

    return call


def _needs_its_memory(gm: fx.GraphModule, fakes: Sequence[Any]) -> str:
    """Says why ``gm`` needs the very memory of a negated input; empty: it does not."""
    called = (node.target for node in gm.graph.nodes if node.op.startswith("call_"))
    names = (str(getattr(target, "__name__", target)).split(".")[0] for target in called)
    if not BY_PLACE.isdisjoint(names):
        return "may be read by its place in memory"
    negated = {_storage(value) for value in fakes if _is_negated(value)}
    results = (node.meta.get("example_value") for node in gm.graph.output_node().all_input_nodes)
    if any(_storage(value) in negated for value in results if isinstance(value, torch.Tensor)):
        return "is given back, or a view of it"
    return ""


def _shares_written_memory(inputs: Sequence[Any], written: Collection[int]) -> bool:
    """True where a negated input shares memory with an input that the graph writes.

    ``written`` are positions among the tensors.
    """
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    return any(
        not set(written).isdisjoint(group) and any(tensors[at].is_neg() for at in group)
        for group in autograd.sharing_storage(tensors)
    )


def _storage(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def _is_written(original: torch.Tensor, value: torch.Tensor, version: int) -> bool:
    """True where ``value``, once at ``version``, was written; inference tensors count no writes."""
    return not torch.equal(original, value) if value.is_inference() else value._version != version


def _is_negated(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_neg()
