"""Memory that CUDA's libraries take beside their results, which no traced graph shows.

Read in FlashAttention-2's ``mha_bwd`` (torch 2.11 to 2.13): it sums the queries' gradient in
float32, keeps one float32 number for each row of scores, and where keys have fewer heads than
queries it makes their gradients for every query head first.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from memo_compile.analysis.regions import LoweredRegion, RegionGraph
from memo_compile.analysis.structure import op_name
from memo_compile.step.problem import OutsideBuffer, align

FLOAT32_BYTES = 4
ROW_GRANULE = 128
"""Rows are rounded up to a multiple of this, the kernel's block of queries."""
WIDTH_GRANULE = 32
"""Head widths are rounded up to a multiple of this."""
RING_BUFFERS = 4
"""Buffers of a key's size in which ring attention receives while it reads others."""


def with_workspaces(
    lowered: Mapping[str, LoweredRegion], graphs: Mapping[str, RegionGraph]
) -> dict[str, LoweredRegion]:
    """``lowered`` with the libraries' memory on a CUDA device, for the whole of its region."""
    return {name: _with_workspace(region, graphs[name]) for name, region in lowered.items()}


def _with_workspace(lowered: LoweredRegion, region: RegionGraph) -> LoweredRegion:
    size_bytes = max((attention_bytes(node) for node in region.gm.graph.nodes), default=0)
    if not size_bytes:
        return lowered
    profile = lowered.profile
    workspace = OutsideBuffer(
        kind="attention workspace", size_bytes=size_bytes, start=0, end=profile.num_lines
    )
    return replace(lowered, profile=replace(profile, outside=(*profile.outside, workspace)))


def attention_bytes(node: fx.Node) -> int:
    """What an attention kernel allocates for itself while it runs; 0 for another operator."""
    if node.op != "call_function" or "attention" not in op_name(node):
        return 0
    is_backward, is_ring = "backward" in op_name(node), "ring" in op_name(node)
    first = 1 if is_backward else 0
    query, key = (_fake(node.args[at]) for at in (first, first + 1))
    if query is None or key is None or query.dim() != 4:
        return 0
    arriving = RING_BUFFERS * key.nbytes if is_ring else 0
    if not is_backward:
        return arriving
    batch, heads, rows, width = query.shape
    rows = -(-rows // ROW_GRANULE) * ROW_GRANULE
    width = -(-width // WIDTH_GRANULE) * WIDTH_GRANULE
    sums = batch * heads * rows * (width + 1) * FLOAT32_BYTES
    expanded = 2 * key.nbytes * heads // key.shape[1] if key.shape[1] != heads else 0
    return align(sums) + align(expanded) + align(arriving)


def _fake(argument: object) -> torch.Tensor | None:
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None
