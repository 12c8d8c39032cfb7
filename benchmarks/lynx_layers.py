"""The operators of a transformer layer as Lynx sees them, from a shape and a device.

One layer of one micro-batch under tensor parallelism without sequence parallelism, as in Lynx's
evaluation: thirteen operators in execution order, two all-reduces among them. Seconds and bytes are
those of one GPU; each all-reduce opens a window in forward and one in backward.
"""

from memo_compile.costs.hardware import HardwareProfile
from memo_compile.costs.models import ELEMENT_BYTES, ModelShape
from memo_compile.errors import InputError, require_at_least
from memo_compile.papers.layer_costs import Efficiency
from memo_compile.papers.lynx.lynx_instance import (
    NUM_WINDOWS,
    SLICE_TOKENS,
    LayerCosts,
    Operators,
    backward_seconds,
)

LINK_EFFICIENCY = 0.6
"""Share of a link that a ring all-reduce of tens of megabytes reaches."""


def describe_layer(
    shape: ModelShape,
    *,
    seq: int,
    micro_batch: int,
    tp: int,
    hardware: HardwareProfile,
    efficiency: Efficiency,
) -> LayerCosts:
    """One layer of ``shape`` on one of ``tp`` GPUs.

    The layer's output is the last operator and always kept: it is the next layer's input.

    Raises:
        InputError: a size is below 1, or tp does not divide the attention heads.
    """
    require_at_least(1, {"seq": seq, "micro-batch": micro_batch, "tp": tp})
    if shape.num_heads % tp:
        raise InputError(f"tp: {tp} does not divide the {shape.num_heads} attention heads")
    h, kv = shape.hidden, shape.hidden * shape.num_kv_heads // shape.num_heads
    f = shape.ffn
    wide = 2 * f if shape.gated else f
    # name, output elements per token, FLOPs per token, elements moved, inputs, backward reads it.
    rows: list[tuple[str, float, float, float, tuple[int, ...], bool]] = [
        ("norm1", h, 0, 2 * h, (), True),
        ("qkv", (h + 2 * kv) / tp, 2 * h * (h + 2 * kv) / tp, 0, (0,), True),
        ("attention", h / tp, 2 * h * seq / tp, 0, (1,), True),
        ("projection", h, 2 * h * h / tp, 0, (2,), False),
        ("reduce1", h, 0, 0, (3,), False),
        ("dropout1", h, 0, 2 * h, (4,), False),
        ("residual1", h, 0, 3 * h, (5,), True),
        ("norm2", h, 0, 2 * h, (6,), True),
        ("ffn_in", wide / tp, 2 * h * wide / tp, 0, (7,), True),
        ("activation", f / tp, 0, (wide + f) / tp, (8,), True),
        ("ffn_out", h, 2 * f * h / tp, 0, (9,), False),
        ("reduce2", h, 0, 0, (10,), False),
        ("residual2", h, 0, 3 * h, (6, 11), True),
    ]
    tokens = seq * micro_batch
    compute_rate = hardware.peak_flops_per_s * efficiency.gemm
    moved_rate = hardware.hbm_bytes_per_s * efficiency.hbm
    ring_bytes = 2 * (tp - 1) / tp * tokens * h * ELEMENT_BYTES
    window_s = ring_bytes / (hardware.link_bytes_per_s * LINK_EFFICIENCY)
    comm = frozenset(i for i, row in enumerate(rows) if row[0].startswith("reduce"))
    times = tuple(
        window_s
        if i in comm
        else tokens * (flops / compute_rate + moved * ELEMENT_BYTES / moved_rate)
        for i, (_, _, flops, moved, _, _) in enumerate(rows)
    )
    ops = Operators(
        times=times,
        sizes=tuple(round(tokens * row[1] * ELEMENT_BYTES) for row in rows),
        deps=tuple(row[4] for row in rows),
        comm=comm,
        whole=frozenset({2}),
        num_slices=0 if tokens % SLICE_TOKENS else tokens // SLICE_TOKENS,
    )
    return LayerCosts(
        ops=ops,
        need=tuple(row[5] for row in rows),
        windows=(window_s,) * NUM_WINDOWS,
        backward_s=backward_seconds(ops),
    )
