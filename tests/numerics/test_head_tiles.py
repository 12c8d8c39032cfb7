"""Steps whose attention runs in tiles of heads compute what eager does, in both lowerings."""

import functools

import pytest
import torch

from memo_compile.analysis.row_rules import is_attention
from memo_compile.driver import tries
from memo_compile.driver.tile_order import Tiles
from memo_compile.passes import tile_cut
from memo_compile.passes.tiles import tilings
from tests import models
from tests.numerics.budget_cases import MODELS
from tests.numerics.closeness import Reference
from tests.numerics.small import leased_slabs
from tests.numerics.training import assert_planned, in_ci, sgd, without_dropout

BUDGET = 2**30
ODD = 27
"""Tokens of a sequence: they divide into no tiles."""


def of_wide_heads(config, num_layers, seq):
    """Its attention is twice as wide as the layers: four heads of keys, each for two of queries."""
    import transformers

    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    return models._decoder(getattr(transformers, config)(**models._sizes(num_layers, **heads)), seq)


qwen3, llama = (functools.partial(of_wide_heads, f"{name}Config") for name in ("Qwen3", "Llama"))


@pytest.fixture
def by_heads(monkeypatch):
    """Lets steps run in tiles of heads; the regions of which forms were made, whole."""
    regions = []

    def spied(region, tiles, **options):
        forms = tilings(region, tiles, **options)
        with_attention = any(map(is_attention, region.gm.graph.nodes))
        if any(any(map(is_attention, form.chain.gm.graph.nodes)) for form in forms):
            regions.append(region.name)
        elif with_attention:
            regions.append(f"{region.name} whole")
        return forms

    monkeypatch.setattr(tile_cut, "tilings", spied)
    monkeypatch.setattr(tries, "tile_order", lambda *_: (Tiles(4, by_heads=True),))
    return regions


def assert_equals_eager(build, *, dtype=torch.float32, batch=1, seq=ODD, **options):
    torch.manual_seed(0)
    model, inputs, loss = build(num_layers=2, seq=seq)
    model = without_dropout(model).to(dtype)
    case = model, {key: value[:batch] for key, value in inputs.items()}, loss
    options = {"costs": "roofline", "strict": True, "memory_budget": BUDGET, **options}
    reference = Reference(case, [sgd])
    ours = reference.train(functools.partial(torch.compile, backend="memo", options=options))
    assert_planned()
    reference.assert_close(ours)
    assert leased_slabs() == 0


MOVING = {"policy": "full-offload", "token_granule": 1, "lowering": "aten"}


@pytest.mark.parametrize("schedule", in_ci(["copies-early", "copies-late"], "copies-late"))
def test_groups_of_heads_with_norms_and_rotary_tables(schedule, by_heads):
    assert_equals_eager(qwen3, debug=f"poison,{schedule}", **MOVING)
    assert by_heads == ["layer0_fwd.part", "layer0_bwd.part_2"]


@pytest.mark.parametrize("lowering", in_ci(["aten", "inductor"], "aten"))
def test_a_batch_in_16_bits(lowering, by_heads):
    options = {"lowering": lowering, "policy": "full-recompute", "token_granule": 1}
    assert_equals_eager(llama, dtype=torch.bfloat16, batch=2, **options)
    assert by_heads == ["layer0_fwd.part", "layer0_bwd.part_2"]


def test_one_projection_for_all_and_biases(by_heads):
    """Queries, keys and values are made whole: no head has rows of its own in that product."""
    assert_equals_eager(models.gpt2, debug="poison", **MOVING)
    assert by_heads


@pytest.mark.parametrize("name", in_ci(["t5", "gemma"]))
def test_written_out_attention(name, by_heads):
    assert_equals_eager(MODELS[name], debug="poison", seq=16, **MOVING)
