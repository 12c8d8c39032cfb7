"""What each saved tensor of a transformer layer weighs, and what recomputing it costs.

Per token of one layer, not divided over devices: ratios do not depend on tp and cp. Matrix products
and attention run at a share of peak FLOP/s, everything else at a share of the memory bandwidth,
every operand read and every result written once. Elements have 2 bytes.
"""

from dataclasses import dataclass

from memo_compile.costs.hardware import HardwareProfile
from memo_compile.costs.models import ELEMENT_BYTES, ModelShape
from memo_compile.errors import InputError, require_at_least

BACKWARD_FACTOR = 2.0
"""Backward time over forward time: two products, or twice the traffic, for each of the forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of a device's nominal rates that its kernels reach, in (0, 1]."""

    gemm: float
    hbm: float

    def __post_init__(self) -> None:
        for name, value in (("gemm-efficiency", self.gemm), ("hbm-efficiency", self.hbm)):
            if not 0 < value <= 1:
                raise InputError(f"{name}: expected a share in (0, 1], got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCost:
    """One tensor that the layer's backward reads."""

    name: str
    bytes_per_token: int
    flops_per_token: float
    """Matrix products and attention that make it."""
    moved_bytes_per_token: float
    """Memory traffic of the bandwidth-bound operators that make it."""

    def seconds_per_token(self, hardware: HardwareProfile, efficiency: Efficiency) -> float:
        """Returns the time to make it once from its inputs."""
        compute_s = self.flops_per_token / (hardware.peak_flops_per_s * efficiency.gemm)
        return compute_s + self.moved_bytes_per_token / (hardware.hbm_bytes_per_s * efficiency.hbm)


def layer_tensors(shape: ModelShape, seq: int) -> tuple[TensorCost, ...]:
    """Returns the saved tensors in the order of the forward, the layer input ``x`` first and free.

    Names: x, n1, q, k, v, o, x2, n2, then gate, up, silu, product (or fc1, gelu without a gate).
    Attention is causal: 2 h s FLOPs per token. Its log-sum-exp, 4 bytes per head, is not counted.
    """
    require_at_least(1, {"seq": seq})
    h, f, kv = shape.hidden, shape.ffn, shape.hidden * shape.num_kv_heads // shape.num_heads
    tensors = (
        _tensor("x", h, 0, 0),
        _tensor("n1", h, 0, 2 * h),
        _tensor("q", h, 2 * h * h, 0),
        _tensor("k", kv, 2 * h * kv, 0),
        _tensor("v", kv, 2 * h * kv, 0),
        _tensor("o", h, 2 * h * seq, 0),
        _tensor("x2", h, 2 * h * h, 3 * h),
        _tensor("n2", h, 0, 2 * h),
    )
    if not shape.gated:
        return (*tensors, _tensor("fc1", f, 2 * h * f, 0), _tensor("gelu", f, 0, 2 * f))
    return (
        *tensors,
        _tensor("gate", f, 2 * h * f, 0),
        _tensor("up", f, 2 * h * f, 0),
        _tensor("silu", f, 0, 2 * f),
        _tensor("product", f, 0, 3 * f),
    )


def layer_output(shape: ModelShape) -> TensorCost:
    """Returns the down projection with its residual: part of the forward, and never saved."""
    return _tensor("output", shape.hidden, 2 * shape.ffn * shape.hidden, 3 * shape.hidden)


def _tensor(name: str, elements: int, flops: int, moved: int) -> TensorCost:
    """Returns the cost per token: elements of the tensor, FLOPs that make it, elements moved."""
    return TensorCost(
        name=name,
        bytes_per_token=ELEMENT_BYTES * elements,
        flops_per_token=float(flops),
        moved_bytes_per_token=float(ELEMENT_BYTES * moved),
    )


def forward_seconds_per_token(
    shape: ModelShape, seq: int, hardware: HardwareProfile, efficiency: Efficiency
) -> float:
    """Returns the time of one layer's forward for one token."""
    parts = (*layer_tensors(shape, seq), layer_output(shape))
    return sum(part.seconds_per_token(hardware, efficiency) for part in parts)
