"""Says which attention kernel torch takes on a GPU, for a graph that is traced without one.

torch decides in C++, by the device at hand (``sdp_utils.cpp``, ``attention.cpp``, 2.11 to 2.13).
This module applies the same rules to a GPU that is not at hand.
"""

import enum
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from memo_compile.config import torch_settings
from memo_compile.gpus import GpuFacts
from memo_compile.passes.needless_masks import STANDS_FOR

_aten = torch.ops.aten


class Kernel(enum.Enum):
    """An implementation of attention."""

    FLASH = "flash"
    CUDNN = "cudnn"
    EFFICIENT = "efficient"
    MATH = "math"


FLASH_WIDTH = 256
CUDNN_WIDTH, CUDNN_WIDTH_HOPPER = 128, 256
"""The widest heads of either, with a backward; cuDNN 9.10 and later."""
CUDNN_WIDTHS_BLACKWELL = (192, 128)
"""DeepSeek's heads of queries and keys, and of values, are taken as well; 9.11 and later."""
HALVES = (torch.float16, torch.bfloat16)
FLASH_PADDING = 8
"""Flash attention pads heads to a multiple of this."""
MASK_ALIGNMENT = 8
"""Memory-efficient attention pads a mask's last dimension to a multiple of this."""


def prefers_cudnn(gpu: GpuFacts) -> bool:
    """True where torch tries cuDNN first: on Hopper and Blackwell, unless it is told not to."""
    is_deprioritised = torch_settings().get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"
    return gpu.major in (9, 10) and not is_deprioritised


class _Inputs(NamedTuple):
    """The inputs of an attention: tensors are (B, H, T, D), the mask (B, H, T, S)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool


def kernel_for(
    gpu: GpuFacts,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> Kernel:
    """Returns the kernel that torch takes on ``gpu`` for a training step."""
    order = [Kernel.FLASH, Kernel.EFFICIENT]
    if prefers_cudnn(gpu):
        order.insert(0, Kernel.CUDNN)
    if not _is_plain(query, key, value):
        return Kernel.MATH
    is_grouped = query.shape[-3] != key.shape[-3] or key.shape[-3] != value.shape[-3]
    if is_grouped and not (enable_gqa and query.shape[-3] % key.shape[-3] == 0):
        return Kernel.MATH
    inputs = _Inputs(query, key, value, mask, dropout_p, is_causal)
    fits = {
        Kernel.FLASH: _fits_flash(gpu, inputs),
        Kernel.CUDNN: _fits_cudnn(gpu, inputs),
        Kernel.EFFICIENT: not is_grouped and _fits_efficient(inputs),
    }
    return next((kernel for kernel in order if fits[kernel]), Kernel.MATH)


def _is_plain(*tensors: torch.Tensor) -> bool:
    """True where all have four dimensions, one dtype and batch, entries, and a dense last one."""
    return all(
        tensor.dim() == 4
        and tensor.dtype == tensors[0].dtype
        and tensor.shape[0] == tensors[0].shape[0]
        and tensor.numel() > 0
        and tensor.stride(-1) == 1
        for tensor in tensors
    )


def _fits_flash(gpu: GpuFacts, inputs: _Inputs) -> bool:
    """True where flash attention takes ``inputs``, backward included."""
    query, key, value, mask, dropout_p, is_causal = inputs
    width = query.shape[-1]
    is_square = query.shape[-2] == key.shape[-2]
    # Ada and small Amperes lack the shared memory that a backward of wide heads needs.
    is_large = gpu.capability not in range(86, 90)
    return (
        mask is None
        and query.dtype in HALVES
        and width == key.shape[-1] == value.shape[-1]
        and width <= FLASH_WIDTH
        and (is_square or not is_causal)
        and (is_large or width <= 192 or (width > 224 and not dropout_p))
    )


def _fits_cudnn(gpu: GpuFacts, inputs: _Inputs) -> bool:
    """True where cuDNN's attention takes ``inputs``, backward included."""
    query, key, value, mask, dropout_p, _ = inputs
    widths = (query.shape[-1], value.shape[-1])
    widest = CUDNN_WIDTH_HOPPER if gpu.capability == 90 else CUDNN_WIDTH
    return (
        query.dtype in HALVES
        and all(width % 8 == 0 for width in widths)
        and (max(widths) <= widest or (gpu.major == 10 and widths == CUDNN_WIDTHS_BLACKWELL))
        and key.shape[-2] > 1
        and (query.shape[-2] > 1 or not dropout_p)
        and (mask is None or not mask.requires_grad)
        and not _must_be_deterministic()
    )


