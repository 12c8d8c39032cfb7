"""What Megatron's tensor, sequence and context parallelism does on one device, as operators.

Collectives are torch's own, so that a step is cut at them as one that runs is; the other operators
know shapes and nothing else. All exist to be traced on fake tensors and never run. Activations are
``(batch, tokens, width)``; between layers a device has ``seq / (tp * cp)`` tokens. Megatron's
tokens come first, so that gathering them needs no copy: here rows of all sequences are gathered.
"""

from collections.abc import Sequence
from typing import Any, Never

import torch
from torch import Tensor
from torch.utils.flop_counter import (
    register_flop_formula,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from memo_compile.errors import RuntimeMisuse


def _refuse(name: str) -> Never:
    raise RuntimeMisuse(f"{name}: exists for planning and moves nothing; trace it on fake tensors")


GROUP = "memo_shapes"
"""The process group of the collectives. There is none of this name: they are planned, not run."""


def all_gather(shard: Tensor, dim: int, world: int, after: Tensor | None = None) -> Tensor:
    """Returns the shards of all ``world`` devices, one after the other along ``dim``.

    ``after`` is not read: a gather after an incoming gradient belongs to the backward, and cannot
    be moved into the forward and saved.
    """
    rows = (shard if after is None else behind(shard, after)).flatten(0, dim)
    whole = torch.ops._c10d_functional.all_gather_into_tensor(rows, world, GROUP)
    return _waited(whole).view(*shard.shape[:dim], -1, *shard.shape[dim + 1 :])


def reduce_scatter(whole: Tensor, dim: int, world: int) -> Tensor:
    """Returns this device's part, along ``dim``, of the sum of all devices' ``whole``."""
    rows = whole.contiguous().flatten(0, dim)
    part = torch.ops._c10d_functional.reduce_scatter_tensor(rows, "sum", world, GROUP)
    return _waited(part).view(*whole.shape[:dim], -1, *whole.shape[dim + 1 :])


def _exchange(parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Sends entry i of the first dimension to device i, and returns what came from each device.

    ``(devices, batch, tokens, heads, width)`` each, in one collective; heads may differ.
    """
    sent = packed(list(parts)) if len(parts) > 1 else parts[0].contiguous()
    sizes = [1] * len(sent)
    arrived = torch.ops._c10d_functional.all_to_all_single(sent, sizes, sizes, GROUP)
    return _waited(arrived).split([part.shape[3] for part in parts], 3)


@torch.library.custom_op("memo_shapes::packed", mutates_args=())
def packed(parts: Sequence[Tensor]) -> Tensor:
    """The heads of all ``parts``, in the buffer that is sent: a copy, before which tiles end."""
    _refuse("packed")


@packed.register_fake
def _(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts), 3)


def _to_heads(tensors: Sequence[Tensor], world: int) -> list[Tensor]:
    """Returns all tokens of a part of the heads, for this device's tokens of all heads.

    ``(batch, heads, tokens, width)`` to ``(batch, heads / world, tokens * world, width)``.
    """
    tokens = (tensor.transpose(1, 2).unflatten(2, (world, -1)) for tensor in tensors)
    arrived = _exchange([each.permute(2, 0, 1, 3, 4) for each in tokens])
    return [each.transpose(0, 1).flatten(1, 2).transpose(1, 2) for each in arrived]


def _to_tokens(tensors: Sequence[Tensor], world: int) -> list[Tensor]:
    """Returns this device's tokens of all heads: the opposite of ``_to_heads``."""
    tokens = (tensor.transpose(1, 2).unflatten(1, (world, -1)) for tensor in tensors)
    arrived = _exchange([each.transpose(0, 1) for each in tokens])
    return [each.permute(1, 2, 0, 3, 4).flatten(2, 3).transpose(1, 2) for each in arrived]


def _waited(rows: Tensor) -> Tensor:
    """Returns a collective's result once it is there."""
    result: Tensor = torch.ops._c10d_functional.wait_tensor(rows)
    return result


@torch.library.custom_op("memo_shapes::behind", mutates_args=())
def behind(shard: Tensor, after: Tensor) -> Tensor:
    """Returns ``shard``, but not before ``after`` is there, which is not read."""
    _refuse("behind")


@behind.register_fake
def _(shard: Tensor, after: Tensor) -> Tensor:
    return shard.new_empty(shard.shape)


@torch.library.custom_op("memo_shapes::attention", mutates_args=())
def attention(
    query: Tensor, key: Tensor, value: Tensor, world: int, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Returns attention of the local queries to the keys of ``world`` devices, and log-sum-exp.

    Those of other devices go around in a ring.
    """
    _refuse("attention")


@attention.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("memo_shapes::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum_exp: Tensor,
    world: int,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients of the local queries, keys and values."""
    _refuse("attention_backward")


@attention_backward.register_fake
def _(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save_ring(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ctx.world, ctx.is_causal = inputs
    ctx.save_for_backward(query, key, value, *output)


def _ring_gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = attention_backward(grad, *ctx.saved_tensors, ctx.world, ctx.is_causal)
    return (*grads, None, None)


attention.register_autograd(_ring_gradients, setup_context=_save_ring)


@register_flop_formula(torch.ops.memo_shapes.attention)
def _attention_flops(
    query: Any, key: Any, value: Any, world: int, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    return world * int(sdpa_flop_count(query, key, value))


@register_flop_formula(torch.ops.memo_shapes.attention_backward)
def _attention_backward_flops(
    grad: Any, query: Any, key: Any, value: Any, *rest: Any, out_shape: Any = None, **__: Any
) -> int:
    world = int(rest[2])
    return world * int(sdpa_backward_flop_count(grad, query, key, value))


class Ulysses(torch.autograd.Function):
    """Attention of a part of the heads to all tokens: an all-to-all before it and one behind it.

    Kept are this device's tokens of all heads, and the backward exchanges them again. What came
    from other devices could only be kept or moved: no plan repeats a collective by itself.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, world: int, is_causal: bool
    ) -> Tensor:
        """``(batch, heads, tokens, width)`` each; ``world`` divides all heads."""
        heads = _to_heads([query, key, value], world)
        out, log_sum_exp = attention(heads[0], heads[1], heads[2], 1, is_causal)
        mixed = _to_tokens([out], world)[0]
        ctx.save_for_backward(query, key, value, mixed, log_sum_exp)
        ctx.world, ctx.is_causal = world, is_causal
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of queries, keys and values."""
        *kept, log_sum_exp = ctx.saved_tensors
        # With the gradient, so that it cannot be done in the forward and saved.
        heads = _to_heads([grads[0], *kept], ctx.world)
        made = attention_backward(*heads, log_sum_exp, 1, ctx.is_causal)
        return (*_to_tokens(made, ctx.world), None, None)


class ColumnParallel(torch.autograd.Function):
    """``x`` gathered along the tokens, times each weight shard; the gathered ``x`` is not kept.

    As in Megatron, the backward gathers ``x`` again for the weights' gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: int, *weights: Tensor) -> tuple[Tensor, ...]:
        """``gather(x) @ w.T`` for each weight."""
        ctx.save_for_backward(x, *weights)
        ctx.world = world
        whole = all_gather(x, 1, world)
        return tuple(torch.nn.functional.linear(whole, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of ``x`` and of the weights."""
        x, *weights = ctx.saved_tensors
        whole = all_gather(x, 1, ctx.world, grads[0]).flatten(0, 1)
        grad_x = grads[0] @ weights[0]
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            grad_x = grad_x + grad @ weight
        grad_weights = [grad.flatten(0, 1).t() @ whole for grad in grads]
        return (reduce_scatter(grad_x, 1, ctx.world), None, *grad_weights)


class ReduceScatter(torch.autograd.Function):
    """Partial sums to this device's tokens; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: int) -> Tensor:
        """``reduce_scatter`` along the tokens."""
        ctx.world = world
        return reduce_scatter(x, 1, world)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gathered gradient."""
        return all_gather(grads[0], 1, ctx.world), None


class GatherWeight(torch.autograd.Function):
    """A weight that is sharded along its first dimension, whole for the time of its use."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, world: int) -> Tensor:
        """``all_gather`` along dimension 0."""
        ctx.world = world
        return all_gather(shard, 0, world)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The shard's gradient, summed over the devices."""
        return reduce_scatter(grads[0], 0, ctx.world), None
