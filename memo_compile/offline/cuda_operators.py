"""Replaces functions that torch traces otherwise on CUDA, in a graph that is traced without a GPU.

Some functions are one operator with its own backward on CUDA, and several operators on a CPU: see
torch's ``layer_norm.cpp``, ``Dropout.cpp`` and ``attention.cpp``, 2.11 to 2.13. In the Dynamo graph
each becomes a function that is traced as on CUDA; Inductor takes the operators apart again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from memo_compile.gpus import GpuFacts
from memo_compile.offline.cuda_attention import HALVES, attention_of
from memo_compile.torch_private.absent_gpu import decomposed

_aten = torch.ops.aten


class _RmsNorm(torch.autograd.Function):
    """``_fused_rms_norm`` and its backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        shape: Sequence[int],
        eps: float | None,
    ) -> torch.Tensor:
        forward = decomposed(_aten._fused_rms_norm.default)
        out, scale = forward(x, list(shape), weight, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.shape = list(shape)
        result: torch.Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        backward = decomposed(_aten._fused_rms_norm_backward.default)
        needed = list(ctx.needs_input_grad[:2])
        return (*backward(gradient, x, ctx.shape, scale, weight, needed), None, None)


class _LayerNorm(torch.autograd.Function):
    """``native_layer_norm`` of 16-bit numbers, with statistics in float32 (a CPU has 16 bits)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        shape: Sequence[int],
        eps: float,
    ) -> torch.Tensor:
        dims = list(range(x.dim() - len(shape), x.dim()))
        x_fp32 = x.to(torch.float32)
        variance, mean = torch.var_mean(x_fp32, dims, correction=0, keepdim=True)
        scale = torch.rsqrt(variance + eps)
        out = (x_fp32 - mean) * scale
        out = out if weight is None else out * weight
        out = out if bias is None else out + bias
        ctx.save_for_backward(x, mean, scale, weight, bias)
        ctx.shape = list(shape)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, mean, scale, weight, bias = ctx.saved_tensors
        backward = decomposed(_aten.native_layer_norm_backward.default)
        needed = list(ctx.needs_input_grad[:3])
        gradients = backward(gradient, x, ctx.shape, mean, scale, weight, bias, needed)
        return (*gradients, None, None)


def _layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """Stands for ``functional.layer_norm``, and has its parameters."""
    if input.dtype not in HALVES:
        return functional.layer_norm(input, normalized_shape, weight, bias, eps)
    return _LayerNorm.apply(input, weight, bias, normalized_shape, eps)


def _rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """Stands for ``functional.rms_norm``, and has its parameters."""
    return _RmsNorm.apply(input, weight, normalized_shape, eps)


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """Stands for ``functional.dropout``, and has its parameters."""
    if not training or not 0 < p < 1 or inplace:
        return functional.dropout(input, p, training, inplace)
    out, _ = torch.native_dropout(input, p, training)
    return out


def for_gpu(gm: fx.GraphModule, gpu: GpuFacts) -> None:
    """Changes ``gm``, Dynamo's graph, so that it is traced as on ``gpu``."""
    replacements: dict[Any, Callable[..., Any]] = {
        functional.scaled_dot_product_attention: attention_of(gpu),
        functional.layer_norm: _layer_norm,
        functional.rms_norm: _rms_norm,
        torch.rms_norm: _rms_norm,
        functional.dropout: _dropout,
        torch.dropout: _dropout,
    }
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in replacements:
            node.target = replacements[node.target]
    gm.recompile()
