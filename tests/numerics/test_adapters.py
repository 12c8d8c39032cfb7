"""Adapters that memo trained are saved, loaded and merged as those that eager trained."""

import copy

import pytest
import torch
from torch import nn

from tests.numerics.closeness import relative_faults
from tests.numerics.small import rows
from tests.numerics.training import in_ci, memo_compiled
from tests.works_with.makers import with_adapters

HIDDEN, RANK = 32, 4


class Adapted(nn.Module):
    """A frozen product with two small factors beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.down = nn.Linear(HIDDEN, RANK, bias=False)
        self.up = nn.Linear(RANK, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "v_proj", "up_proj"):
            setattr(self, name, nn.Linear(HIDDEN, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up_proj(torch.tanh(self.q_proj(x)) * self.v_proj(x))


def by_hand() -> nn.Module:
    return nn.Sequential(*(Adapted() for _ in range(3)))


def by_peft(**fields: object) -> nn.Module:
    pytest.importorskip("peft")
    return with_adapters(nn.Sequential(*(Plain() for _ in range(3))), **fields)


KINDS = {"by hand": by_hand, "LoRA": by_peft, "DoRA": lambda: by_peft(use_dora=True)}


def merged(model: nn.Module) -> nn.Module:
    """A copy without adapters: their products are added to the weights."""
    model = copy.deepcopy(model)
    if hasattr(model, "merge_and_unload"):
        return model.merge_and_unload()
    for layer in model:
        layer.base.weight += layer.up.weight @ layer.down.weight
        nn.init.zeros_(layer.up.weight)
    return model


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", in_ci(KINDS, "by hand"))
def test_they_are_saved_loaded_and_merged_as_eagers(kind):
    ours = KINDS[kind]()
    twin, fresh = copy.deepcopy(ours), copy.deepcopy(ours)
    frozen = {name: p.clone() for name, p in ours.named_parameters() if not p.requires_grad}
    compiled = memo_compiled(ours, policy="full-recompute")
    for model, run in ((ours, compiled), (twin, twin)):
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            update.zero_grad()
            run(rows(step)).square().mean().backward()
            update.step()
    assert {name for name, p in ours.named_parameters() if p.grad is not None} == trained(
        ours
    ).keys()
    assert not relative_faults(trained(ours), trained(twin), 1e-4)
    for name, before in frozen.items():
        assert torch.equal(ours.get_parameter(name), before), name
    fresh.load_state_dict(trained(ours), strict=False)
    with torch.no_grad():
        expected = ours(rows(9))
        assert torch.equal(fresh(rows(9)), expected)
        torch.testing.assert_close(merged(ours)(rows(9)), expected, rtol=1e-4, atol=1e-5)
