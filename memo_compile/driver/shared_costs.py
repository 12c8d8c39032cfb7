"""Ranks whose steps talk to each other plan with equal costs: the first measured counts for all.

A rank that needs a figure looks for it in the store at which the ranks met, and measures what
nobody has told; what it then tells counts only where no other was first. Nobody waits for anybody:
a rank that plans nothing, refuses or asks for other figures holds up none of them. A figure stands
for as long as the ranks stay together.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx

from memo_compile.analysis.regions import RegionGraph, layout_of
from memo_compile.file_store import digest_of
from memo_compile.torch_private import distributed

Own = Callable[[Sequence[str]], Mapping[str, float]]
"""Measures the figures of these names."""


def first_told(
    keys: Mapping[str, str],
    own: Own,
    *,
    told: Callable[[str], str | None] = distributed.told,
    tell_first: Callable[[str, str], str] = distributed.tell_first,
) -> dict[str, float]:
    """The figure of each name in ``keys``, equal on all ranks that ask for the same key.

    ``told`` and ``tell_first`` look up and write down elsewhere than at the ranks' store. Raises
    whatever ``own`` raises; then nothing is told.
    """
    found = {name: told(_path(key)) for name, key in keys.items()}
    figures = {name: float(text) for name, text in found.items() if text is not None}
    missing = [name for name in keys if name not in figures]
    measured = own(missing) if missing else {}
    for name in missing:
        figures[name] = float(tell_first(_path(keys[name]), repr(measured[name])))
    return figures


def _path(key: str) -> str:
    return f"memo/costs/{key}"


def region_key(region: RegionGraph, around: Sequence[object]) -> str:
    """Stands for how long ``region`` takes where ``around`` is equal too.

    Numbers inside the graph are left out: which part of a vocabulary a rank has is one.
    """
    operators = [
        [_operator(node), str(layout_of(node.meta.get("val")))] for node in region.gm.graph.nodes
    ]
    settings = [torch.get_num_threads(), region.op_by_op, [str(value) for value in around]]
    return digest_of([region.name, settings, operators])


def _operator(node: fx.Node) -> str:
    return getattr(node.target, "__name__", node.op)
