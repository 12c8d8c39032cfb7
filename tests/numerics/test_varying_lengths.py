"""Lengths that change: code with the length as a symbol computes what eager computes."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional

import memo_compile
from memo_compile.errors import Infeasible
from memo_compile.lowering.varying_sizes import VaryingRegions
from tests.numerics.small import Pair, leased_slabs
from tests.numerics.training import INDUCTOR, assert_planned, sgd

BATCH, HEADS, WIDTH, WORDS = 2, 4, 16, 61

LENGTHS = (6, 9, 16, 4, 2, 61, 3)
"""For the second symbolic code is made; then come those of other sizes, odd ones, and primes."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        heads = self.qkv(self.norm(x)).view(batch, tokens, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return x + self.down(functional.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, scores: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        self.scores = scores

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        if self.scores:  # a square of the length, by hand, and one token less
            scores = (x @ x.transpose(1, 2)).div(WIDTH).softmax(-1)
            x = (scores @ x)[:, :-1]
            labels = labels[:, 1:]
        logits = self.head(x).reshape(-1, WORDS)
        return functional.cross_entropy(logits, labels.reshape(-1))


def batch_of(seed: int, tokens: int, batch: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(WORDS, (2, batch, tokens), generator=source)
    return ids, labels


@pytest.fixture
def watched(monkeypatch):
    """The regions of graphs that were compiled for several lengths."""
    found: dict[int, VaryingRegions] = {}
    lower = VaryingRegions.lower

    def noted(self, *args, **kwargs):
        found[id(self)] = self
        return lower(self, *args, **kwargs)

    monkeypatch.setattr(VaryingRegions, "lower", noted)
    return found


def trained(
    pair: Pair,
    lengths: tuple[int, ...],
    batches: tuple[int, ...] = (BATCH,),
    *,
    apart: bool = False,
) -> None:
    """Two lengths a step, gradients added up; each step starts from eager's parameters.

    Words and labels are parts of one tensor, unless they lie ``apart``: then the graph of the
    second length is traced for all.
    """
    optimizers = [sgd(pair.ours), sgd(pair.eager)]
    for at in range(0, len(lengths), 2):
        pair.zero_grad()
        for number, tokens in enumerate(lengths[at : at + 2], start=at):
            given = batch_of(number, tokens, batches[number % len(batches)])
            if apart:
                given = tuple(part.clone() for part in given)
            pair.each(lambda model, given=given: model(*given).backward())
        pair.assert_equal()
        for optimizer in optimizers:
            optimizer.step()
        pair.ours.load_state_dict(pair.eager.state_dict())


def test_code_with_a_symbol_serves_all_lengths(watched):
    pair = Pair(Decoder(), **INDUCTOR)
    trained(pair, LENGTHS, apart=True)
    assert_planned()
    (regions,) = watched.values()
    counts = dataclasses.replace(regions.counts)
    assert counts.symbolic >= 5  # of the second length, whose symbols tell of others
    assert counts.alone == 0
    assert counts.reused >= counts.symbolic * (len(LENGTHS) - 2)
    assert leased_slabs() == 0
    assert not memo_compile.report().notes


@pytest.mark.full
@pytest.mark.parametrize("debug", ["copies-early", "copies-late"])
@pytest.mark.parametrize("share", [0.5, 0.2])
def test_under_a_budget(debug, share, watched):
    """``share`` of what lies between the longest's floor and what it takes to keep everything."""
    model = Decoder(scores=True)
    options = {**INDUCTOR, "debug": ("poison", debug), "costs": "roofline"}
    Pair(model, **options).assert_step(*batch_of(0, max(LENGTHS)))
    plan = memo_compile.report().plans[-1]
    torch._dynamo.reset()
    with pytest.raises(Infeasible) as refused:
        Pair(model, **options, memory_budget=1).assert_step(*batch_of(0, max(LENGTHS)))
    floor = refused.value.floor_bytes + plan.fixed.new_gradients  # of a step that adds to .grad
    budget = int(floor + share * (plan.peak_bytes - floor))
    torch._dynamo.reset()
    memo_compile.reporting.state.reset()
    pair = Pair(model, **options, memory_budget=budget)
    trained(pair, LENGTHS)
    assert_planned()
    plans = memo_compile.report().plans
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in plans)
    assert any(regions.counts.reused for regions in watched.values())


@pytest.mark.full
def test_a_square_of_the_length_and_a_batch_that_changes(watched):
    pair = Pair(Decoder(scores=True), **INDUCTOR)
    trained(pair, (6, 9, 11, 16, 1, 4, 13, 61, 32, 7), batches=(2, 2, 2, 2, 3, 3))
    assert_planned()
    assert any(regions.counts.reused for regions in watched.values())
