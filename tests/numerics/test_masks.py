"""Masks as large as attention's scores are named, and are not needed where the note says so."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import memo_compile
from memo_compile.analysis import masks
from memo_compile.reporting import state
from tests import models
from tests.numerics.training import memo_compiled

TOKENS = 48


@pytest.fixture(autouse=True)
def _small_masks(monkeypatch):
    monkeypatch.setattr(masks, "LARGE_NUMBERS", TOKENS**2)
    torch._dynamo.reset()
    state.reset()
    yield
    state.reset()


def mask_notes() -> list[str]:
    return [note for note in memo_compile.report().notes if "reads a mask" in note]


def gradients(model, inputs, loss):
    planned = memo_compiled(model, lowering="aten")
    loss(planned, **inputs).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_a_mask_of_positions_is_named_and_attention_without_it_is_the_same():
    model, inputs, loss = models.llama(num_layers=1, seq=TOKENS)
    twin = copy.deepcopy(model)
    with_mask = gradients(model, inputs, loss)
    (note,) = mask_notes()
    assert f"a mask of {TOKENS} x {TOKENS} numbers" in note
    assert "positions alone" in note
    state.reset()
    AttentionInterface.register("sdpa-causal", sdpa_attention_forward)
    twin.set_attn_implementation("sdpa-causal")
    without = gradients(twin, inputs, loss)
    assert mask_notes() == []
    for name, gradient in with_mask.items():
        torch.testing.assert_close(without[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_a_mask_that_is_made_of_an_input_names_it():
    model, inputs, loss = models.llama(num_layers=1, seq=TOKENS)
    given = torch.ones(inputs["input_ids"].shape, dtype=torch.long)
    gradients(model, {**inputs, "attention_mask": given}, loss)
    (note,) = mask_notes()
    assert "an attention_mask" in note


class Biased(nn.Module):
    """Attention with a bias that is learned, or given."""

    def __init__(self) -> None:
        super().__init__()
        self.learned = nn.Parameter(torch.zeros(TOKENS, TOKENS))
        self.weight = nn.Linear(16, 16)

    def forward(self, x, bias=None):
        query = self.weight(x).unflatten(-1, (2, 8)).transpose(1, 2)
        bias = self.learned * 2 if bias is None else bias
        return functional.scaled_dot_product_attention(query, query, query, bias).sum()


@pytest.mark.parametrize("given", [False, True])
def test_a_bias_that_the_model_means_is_not_named(given):
    bias = (torch.zeros(TOKENS, TOKENS, dtype=torch.bool).logical_not(),) if given else ()
    planned = memo_compiled(Biased(), lowering="aten")
    planned(torch.randn(1, TOKENS, 16), *bias).backward()
    assert mask_notes() == []
