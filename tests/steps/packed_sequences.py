"""A small decoder of packed sequences, whose attention is a custom operator or flash-attn's."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.steps import flash_attention
from tests.steps.flash_attention import flash_attn_varlen_func

WORDS, HEADS, WIDTH, TOKENS, MOST_DOCUMENTS, LAYERS = 31, 2, 8, 96, 8, 2
HIDDEN = HEADS * WIDTH
CAUSAL = (0.0, WIDTH**-0.5, True)

read: list[tuple[int, int]] = []
"""Of each call of an attention kernel: the longest sequence, as given and as its ends say."""


def note(ends: torch.Tensor, longest: int) -> None:
    """Regions that are measured alone are given zeros: their ends enclose no sequence."""
    if ends.any():
        read.append((longest, int(ends.diff().max())))


@torch.library.custom_op("memo_tests::packed", mutates_args=())
def packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, longest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention within each of several sequences, causal; its result, and log-sum-exps."""
    note(ends, longest)
    lengths = (ends, ends, longest, longest)
    return flash_attention._varlen_forward(q, k, v, *lengths, *CAUSAL)[:2]


@packed.register_fake
def _(q, k, v, ends, longest):
    return flash_attention._fake_varlen_forward(q, k, v)[:2]


@torch.library.custom_op("memo_tests::packed_backward", mutates_args=())
def packed_backward(
    grad: torch.Tensor, saved: list[torch.Tensor], ends: torch.Tensor, longest: int
) -> list[torch.Tensor]:
    """The gradients of queries, keys and values."""
    note(ends, longest)
    made = [torch.zeros_like(each) for each in saved[:3]]
    lengths = (ends, ends, longest, longest)
    flash_attention._varlen_backward(grad, *saved, *made, *lengths, *CAUSAL)
    return made


@packed_backward.register_fake
def _(grad, saved, *_):
    return [torch.empty_like(each) for each in saved[:3]]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ends, ctx.longest = inputs
    ctx.save_for_backward(*tensors, *output, ends)


def _gradients(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    *saved, ends = ctx.saved_tensors
    return *packed_backward(grad.contiguous(), saved, ends, ctx.longest), None, None


packed.register_autograd(_gradients, setup_context=_keep)

KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    "operator": lambda *given: packed(*given)[0],
    "flash-attn": lambda *given: flash_attn_varlen_func(*given, causal=True),
}


class Layer(nn.Module):
    def __init__(self, attention: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(3 * HIDDEN, HIDDEN)
        self.attention = attention

    def forward(self, x: torch.Tensor, ends: torch.Tensor, longest: int) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, WIDTH)).unbind(-3)
        x = x + self.out(self.attention(q, k, v, ends, longest).flatten(-2))
        return x + self.down(functional.gelu(self.up(x)))


class Decoder(nn.Module):
    """Of sequences one behind the other; the sum of their tokens' losses."""

    def __init__(self, attention: Callable[..., torch.Tensor], scales: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, HIDDEN), nn.Embedding(TOKENS, HIDDEN)
        self.layers = nn.ModuleList(Layer(attention) for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, WORDS)
        self.scales = scales

    def forward(self, ids, labels, places, ends, longest):
        x = self.words(ids) + self.places(places)
        if self.scales:  # the number is read by an operator of torch
            x = x * longest
        for layer in self.layers:
            x = layer(x, ends, longest)
        return functional.cross_entropy(self.head(x), labels, reduction="sum") / TOKENS


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]


def batch_of(lengths: list[int], seed: int, num_ends: int = MOST_DOCUMENTS + 1) -> Batch:
    """Sequences of ``lengths`` in a row, with their ends repeated up to ``num_ends``."""
    source = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(WORDS, (2, sum(lengths)), generator=source)
    places = torch.cat([torch.arange(length) for length in lengths])
    ends = list(itertools.accumulate(lengths, initial=0))
    ends += [ends[-1]] * (num_ends - len(ends))
    return ids, labels, places, torch.tensor(ends, dtype=torch.int32), max(lengths)
