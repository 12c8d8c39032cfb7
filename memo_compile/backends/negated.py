"""Real inputs that are shown negated (``z.conj().imag``): code that reads memory would miss it.

Torch only notes the sign (``Tensor.is_neg``); Inductor's kernels read the memory as it lies (seen
in torch 2.13). So the graph gets such inputs as they are shown.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx


def shown(values: Sequence[Any]) -> list[Any]:
    """``values`` with copies of those tensors that are shown negated; differentiable."""
    return [value.resolve_neg() if _is_negated(value) else value for value in values]


def resolving(
    compile_graph: Callable[[Sequence[Any]], Callable[..., Any]],
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
) -> Callable[..., Any]:
    """What ``compile_graph`` makes of ``gm`` for inputs as they are shown, called with these.

    Dynamo compiles anew where an input comes with another sign. What the graph writes into a copy
    goes to the input as well.
    """
    if not any(map(_is_negated, example_inputs)):
        return compile_graph(example_inputs)
    # Dynamo's own fake tensors, whose sizes are known to be numbers.
    fakes = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    compiled = compile_graph(
        [
            fake.resolve_neg() if _is_negated(value) else value
            for fake, value in zip(fakes, example_inputs, strict=True)
        ]
    )

    def call(*inputs: Any) -> Any:
        given = shown(inputs)
        before = [_version(value) for value in given]
        results = compiled(*given)
        for own, value, version in zip(inputs, given, before, strict=True):
            if _is_negated(own) and _is_written(own, value, version):
                own.copy_(value)
        return results

    return call


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def _is_written(own: torch.Tensor, value: torch.Tensor, version: int) -> bool:
    """Inference tensors count no writes."""
    return not torch.equal(own, value) if value.is_inference() else value._version != version


def _is_negated(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_neg()