def _must_be_deterministic() -> bool:
    """True where torch may only run deterministic kernels, which cuDNN's backward is not."""
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled() and not warns


def _fits_efficient(inputs: _Inputs) -> bool:
    """True where memory-efficient attention takes ``inputs``, backward included."""
    query, key, value, mask, _, is_causal = inputs
    alignment = 8 if query.dtype in HALVES else 4
    return (
        query.dtype in (*HALVES, torch.float32)
        and query.shape[-1] == key.shape[-1]
        and query.shape[-1] % alignment == 0
        and value.shape[-1] % alignment == 0
        and not (mask is not None and is_causal)
    )


def attention_of(gpu: GpuFacts) -> Callable[..., torch.Tensor]:
    """Returns ``scaled_dot_product_attention`` as torch runs it on ``gpu`` in a training step."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        settings: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal}
        kernel = kernel_for(gpu, query, key, value, attn_mask, enable_gqa=enable_gqa, **settings)
        if kernel is Kernel.MATH:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask, scale=scale, enable_gqa=enable_gqa, **settings
            )
        if kernel is Kernel.FLASH:
            return _flash(query, key, value, scale, **settings)
        # True below asks for the log-sum-exp, which the backward reads; False is a debug mask.
        mask = None if attn_mask is None else _as_bias(attn_mask, query)
        if kernel is Kernel.CUDNN:
            cudnn = _aten._scaled_dot_product_cudnn_attention.default
            out: torch.Tensor = cudnn(
                query, key, value, mask, True, dropout_p, is_causal, False, scale=scale
            )[0]
            return out
        if mask is not None:
            mask = _aligned(mask, query, key)
        efficient = _aten._scaled_dot_product_efficient_attention.default
        out = efficient(query, key, value, mask, True, dropout_p, is_causal, scale=scale)[0]
        return out

    setattr(attention, STANDS_FOR, functional.scaled_dot_product_attention)
    return attention


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    *,
    dropout_p: float,
    is_causal: bool,
) -> torch.Tensor:
    """Calls flash attention, with heads padded to the multiple that it takes."""
    width = query.shape[-1]
    scale = 1 / math.sqrt(width) if scale is None else scale
    inputs = [query, key, value]
    if padding := -width % FLASH_PADDING:
        inputs = [functional.pad(tensor, [0, padding]) for tensor in inputs]
    flash = _aten._scaled_dot_product_flash_attention.default
    out: torch.Tensor = flash(*inputs, dropout_p, is_causal, False, scale=scale)[0]
    return out[..., :width] if padding else out


def _as_bias(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Returns the mask as numbers to add to the scores: 0 for True, -inf for False."""
    if mask.dtype is not torch.bool:
        return mask
    zero, minus_infinity = (
        torch.full((), number, dtype=query.dtype, device=mask.device) for number in (0.0, -math.inf)
    )
    return torch.where(mask, zero, minus_infinity)


def _aligned(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Returns ``mask`` in memory as memory-efficient attention reads it, a row for each query."""
    mask = mask.expand(*query.shape[:3], key.shape[2])
    columns = mask.shape[-1]
    if padding := -columns % MASK_ALIGNMENT:
        return functional.pad(mask, [0, padding])[..., :columns]
    unaligned = any(step % MASK_ALIGNMENT for step in mask.stride()[:3])
    return mask.contiguous() if unaligned else mask
