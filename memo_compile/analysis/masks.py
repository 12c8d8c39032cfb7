"""Finds attention masks as large as the scores: causal attention needs none."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from memo_compile.analysis.structure import argument, op_name, schema_of
from memo_compile.analysis.views import makers_of, storage_of

LARGE_NUMBERS = 2**20
"""Smaller masks are not reported: 1,024 tokens that see 1,024."""

_ARGUMENTS = ("attn_bias", "attn_mask")
"""Names of masks among the arguments of torch's attention kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeMask:
    """A mask that attention reads, (..., rows, columns)."""

    rows: int
    columns: int
    size_bytes: int
    """Of its storage."""
    is_given: bool
    """True if it depends on an input of the graph; else on positions alone."""


def large_masks(graph: fx.Graph) -> list[LargeMask]:
    """Returns the distinct masks that attention reads in ``graph``, largest first.

    A learned bias, and a mask that is an input as it is, are left out: the model means them.
    """
    masks = {storage_of(mask): _described(mask) for mask in _masks(graph)}
    return sorted({mask for mask in masks.values() if mask}, key=lambda mask: -mask.size_bytes)


def _masks(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yields the mask of each call of an attention kernel that has one."""
    for node in graph.nodes:
        if "attention" not in op_name(node) or not isinstance(node.target, torch._ops.OpOverload):
            continue
        names = {arg.name for arg in schema_of(node).arguments}
        for name in names.intersection(_ARGUMENTS):
            mask = argument(node, name)
            if isinstance(mask, fx.Node) and isinstance(mask.meta.get("val"), torch.Tensor):
                yield mask


def _described(mask: fx.Node) -> LargeMask | None:
    """Returns the mask if it is large, neither learned nor an input as it is; else None."""
    value = mask.meta["val"]
    if value.dim() < 2 or 0 in value.stride()[-2:]:
        return None
    rows, columns = value.shape[-2:]
    sources = [node for node in makers_of([mask]) if node.op == "placeholder"]
    inputs = [node.meta["val"] for node in sources]
    is_an_input = any(value.numel() >= rows * columns for value in inputs)
    is_learned = any(value.is_floating_point() for value in inputs)
    if rows * columns < LARGE_NUMBERS or is_an_input or is_learned:
        return None
    size_bytes = storage_of(mask).meta["val"].untyped_storage().nbytes()
    return LargeMask(rows=rows, columns=columns, size_bytes=size_bytes, is_given=bool(sources))
