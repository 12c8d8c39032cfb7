"""Other people's ways to save memory as ``benchmarks.peers`` runs them."""

import argparse
import sys

import pytest
import torch
from torch import nn

from benchmarks import peers

SIZES = {"layers": 1, "hidden": 64, "tokens": 16, "vocab": 32, "pairs": 0}


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stack(x).square().mean()


def test_hooks_offload_all_but_parameters_and_change_no_gradient(monkeypatch):
    made = []
    new_shared = torch.UntypedStorage._new_shared
    monkeypatch.setattr(
        torch.UntypedStorage, "_new_shared", lambda size: made.append(size) or new_shared(size)
    )
    model, x = Loss(), torch.randn(64, 64)
    model(x=x).backward()
    true = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    peers.offloaded(model, peers.storages_of(model), x=x).backward()
    # The input; what GELU reads, and what it makes, which the second product reads.
    assert sorted(made) == [64 * 64 * 4, 64 * 128 * 4, 64 * 128 * 4]
    for parameter, gradient in zip(model.parameters(), true, strict=True):
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("peer", ["torchtitan-op", "deepspeed"])
def test_a_package_that_is_missing_is_said(peer, monkeypatch):
    monkeypatch.setitem(sys.modules, peer.partition("-")[0], None)
    found = peers.run_child(argparse.Namespace(child=peer, **SIZES))
    assert list(found) == ["missing"]
    assert peer.partition("-")[0] in found["missing"]
