"""How much of each chunk a pipeline must offload: Kwai's memory model in closed form.

Source: Kwai (USENIX ATC 24), section 3, recomputed; docs/many-gpus.md derives it. A chunk is
``layers_per_chunk`` layers of one micro-batch; micro-batches have one sequence. Memory of rank 0:

    M = 6 n + 12 n / (d c) + A [4 + (N - 4)(1 - alpha)]     alpha > 0;  N in the bracket at alpha 0

n = parameters of rank 0 on one GPU, A = bytes of one chunk on one GPU, N = chunks in flight. What
takes or gives Any works on numbers and on arrays over configurations.
"""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from memo_compile.costs.models import ELEMENT_BYTES, ModelShape
from memo_compile.errors import InputError, require_at_least

WEIGHT_AND_GRADIENT_BYTES = 6
"""Bytes per parameter: bfloat16 weight and float32 gradient."""

OPTIMIZER_BYTES = 12
"""Bytes per parameter: float32 weight and Adam's moments, divided over the dp * cp ranks."""

RESIDENT_CHUNKS = 4
"""Chunks in memory with offloading: one computed, one being copied out, two reload buffers."""

MIN_STAGES = 3
"""Fewest stages: 1F1B never offloads the last two, so fewer stages leave nothing to do."""


class Checkpoint(Enum):
    """What a layer keeps for its backward."""

    NONE = "none"
    BALANCED = "balanced"
    """All but the two norm outputs, the activation function's output and its product."""
    FULL = "full"
    """The layer's input only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How a model is divided over GPUs; construct with :func:`divide_gpus`."""

    tp: int
    cp: int
    pp: int
    dp: int
    layers_per_chunk: int
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPlan:
    """The smallest offloaded share with which rank 0 stays within its budget."""

    alpha: float
    peak_bytes: float
    chunks_in_flight: int
    """N: chunks between their forward and their backward on rank 0."""
    resident_chunks: float
    """Chunks' worth of memory that they occupy at most."""
    fits: bool


def divide_gpus(
    shape: ModelShape,
    *,
    gpus: int,
    tp: int,
    cp: int,
    pp: int,
    layers_per_chunk: int,
    checkpoint: Checkpoint,
) -> ParallelConfig:
    """Returns the configuration, with the data-parallel size that uses all ``gpus``.

    Raises InputError: a size is below 1, tp * cp * pp does not divide the GPUs, pp the layers,
    layers_per_chunk the layers of a stage, or tp the attention heads; it is named.
    """
    sizes = {"gpus": gpus, "tp": tp, "cp": cp, "pp": pp, "layers-per-chunk": layers_per_chunk}
    require_at_least(1, sizes)
    if gpus % (tp * cp * pp):
        raise InputError(
            f"gpus: {gpus} is not divisible by tp * cp * pp = {tp} * {cp} * {pp} = {tp * cp * pp}"
        )
    if shape.num_layers % pp:
        raise InputError(f"pp: {pp} stages do not divide the {shape.num_layers} layers")
    if (shape.num_layers // pp) % layers_per_chunk:
        raise InputError(
            f"layers-per-chunk: {layers_per_chunk} does not divide the "
            f"{shape.num_layers // pp} layers of a stage"
        )
    if shape.num_heads % tp:
        raise InputError(f"tp: {tp} does not divide the {shape.num_heads} attention heads")
    return ParallelConfig(
        tp=tp,
        cp=cp,
        pp=pp,
        dp=gpus // (tp * cp * pp),
        layers_per_chunk=layers_per_chunk,
        checkpoint=checkpoint,
    )


def saved_elements(shape: ModelShape, checkpoint: Checkpoint) -> float:
    """Returns the elements per token that one layer keeps for its backward, over all GPUs."""
    h, f, kv = shape.hidden, shape.ffn, shape.kv_ratio
    num_wide = 4 if shape.gated else 2  # tensors as wide as the ffn
    return {
        Checkpoint.NONE: (6 + 2 * kv) * h + num_wide * f,
        Checkpoint.BALANCED: (4 + 2 * kv) * h + num_wide / 2 * f,
        Checkpoint.FULL: float(h),
    }[checkpoint]


def chunk_bytes(shape: ModelShape, seq: int, config: ParallelConfig) -> float:
    """A: bytes that one chunk keeps on one GPU; the sequence is divided over tp and cp."""
    per_token = config.layers_per_chunk * saved_elements(shape, config.checkpoint) * ELEMENT_BYTES
    return per_token * seq / (config.cp * config.tp)


def stage_parameters(shape: Any, config: Any) -> Any:
    """n: parameters of rank 0, the one with the input embedding, on one GPU."""
    layers = shape.num_layers / config.pp * shape.layer_parameters
    return (layers + shape.embedding_parameters) / config.tp


def static_bytes(shape: Any, config: Any) -> Any:
    """Weights, gradients and optimizer state of rank 0."""
    optimizer_bytes = OPTIMIZER_BYTES / (config.dp * config.cp)
    return stage_parameters(shape, config) * (WEIGHT_AND_GRADIENT_BYTES + optimizer_bytes)


def chunks_in_flight(pp: Any, num_chunks: Any) -> Any:
    """N on rank 0: p for plain 1F1B, 2 (p - 1) + (v - 1) p + 1 with v > 1 chunks per rank."""
    return np.where(num_chunks == 1, pp, 2 * (pp - 1) + (num_chunks - 1) * pp + 1)


def resident_chunks(in_flight: Any, alpha: Any) -> Any:
    """Returns the chunks' worth of memory that ``in_flight`` chunks take at share ``alpha``."""
    with_offloading = RESIDENT_CHUNKS + (in_flight - RESIDENT_CHUNKS) * (1 - alpha)
    return np.where(alpha == 0, in_flight, with_offloading)


def smallest_alpha(
    pp: Any, in_flight: Any, constant_bytes: Any, one_chunk_bytes: Any, budget_bytes: float
) -> Any:
    """Returns the least offloaded share that fits, at most 1; 0: nothing need, or can, be moved."""
    num_offloaded = in_flight - RESIDENT_CHUNKS
    num_that_fit = (budget_bytes - constant_bytes) / one_chunk_bytes - RESIDENT_CHUNKS
    alpha = np.clip(1 - num_that_fit / np.maximum(num_offloaded, 1), 0.0, 1.0)
    return np.where((pp >= MIN_STAGES) & (num_offloaded > 0), alpha, 0.0)


def plan_offload(
    shape: ModelShape, *, seq: int, config: ParallelConfig, budget_bytes: float
) -> OffloadPlan:
    """Finds the smallest alpha with which rank 0 fits, else 1. Raises InputError: no tokens."""
    require_at_least(1, {"seq": seq})
    constant_bytes, one_chunk_bytes = static_bytes(shape, config), chunk_bytes(shape, seq, config)
    num_chunks = shape.num_layers // (config.pp * config.layers_per_chunk)
    in_flight = int(chunks_in_flight(config.pp, num_chunks))
    alpha = float(
        smallest_alpha(config.pp, in_flight, constant_bytes, one_chunk_bytes, budget_bytes)
    )
    resident = float(resident_chunks(in_flight, alpha))
    peak = constant_bytes + one_chunk_bytes * resident
    fits = peak <= budget_bytes or (alpha > 0 and math.isclose(peak, budget_bytes, rel_tol=1e-9))
    return OffloadPlan(
        alpha=alpha if fits else 1.0,
        peak_bytes=peak,
        chunks_in_flight=in_flight,
        resident_chunks=resident,
        fits=fits,
    )
