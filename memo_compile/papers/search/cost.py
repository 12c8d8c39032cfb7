"""Memory and time of every configuration at once, as numpy expressions.

Memory is Kwai's closed form (kwai/offload.py). Time of a step, for m micro-batches of one
sequence, v chunks per rank, T seconds of one micro-batch on one stage:

    step = m (T + head) + (p - 1) T / v + point to point + exposed copies + gradients + optimizer

A layer's forward is its matrix products and attention at ``gemm_efficiency`` of peak, its other
operators at ``hbm_efficiency`` of bandwidth, four collectives of tensor parallelism, and the part
of the context-parallel ring that attention does not hide; backward is twice the compute; a
checkpoint policy adds what it recomputes. docs/many-gpus.md lists what is left out.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from memo_compile.costs.hardware import HardwareProfile
from memo_compile.costs.models import ELEMENT_BYTES, ModelShape
from memo_compile.papers.kwai.balanced import BALANCED
from memo_compile.papers.kwai.offload import (
    OPTIMIZER_BYTES,
    WEIGHT_AND_GRADIENT_BYTES,
    Checkpoint,
    chunks_in_flight,
    resident_chunks,
    saved_elements,
    smallest_alpha,
    stage_parameters,
    static_bytes,
)
from memo_compile.papers.layer_costs import layer_output, layer_tensors
from memo_compile.papers.search.space import CHECKPOINTS, Columns

TP_COLLECTIVES = 4
"""All-gathers and reduce-scatters of one layer's forward with sequence parallelism."""

GRADIENT_TRAFFIC_BYTES = 4 + 2
"""Reduce-scatter of a float32 gradient and all-gather of a bfloat16 weight, per parameter."""

OPTIMIZER_TRAFFIC_BYTES = 2 * OPTIMIZER_BYTES + WEIGHT_AND_GRADIENT_BYTES
"""Adam reads and writes its state and reads the gradient, per parameter of its shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Shares of nominal rates that a training step reaches; ``memo calibrate`` fits them."""

    gemm_efficiency: float = 0.60
    """Kwai's setting for its own estimates."""
    hbm_efficiency: float = 0.80
    """Kwai's setting for its own estimates."""
    link_efficiency: float = 0.60
    """Ring collectives over NVLink, typical of 100 MB messages."""
    network_efficiency: float = 0.50
    """Ring collectives over the network."""
    host_efficiency: float = 0.35
    """MEMO's tables imply 10 to 12 of 32 GB/s: a third."""
    chunk_overhead_s: float = 2e-4
    """Launches and gaps of one pass over one chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a model and a step ask for; floats, or arrays with one entry for each measured row."""

    num_layers: Any
    hidden: Any
    kv_hidden: Any
    layer_parameters: Any
    embedding_parameters: Any
    num_heads: Any
    seq: Any
    global_batch: Any
    moved_bytes: Any
    """Memory traffic of one layer's bandwidth-bound operators, per token."""
    balanced_bytes: Any
    """The part of it that balanced checkpointing repeats."""
    saved_elements: Any
    """Per checkpoint policy the elements per token that a layer keeps; a row per policy."""
    flops: Any
    """FLOPs of the step without recomputation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The predicted step of each configuration; arrays of one length."""

    alpha: Any
    peak_bytes: Any
    iteration_s: Any
    mfu: Any
    usable: Any
    """True where memory fits and the batch divides over replicas and stages."""


def describe_workload(shape: ModelShape, seq: int, global_batch: int) -> Workload:
    """Returns the numbers of one step of a model. Raises InputError: ``seq`` is below 1."""
    tensors = (*layer_tensors(shape, seq), layer_output(shape))
    moved_bytes = sum(tensor.moved_bytes_per_token for tensor in tensors)
    balanced_bytes = sum(t.moved_bytes_per_token for t in tensors if t.name in BALANCED)
    equal_fields = ("num_layers", "hidden", "layer_parameters", "embedding_parameters", "num_heads")
    return Workload(
        **{name: float(getattr(shape, name)) for name in equal_fields},
        kv_hidden=shape.hidden * shape.kv_ratio,
        seq=float(seq),
        global_batch=float(global_batch),
        moved_bytes=moved_bytes,
        balanced_bytes=balanced_bytes,
        saved_elements=np.array([saved_elements(shape, policy) for policy in CHECKPOINTS]),
        flops=shape.flops_per_token(seq) * seq * global_batch,
    )


def evaluate(
    work: Workload,
    columns: Columns,
    hardware: HardwareProfile,
    model: CostModel,
    budget_bytes: float,
    alpha: Any = None,
) -> Evaluation:
    """Returns memory, offloaded share and time of every configuration, without a loop over them.

    ``alpha`` prescribes the offloaded shares (measured runs); else the smallest that fits is taken.
    """
    num_chunks = work.num_layers / (columns.pp * columns.layers_per_chunk)
    in_flight = chunks_in_flight(columns.pp, num_chunks)
    constant_bytes = static_bytes(work, columns)
    elements = np.choose(columns.checkpoint, work.saved_elements)
    shard = columns.tp * columns.cp
    chunk_bytes = columns.layers_per_chunk * elements * (ELEMENT_BYTES * work.seq) / shard
    if alpha is None:
        alpha = smallest_alpha(columns.pp, in_flight, constant_bytes, chunk_bytes, budget_bytes)
    peak = constant_bytes + chunk_bytes * resident_chunks(in_flight, alpha)
    copied_bytes = alpha * chunk_bytes
    step_s = _step_seconds(
        work, columns, hardware, model, num_chunks, in_flight, copied_bytes=copied_bytes
    )
    batches = work.global_batch / columns.dp
    usable = (peak <= budget_bytes * (1 + 1e-9)) & (batches % 1 == 0)
    # Interleaved chunks need a multiple of the stages.
    usable &= ((num_chunks == 1) | (batches % columns.pp == 0)) & (work.num_heads % columns.tp == 0)
    gpus = shard * columns.pp * columns.dp
    mfu = work.flops / (gpus * hardware.peak_flops_per_s * step_s)
    return Evaluation(alpha=alpha, peak_bytes=peak, iteration_s=step_s, mfu=mfu, usable=usable)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSeconds:
    """One layer of one micro-batch on its tp * cp GPUs; arrays over configurations."""

    forward: Any
    backward: Any
    repeated: Any
    """What the checkpoint policy recomputes in backward."""


