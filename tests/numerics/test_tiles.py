"""Steps whose wide chains run in tiles of tokens compute what eager does, in both lowerings."""

import functools

import pytest
import torch
from torch import nn

import memo_compile
from memo_compile.driver import tries
from memo_compile.driver.tile_order import Tiles
from tests.models import ModelCase, llama
from tests.numerics.budget_cases import MODELS
from tests.numerics.closeness import Reference
from tests.numerics.small import leased_slabs
from tests.numerics.training import assert_planned, in_ci, sgd, without_dropout


class LossOnly(nn.Module):
    """The logits are no output: they need not exist at once."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.model(**inputs).loss


def loss_only(name: str, num_layers: int = 2) -> ModelCase:
    """Of two layers; test_budget runs more of them in tiles."""
    torch.manual_seed(0)
    model, inputs, _ = MODELS[name](num_layers=num_layers)
    model = without_dropout(model)
    inputs = {key: value[:1] for key, value in inputs.items()}
    return LossOnly(model), inputs, lambda model, **inputs: model(**inputs)


def assert_equals_eager(name: str, tiles: int, num_layers: int = 2, **options: object) -> None:
    case = loss_only(name, num_layers)
    options = {"token_tiles": tiles, "costs": "roofline", "strict": True, **options}
    compiled = functools.partial(torch.compile, backend="memo", options=options)
    reference = Reference(case, [sgd])
    ours = reference.train(compiled)
    assert_planned()
    calls = {key.split("/")[0] for key in memo_compile.report().plans[-1].offsets}
    assert any(".tile" in key for key in calls), "nothing runs in tiles"
    reference.assert_close(ours)
    assert leased_slabs() == 0


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_op_by_op(name):
    """A first tile, two in the middle, a last one; test_budget runs the other models so."""
    assert_equals_eager(name, 4, lowering="aten", debug="poison")


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_op_by_op_without_a_tile_in_the_middle(name):
    assert_equals_eager(name, 2, lowering="aten", debug="poison")


@pytest.mark.parametrize("policy", in_ci(["full-recompute", "full-offload"], "full-recompute"))
def test_tiles_of_a_step_that_moves(policy):
    """What tiles leave, such as a norm's result, is recomputed too: a layer keeps its input."""
    assert_equals_eager("llama", 4, lowering="aten", debug="poison", policy=policy, token_granule=4)
    if policy == "full-recompute":
        rows = memo_compile.report().plans[-1].decisions
        kept = [row for row in rows if row.decision != "RECOMPUTE"]
        assert len(rows) > 8
        assert {row.tensor.split()[0] for row in kept} == {"embedding", "add_14"}


@pytest.mark.full
@pytest.mark.parametrize("debug", ["poison,copies-early", "poison,copies-late"])
def test_what_the_attention_needs_is_recomputed_after_the_mlps_backward(debug):
    """Policy memo keeps what attention returns, so that the rest is made in two parts."""
    more = {"policy": "memo", "alpha": 0.0, "token_granule": 4, "debug": debug}
    assert_equals_eager("llama", 4, num_layers=3, lowering="aten", **more)
    made = [key for key in memo_compile.report().plans[-1].offsets if key.startswith("recompute.")]
    calls = {key.split("/")[0].rpartition(".part")[0] for key in made if ".part1/" in key}
    assert calls
    assert calls <= {key.split("/")[0] for key in made}


VOCABULARY, TOKENS = 512, 64
"""Logits are 16 times as wide as the layers, and the MLP twice."""


IN_ALL_UNDER = (
    (False, "save"),
    (False, "full-offload"),
    (True, "full-recompute"),
    (True, "full-offload"),
)


@pytest.mark.parametrize(("in_all", "policy"), in_ci(IN_ALL_UNDER, IN_ALL_UNDER[2]))
def test_only_the_loss_head_is_not_saved_where_it_alone_is_too_wide(in_all, policy, monkeypatch):
    model, inputs, _ = llama(num_layers=2, seq=TOKENS)
    model.set_output_embeddings(nn.Linear(model.config.hidden_size, VOCABULARY, bias=False))
    model.config.vocab_size = VOCABULARY
    logits = inputs["input_ids"].numel() * VOCABULARY * 4
    tiles = Tiles(4, 0 if in_all else logits, logits)
    monkeypatch.setattr(tries, "tile_order", lambda *_: (tiles,))
    case = LossOnly(model), inputs, lambda model, **inputs: model(**inputs)
    options = {"lowering": "aten", "debug": "poison", "costs": "roofline", "strict": True}
    options |= {"policy": policy, "token_granule": 4, "memory_budget": 2**30}
    reference = Reference(case, [sgd])
    ours = reference.train(functools.partial(torch.compile, backend="memo", options=options))
    assert_planned()
    calls = {key.split("/")[0] for key in memo_compile.report().plans[-1].offsets}
    in_tiles = {call.split("_")[0] for call in calls if ".tile" in call}
    assert in_tiles == ({"prologue", "layer0", "epilogue"} if in_all else {"epilogue"})
    reference.assert_close(ours)


INDUCTOR = tuple(name for name in MODELS if name != "mixtral")
"""Inductor puts two results of mixtral's tiles into one buffer, which memo refuses."""


@pytest.mark.parametrize("name", in_ci(INDUCTOR, "llama"))
def test_inductor(name):
    """A sum over tiles that Inductor makes of several kernels must not overwrite its own start."""
    assert_equals_eager(name, 4, lowering="inductor")


@pytest.mark.full
def test_tiles_that_inductor_does_not_keep_apart():
    """Refused with the option to change, never computed wrong."""
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="token_tiles=1"):
        assert_equals_eager("mixtral", 4, lowering="inductor")
