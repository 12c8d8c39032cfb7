"""Llama-like and GPT-like transformers of any ``ModelShape``, with their loss, on one device.

With tensor parallelism the modules are one device's share, as Megatron cuts them: heads and ffn
over tp, tokens between layers over tp too (sequence parallel). The output head is gathered for the
device's own tokens, so that its logits hold ``seq / (tp * cp)`` tokens of the whole vocabulary:
as many bytes as Megatron's logits of all tokens and a part of the vocabulary.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from memo_compile.costs.models import ModelShape
from memo_compile.offline.shapes.degrees import ULYSSES
from memo_compile.offline.shapes.degrees import Degrees as Degrees
from memo_compile.offline.shapes.parallel import (
    ColumnParallel,
    GatherWeight,
    ReduceScatter,
    Ulysses,
    attention,
)

VOCAB_MULTIPLE = 128
"""Megatron pads a sharded vocabulary, so that each device has a multiple of this."""

ROPE_BASE = 10000.0
NORM_EPSILON = 1e-5


def one_device(shape: ModelShape, degrees: Degrees) -> ModelShape:
    """Returns ``shape`` with the heads, widths and layers of one device of the first stage.

    Key and value heads are replicated where tp is larger than their number.
    """
    tp = degrees.tp
    padded_share = -(-shape.vocab // (VOCAB_MULTIPLE * tp)) * VOCAB_MULTIPLE
    return replace(
        shape,
        num_layers=shape.num_layers // degrees.pp,
        ffn=shape.ffn // tp,
        num_heads=shape.num_heads // tp,
        num_kv_heads=max(1, shape.num_kv_heads // tp),
        vocab=shape.vocab if tp == 1 else padded_share,
    )


def _weight(*size: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*size))


def _norm(shape: ModelShape) -> nn.Module:
    if shape.gated:
        return nn.RMSNorm(shape.hidden, NORM_EPSILON)
    return nn.LayerNorm(shape.hidden, NORM_EPSILON)


class Adapter(nn.Module):
    """LoRA: the product of two small weights, beside a large one that is frozen."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        self.down, self.up = _weight(rank, weight.shape[1]), _weight(weight.shape[0], rank)

    def forward(self, x: Tensor) -> Tensor:
        """What is added to the large weight's result."""
        return functional.linear(functional.linear(x, self.down), self.up)


class Project(nn.Module):
    """Several projections of one input, their output widths cut over tp."""

    def __init__(self, width: int, outs: tuple[int, ...], tp: int, *, bias: bool) -> None:
        super().__init__()
        self.tp = tp
        self.weights = nn.ParameterList(_weight(out, width) for out in outs)
        self.biases = nn.ParameterList(_weight(out) for out in outs) if bias else None
        self.adapters: nn.ModuleList | None = None

    def adapt(self, rank: int) -> None:
        """Adds a low-rank adapter to each projection."""
        self.adapters = nn.ModuleList(Adapter(weight, rank) for weight in self.weights)

    def forward(self, x: Tensor) -> list[Tensor]:
        """One result for each projection, of all tokens of the context-parallel rank."""
        biases = [None] * len(self.weights) if self.biases is None else list(self.biases)
        if self.tp == 1:
            pairs = zip(self.weights, biases, strict=True)
            outs = [functional.linear(x, weight, bias) for weight, bias in pairs]
            if self.adapters is None:
                return outs
            return [out + adapter(x) for out, adapter in zip(outs, self.adapters, strict=True)]
        weights = [self.weights[i] for i in range(len(self.weights))]  # 2.11 traces no *list
        outs = ColumnParallel.apply(x, self.tp, *weights)
        return [out if b is None else out + b for out, b in zip(outs, biases, strict=True)]


