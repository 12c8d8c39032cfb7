"""Work of operators, and the seconds that a device takes for it. No torch here.

Legend: an operator takes ``max(flops / F, bytes / B)`` seconds, where ``F`` and ``B`` are what a
device reaches in practice: its nominal rates times MATMUL_EFFICIENCY and MEMORY_EFFICIENCY. Ring
attention takes no less than its keys and values need around the ring.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from memo_compile.costs.hardware import HardwareProfile

MATMUL_EFFICIENCY = 0.6
"""Share of the nominal FLOPs per second that products reach. Large ones reach 0.6 to 0.75 under a
GPU's power limit; 0.6 is between a training step's 0.4 to 0.5 and a benchmark's 0.75."""

MEMORY_EFFICIENCY = 0.8
"""Share of the nominal bandwidth that kernels reach which stream to and from HBM or DDR."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCost:
    """Work of one operator or of several."""

    flops: int
    """FLOPs of products, convolutions and attention; a multiplication and an addition are two."""
    bytes: int
    """Bytes that are read from and written to the device's memory."""
    link_bytes: int = 0
    """Bytes that come from another device meanwhile."""


NOTHING = NodeCost(flops=0, bytes=0)


def roofline_s(cost: NodeCost, profile: HardwareProfile) -> float:
    """Seconds of ``cost`` on a device: limited by arithmetic or by memory, whichever is slower."""
    compute_s = cost.flops / (profile.peak_flops_per_s * MATMUL_EFFICIENCY)
    memory_s = cost.bytes / (profile.hbm_bytes_per_s * MEMORY_EFFICIENCY)
    return max(compute_s, memory_s, cost.link_bytes / profile.link_bytes_per_s)


def work_seconds(work: Iterable[NodeCost], profile: HardwareProfile) -> float:
    """Seconds of operators that run one after the other."""
    return math.fsum(roofline_s(cost, profile) for cost in work)
