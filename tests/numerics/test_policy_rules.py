"""``memo_compile.policy_rule``: users pin what becomes of saved tensors."""

import copy
from collections.abc import Iterator

import pytest
import torch

import memo_compile
from memo_compile.errors import ConfigError
from tests.models import llama

OPTIONS = {"lowering": "aten", "costs": "roofline", "token_tiles": 1, "debug": ("poison",)}


@pytest.fixture(autouse=True)
def _no_rules() -> Iterator[None]:
    yield
    memo_compile.clear_policy_rules()


def _decisions(rule, **options) -> dict[str, set[str]]:
    """What a Llama's plan does by module, after its gradients were compared with eager's."""
    if rule is not None:
        memo_compile.policy_rule(rule)
    model, inputs, loss = llama(num_layers=4)
    eager = copy.deepcopy(model)
    loss(eager, **inputs).backward()
    torch.compile(loss, backend="memo", options=OPTIONS | options)(model, **inputs).backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    decisions: dict[str, set[str]] = {}
    for row in memo_compile.report().plans[-1].decisions:
        decisions.setdefault(row.role, set()).add(row.decision)
    return decisions


@pytest.mark.parametrize("schedule", ["copies-early", "copies-late"])
def test_rules_pin_tensors_and_the_report_shows_it(schedule: str) -> None:
    def rule(tensor):
        if tensor.role == "mlp.up_proj":
            return "offload"
        return "recompute" if tensor.role == "mlp.gate_proj" else None

    decisions = _decisions(rule, debug=("poison", schedule))
    assert decisions["mlp.up_proj"] == {"OFFLOAD"}
    assert decisions["mlp.gate_proj"] == {"RECOMPUTE"}
    others = {role: found for role, found in decisions.items() if not role.startswith("mlp.")}
    assert set.union(*others.values()) == {"SAVE"}  # without a budget the rest is kept
    rows = memo_compile.report().plans[-1].decisions
    assert any("pinned" in row.reason for row in rows if row.role == "mlp.up_proj")
    assert memo_compile.report().plans[-1].offloaded_bytes > 0
    assert memo_compile.report().plans[-1].recomputed_bytes > 0


def test_a_tensor_that_is_kept_stays_under_a_policy_that_moves_all() -> None:
    moved = _decisions(None, policy="full-offload")
    assert moved["mlp.up_proj"] == {"OFFLOAD"}
    torch._dynamo.reset()
    decisions = _decisions(lambda t: "keep" if "up_proj" in t.role else None, policy="full-offload")
    assert decisions["mlp.up_proj"] == {"SAVE"}
    assert decisions["mlp.gate_proj"] == {"OFFLOAD"}


def test_what_cannot_be_done_is_said() -> None:
    decisions = _decisions(lambda tensor: "recompute")
    assert decisions["layer input"] == {"SAVE"}
    assert any("its layer cannot recompute it" in n for n in memo_compile.report().notes)


def test_another_answer_is_refused() -> None:
    with pytest.raises(ConfigError, match="policy_rule: expected keep, offload, recompute or None"):
        _decisions(lambda tensor: "drop")


def test_a_rule_that_raises_is_named() -> None:
    with pytest.raises(ConfigError, match="policy_rule: <lambda> raised AttributeError"):
        _decisions(lambda tensor: tensor.rol)


def test_pinned_recomputation_goes_with_a_policy_of_mixes() -> None:
    def rule(tensor):
        return "recompute" if tensor.role == "mlp.gate_proj" else None

    decisions = _decisions(rule, policy="memo", alpha=0.5, token_granule=1)
    assert decisions["mlp.gate_proj"] == {"RECOMPUTE"}
