"""Memory that libraries take beside their results, which no traced graph shows.

CPU: oneDNN copies a convolution's operands and result into layouts of its own; measured with torch
2.13 on AVX-512, with one and two threads (``tests/numerics/test_convolutions.py`` measures again).

CUDA: read in FlashAttention-2's ``mha_bwd`` (torch 2.11 to 2.13): it sums the queries' gradient in
float32, keeps one float32 number for each row of scores, and where keys have fewer heads than
queries it makes their gradients for every query head first.
"""

import math
from collections.abc import Mapping, Sequence
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

CHANNEL_BLOCK_BYTES = 64
"""oneDNN's own layouts round channels up to blocks of this size."""
PARTIAL_SUMS_BYTES = 2 * 2**20
"""Partial sums of a weight's gradient, at most; each thread has its own."""

CONVOLUTION = "convolution workspace"
"""Kind of what ``convolution_bytes`` counts."""


def convolution_bytes(
    result: Sequence[int],
    source: Sequence[int],
    weight: Sequence[int],
    item_bytes: int,
    *,
    is_backward: bool,
) -> int:
    """What a convolution of these shapes, (B, C, ...) each, allocates for itself on a CPU.

    An upper bound: with channels last, and for some sizes, oneDNN copies nothing; float64, which
    torch unfolds, is not its business: 0. The backward's
    ``result`` is the gradient that comes in; it reads the source for two gradients, and sums the
    weight's in float32. A transposed convolution runs as the backward of another.
    """
    if item_bytes > FLOAT32_BYTES:
        return 0
    channels, outputs = max(1, source[1]), max(1, result[1])
    blocked = max(1, CHANNEL_BLOCK_BYTES // item_bytes)
    source_bytes = math.prod(source) // channels * _rounded(channels, blocked) * item_bytes
    result_bytes = math.prod(result) // outputs * _rounded(outputs, blocked) * item_bytes
    weight_bytes = math.prod(weight[2:]) * item_bytes
    weight_bytes *= _rounded(weight[0], blocked) * _rounded(weight[1], blocked)
    if weight[0] != outputs or math.prod(result[2:]) > math.prod(source[2:]):
        result_bytes *= 2
    if not is_backward:
        return align(source_bytes + result_bytes + weight_bytes)
    sums = weight_bytes // item_bytes * max(item_bytes, FLOAT32_BYTES)
    partial = min(PARTIAL_SUMS_BYTES, 2 * (source_bytes + result_bytes))
    return align(2 * source_bytes + result_bytes + weight_bytes + sums + partial)


def _rounded(channels: int, blocked: int) -> int:
    return -(-channels // blocked) * blocked


def convolution_workspace(node: fx.Node, line: int) -> OutsideBuffer | None:
    """What a CPU's convolution ``node``, which runs on ``line``, allocates for itself."""
    name = op_name(node)
    if node.op != "call_function" or name not in ("convolution", "convolution_backward"):
        return None
    is_backward = name == "convolution_backward"
    operands = [*node.args[:3]] if is_backward else [node, *node.args[:2]]
    result, source, weight = map(_fake, operands)
    if result is None or source is None or weight is None or source.device.type != "cpu":
        return None
    size_bytes = convolution_bytes(
        result.shape, source.shape, weight.shape, source.itemsize, is_backward=is_backward
    )
    if not size_bytes:
        return None
    return OutsideBuffer(kind=CONVOLUTION, size_bytes=size_bytes, start=line, end=line + 1)


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
