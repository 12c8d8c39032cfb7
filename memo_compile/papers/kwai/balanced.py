"""Balanced checkpointing: the frontier of bytes kept against seconds recomputed in one layer.

Source: Kwai (USENIX ATC 24), section 4. Each saved tensor of a layer but its input is kept or
recomputed in backward; all 2^n subsets are evaluated at once.
"""

from dataclasses import dataclass

import numpy as np

from memo_compile.costs.hardware import HardwareProfile
from memo_compile.costs.models import ModelShape
from memo_compile.papers.layer_costs import (
    BACKWARD_FACTOR,
    Efficiency,
    forward_seconds_per_token,
    layer_tensors,
)

BALANCED = frozenset({"n1", "n2", "silu", "product", "gelu"})
"""What Kwai's balanced policy recomputes: both norm outputs and what follows the activation."""

TIE_TOLERANCE = 1e-12
"""Sums of seconds that differ by at most this share are equal: the rest is rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPoint:
    """A set of recomputed tensors that no other set beats in both bytes and time."""

    bytes_per_token_hidden: float
    extra_time_fraction: float
    """Recompute seconds over the layer's forward and backward seconds."""
    recomputed: tuple[str, ...]


def layer_frontier(
    shape: ModelShape, seq: int, hardware: HardwareProfile, efficiency: Efficiency
) -> tuple[LayerPoint, ...]:
    """Returns the sets of recomputed tensors that no other beats, ascending in bytes kept."""
    layer_input, *choosable = layer_tensors(shape, seq)
    subsets = np.arange(1 << len(choosable), dtype=np.int64)  # bit i: tensor i is kept
    kept_bytes = np.full(len(subsets), layer_input.bytes_per_token, dtype=np.int64)
    seconds = np.zeros(len(subsets))
    for bit, tensor in reversed(list(enumerate(choosable))):
        kept = (subsets >> bit & 1).astype(bool)
        kept_bytes += kept * tensor.bytes_per_token
        seconds += ~kept * tensor.seconds_per_token(hardware, efficiency)
    order = np.lexsort((subsets, seconds, kept_bytes))
    least_s = np.minimum.accumulate(seconds[order])
    least_with_fewer_bytes_s = np.concatenate(([np.inf], least_s[:-1]))
    forward_s = forward_seconds_per_token(shape, seq, hardware, efficiency)
    layer_s = forward_s * (1 + BACKWARD_FACTOR)
    return tuple(
        LayerPoint(
            bytes_per_token_hidden=int(kept_bytes[subset]) / shape.hidden,
            extra_time_fraction=float(seconds[subset]) / layer_s,
            recomputed=tuple(t.name for bit, t in enumerate(choosable) if not subset >> bit & 1),
        )
        for subset in order[seconds[order] < least_with_fewer_bytes_s * (1 - TIE_TOLERANCE)]
    )
