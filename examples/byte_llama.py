"""A byte-level Llama-style language model in plain PyTorch, small enough to read in one sitting.

RMSNorm, rotary positions, grouped-query attention and SwiGLU, as in Llama 2/3; the vocabulary is
the 256 values of a byte. Nothing in it knows of memo. Shapes: B sequences, T bytes, C channels,
H query heads, K key/value heads, D channels per head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteLlamaConfig:
    """Sizes of a model; the feed-forward width follows Llama's 8/3 rule, in multiples of 64."""

    num_layers: int = 6
    hidden: int = 256
    num_heads: int = 4
    num_kv_heads: int = 2
    max_tokens: int = 512
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        """Refuse sizes that do not divide."""
        if self.hidden % (2 * self.num_heads) or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"hidden {self.hidden} must be a multiple of 2 x num_heads {self.num_heads}, and "
                f"num_heads a multiple of num_kv_heads {self.num_kv_heads}"
            )

    @property
    def feed_forward(self) -> int:
        """Width of the SwiGLU branch."""
        return -(-8 * self.hidden // 3 // 64) * 64


def rope_tables(config: ByteLlamaConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, each ``(T, D)``."""
    half = config.hidden // config.num_heads // 2
    frequencies = config.rope_base ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.outer(torch.arange(config.max_tokens, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x`` ``(B, heads, T, D)`` with tables ``(T, D)``."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention; K key/value heads are shared by H / K query heads each."""

    def __init__(self, config: ByteLlamaConfig) -> None:
        super().__init__()
        self.head = config.hidden // config.num_heads
        self.grouped = config.num_kv_heads != config.num_heads
        self.q = nn.Linear(config.hidden, config.hidden, bias=False)
        self.k = nn.Linear(config.hidden, config.num_kv_heads * self.head, bias=False)
        self.v = nn.Linear(config.hidden, config.num_kv_heads * self.head, bias=False)
        self.o = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``(B, T, C)`` to ``(B, T, C)``."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for proj in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.o(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """One layer: attention, then SwiGLU, each with a norm before and a residual around it."""

    def __init__(self, config: ByteLlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.gate = nn.Linear(config.hidden, config.feed_forward, bias=False)
        self.up = nn.Linear(config.hidden, config.feed_forward, bias=False)
        self.down = nn.Linear(config.feed_forward, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``(B, T, C)`` to ``(B, T, C)``."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class ByteLlama(nn.Module):
    """The whole model with its loss: bytes in, mean cross-entropy in nats per byte out."""

    def __init__(self, config: ByteLlamaConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.head = nn.Linear(config.hidden, VOCABULARY, bias=False)
        cos, sin = rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(_initialise)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Loss of predicting ``targets`` ``(B, T)`` from ``tokens`` ``(B, T)``, both int64."""
        num_tokens = tokens.shape[1]
        cos, sin = self.cos[:num_tokens], self.sin[:num_tokens]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