class Close(nn.Module):
    """The projection back to the residual stream: partial sums over tp, scattered to the tokens."""

    def __init__(self, width: int, out: int, tp: int, *, bias: bool) -> None:
        super().__init__()
        self.tp = tp
        self.weight = _weight(out, width)
        self.bias = _weight(out) if bias else None
        self.adapter: Adapter | None = None

    def adapt(self, rank: int) -> None:
        """Adds a low-rank adapter."""
        self.adapter = Adapter(self.weight, rank)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, seq / (tp * cp), hidden)``."""
        if self.tp == 1:
            out = functional.linear(x, self.weight, self.bias)
            return out if self.adapter is None else out + self.adapter(x)
        summed: Tensor = ReduceScatter.apply(functional.linear(x, self.weight), self.tp)
        return summed if self.bias is None else summed + self.bias


class Attention(nn.Module):
    """Causal attention; keys and values may have fewer heads; RoPE where ``rope`` is given."""

    def __init__(self, share: ModelShape, degrees: Degrees) -> None:
        super().__init__()
        tp, self.cp, self.is_ulysses = degrees.tp, degrees.cp, degrees.cp_kind == ULYSSES
        self.head_dim = share.hidden // (share.num_heads * tp)  # hidden is not divided, heads are
        self.is_grouped = share.num_kv_heads != share.num_heads
        q_width, kv_width = share.num_heads * self.head_dim, share.num_kv_heads * self.head_dim
        widths = q_width, kv_width, kv_width
        self.qkv = Project(share.hidden, widths, tp, bias=not share.gated)
        self.out = Close(q_width, share.hidden, tp, bias=not share.gated)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attention of ``x`` to itself."""
        q, k, v = (self._heads(projected) for projected in self.qkv(x))
        if rope is not None:
            q, k = _rotate(q, *rope), _rotate(k, *rope)
        if self.is_ulysses:
            copies = max(1, self.cp // k.shape[1])
            k, v = (x.repeat_interleave(copies, 1) if copies > 1 else x for x in (k, v))
            mixed = Ulysses.apply(q, k, v, self.cp, True)
        elif self.cp > 1:
            mixed, _ = attention(q, k, v, self.cp, True)
        else:
            mixed = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=self.is_grouped
            )
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Mlp(nn.Module):
    """SwiGLU, or two projections around a GELU."""

    def __init__(self, share: ModelShape, tp: int) -> None:
        super().__init__()
        outs = (share.ffn, share.ffn) if share.gated else (share.ffn,)
        self.opening = Project(share.hidden, outs, tp, bias=not share.gated)
        self.closing = Close(share.ffn, share.hidden, tp, bias=not share.gated)

    def forward(self, x: Tensor) -> Tensor:
        """The result has the same shape as ``x``."""
        outs = self.opening(x)
        if len(outs) == 1:
            return self.closing(functional.gelu(outs[0]))
        return self.closing(functional.silu(outs[0]) * outs[1])


class TransformerLayer(nn.Module):
    """Norm, attention, residual; norm, MLP, residual."""

    def __init__(self, share: ModelShape, degrees: Degrees) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = _norm(share), _norm(share)
        self.attention, self.mlp = Attention(share, degrees), Mlp(share, degrees.tp)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """The residual stream after this layer."""
        x = x + self.attention(self.norm_1(x), rope)
        return x + self.mlp(self.norm_2(x))


class Transformer(nn.Module):
    """Embedding, layers, and on one stage the head and the loss.

    With several pipeline stages this is the first one, which has the most micro-batches in flight;
    it returns the residual stream.
    """

    frequencies: Tensor | None
    """Frequencies of the rotary embedding; None for a model with learned positions."""

    def __init__(self, shape: ModelShape, degrees: Degrees) -> None:
        super().__init__()
        self.tp, self.is_whole = degrees.tp, degrees.pp == 1
        share = one_device(shape, degrees)
        self.embedding = _weight(share.vocab, shape.hidden)
        layers = (TransformerLayer(share, degrees) for _ in range(share.num_layers))
        self.layers = nn.ModuleList(layers)
        if self.is_whole:
            self.norm = _norm(shape)
            self.head = _weight(share.vocab, shape.hidden)
        head_dim = shape.hidden // shape.num_heads
        half = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = ROPE_BASE**-half if shape.gated else None
        self.register_buffer("frequencies", frequencies, persistent=False)
        if shape.adapter_rank:
            self._adapt(shape.adapter_rank)

    def _adapt(self, rank: int) -> None:
        """Freezes all weights, and adds adapters to those of attention and MLP."""
        self.requires_grad_(False)
        for module in list(self.layers.modules()):
            if isinstance(module, Project | Close):
                module.adapt(rank)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of the device's own tokens, ``(batch, seq / (tp * cp))``."""
        x = functional.embedding(ids, _whole(self.embedding, self.tp))
        rope = None if self.frequencies is None else self._rope(x, self.frequencies)
        for layer in self.layers:
            x = layer(x, rope)
        if not self.is_whole:
            return x
        logits = functional.linear(self.norm(x), _whole(self.head, self.tp))
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    def _rope(self, x: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines of the tokens that attention sees: tp devices share theirs."""
        positions = torch.arange(x.shape[1] * self.tp, device=x.device)
        angles = positions[:, None] * frequencies[None, :]
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _whole(weight: Tensor, tp: int) -> Tensor:
    return weight if tp == 1 else GatherWeight.apply(weight, tp)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, tensors are made in ``dtype`` where none is given."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def first_stage(
    shape: ModelShape, degrees: Degrees, *, seq: int, batch: int, dtype: torch.dtype
) -> tuple[Transformer, tuple[Tensor, Tensor]]:
    """Returns one device's share of ``shape`` in ``dtype``, and token ids with labels for a step.

    Call it under a FakeTensorMode: the weights are not initialised. Raises InputError: a degree
    does not divide what it cuts.
    """
    degrees.require_divides(shape, seq)
    with default_dtype(dtype):
        model = Transformer(shape, degrees)
    tokens = seq // (degrees.tp * degrees.cp)
    ids = torch.empty(batch, tokens, dtype=torch.long)
    return model, (ids, torch.empty(batch, tokens, dtype=torch.long))