def layer_seconds(
    work: Workload, columns: Columns, hardware: HardwareProfile, model: CostModel
) -> LayerSeconds:
    """Sums compute, tensor-parallel collectives, and what of the ring attention does not hide."""
    tp, cp = columns.tp, columns.cp
    shard = tp * cp
    flops_rate = hardware.peak_flops_per_s * model.gemm_efficiency * shard
    moved_rate = hardware.hbm_bytes_per_s * model.hbm_efficiency * shard
    link_rate = hardware.link_bytes_per_s * model.link_efficiency
    network_rate = hardware.network_bytes_per_s * model.network_efficiency
    attention_s = 2 * work.hidden * work.seq**2 / flops_rate
    compute_s = 2 * work.layer_parameters * work.seq / flops_rate + attention_s
    compute_s = compute_s + work.moved_bytes * work.seq / moved_rate
    activation_bytes = ELEMENT_BYTES * work.seq * work.hidden / cp
    tp_s = TP_COLLECTIVES * activation_bytes * (tp - 1) / tp / link_rate
    ring_rate = np.where(shard <= hardware.devices_per_node, link_rate, network_rate)
    ring_s = 2 * ELEMENT_BYTES * work.kv_hidden * work.seq * (cp - 1) / shard / ring_rate
    forward_s = compute_s + tp_s + np.maximum(0, ring_s - attention_s)
    balanced_s = work.balanced_bytes * work.seq / moved_rate
    repeated = {Checkpoint.NONE: 0.0, Checkpoint.BALANCED: balanced_s, Checkpoint.FULL: forward_s}
    return LayerSeconds(
        forward=forward_s,
        backward=2 * compute_s + tp_s + np.maximum(0, 2 * ring_s - 2 * attention_s),
        repeated=np.choose(columns.checkpoint, [repeated[policy] for policy in CHECKPOINTS]),
    )


def _step_seconds(
    work: Workload,
    columns: Columns,
    hardware: HardwareProfile,
    model: CostModel,
    num_chunks: Any,
    in_flight: Any,
    *,
    copied_bytes: Any,
) -> Any:
    """Returns the sum in this file's head; ``copied_bytes`` of each chunk leave and return."""
    tp, cp, pp, dp = columns.tp, columns.cp, columns.pp, columns.dp
    shard = tp * cp
    link_rate = hardware.link_bytes_per_s * model.link_efficiency
    network_rate = hardware.network_bytes_per_s * model.network_efficiency
    hbm_rate = hardware.hbm_bytes_per_s * model.hbm_efficiency
    flops_rate = hardware.peak_flops_per_s * model.gemm_efficiency * shard
    layer = layer_seconds(work, columns, hardware, model)
    layers = columns.layers_per_chunk
    forward_s = layers * layer.forward + model.chunk_overhead_s  # of a chunk
    backward_s = layers * (layer.backward + layer.repeated) + model.chunk_overhead_s
    stage_s = num_chunks * (forward_s + backward_s)
    batches = work.global_batch / dp
    passes = batches * num_chunks
    head_s = 6 * work.embedding_parameters * work.seq / flops_rate
    boundary_bytes = 2 * ELEMENT_BYTES * work.seq * work.hidden / shard
    boundary_s = np.where(pp > 1, boundary_bytes / network_rate, 0.0)
    # A copy hides behind a forward while the pipeline fills, a backward while it drains, else both.
    copy_s = copied_bytes / (hardware.d2h_bytes_per_s * model.host_efficiency)
    ramp = np.minimum(in_flight, passes)
    ramp_s = np.maximum(0, copy_s - forward_s) + np.maximum(0, copy_s - backward_s)
    steady_s = np.maximum(0, copy_s - forward_s - backward_s)
    exposed_s = ramp * ramp_s + (passes - ramp) * steady_s
    replicas = dp * cp
    gradient_rate = np.where(shard * dp <= hardware.devices_per_node, link_rate, network_rate)
    parameters = stage_parameters(work, columns)
    gradient_bytes = GRADIENT_TRAFFIC_BYTES * parameters * (replicas - 1) / replicas
    optimizer_bytes = OPTIMIZER_TRAFFIC_BYTES * parameters / replicas
    step_s = batches * (stage_s + head_s) + (pp - 1) * stage_s / num_chunks
    step_s = step_s + passes * boundary_s + exposed_s
    return step_s + gradient_bytes / gradient_rate + optimizer_bytes / hbm_rate
