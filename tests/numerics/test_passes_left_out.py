"""Steps without a pass that memo can do without compute what eager does."""

import pytest
import torch
from torch import nn

from memo_compile.passes.gather_once import GatherOnce
from memo_compile.passes.loss_gradient import GradientOfLoss
from memo_compile.passes.needless_masks import NeedlessMasks
from memo_compile.passes.order import PASSES
from memo_compile.passes.own_inputs import OwnInputs
from memo_compile.passes.spread_seeds import SpreadSeeds
from tests.numerics.small import Pair, rows

ELSEWHERE = {
    pass_.name for pass_ in (GatherOnce, GradientOfLoss, NeedlessMasks, OwnInputs, SpreadSeeds)
}
"""Have no work in these steps: see ``test_saved_passes``, ``test_loss_gradient``, ``test_masks``,
``test_groups``; the last on CUDA only, see ``tests/cuda_emulated/test_launches.py``."""

OPTIONAL = [
    graph_pass.name
    for graph_pass in PASSES
    if not graph_pass.is_required and graph_pass.name not in ELSEWHERE
]


class Shared(nn.Module):
    """Three layers with one weight; each computes the same mask, the first a bias for all.

    Every pass that may be left out has work.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(16, 16)
        self.shared = nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.exit = nn.Linear(16, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = x[:, 0].detach()
        x, bias = self.entry(x), None
        for layer in self.layers:
            mask = positions.cos()[:, None] > 0.5
            hidden = torch.where(mask, self.shared(x).tanh(), x)
            bias = positions.sin()[:, None] if bias is None else bias
            x = x + layer(hidden + bias)
        return self.exit(x)[:-1].tanh().mean()


@pytest.mark.parametrize("entry", [*(f"-{name}" for name in OPTIONAL), "..0", "..1", "..2"])
def test_gradients_are_those_of_eager(entry, tmp_path):
    torch.manual_seed(0)
    pair = Pair(Shared(), lowering="aten", debug="poison", passes=entry, dump=str(tmp_path))
    pair.assert_step(rows(0, 7, 16))
    pair.each(lambda model: model(rows(1, 7, 16)).backward())  # accumulated
    pair.assert_equal()
    pair.assert_step(rows(2, 7, 16))
    table = next(tmp_path.rglob("passes.txt")).read_text().splitlines()
    ran = [name for name in OPTIONAL if any(line.startswith(name) for line in table)]
    kept = [name for name in OPTIONAL if f"-{name}" != entry]
    assert ran == (kept[: int(entry[2:])] if entry.startswith("..") else kept)


def test_a_pass_of_these_steps_has_work(tmp_path):
    """Else the test above would leave out what does nothing."""
    pair = Pair(Shared(), lowering="aten", dump=str(tmp_path))
    pair.assert_step(rows(0, 7, 16))
    texts = {path.name.partition("-")[2]: path.read_text() for path in tmp_path.rglob("*.txt")}
    changed = {
        name
        for name in OPTIONAL
        for half in ("dynamo-slices", "joint", "backward")
        if texts.get(f"{half}-{name}.before.txt") != texts.get(f"{half}-{name}.after.txt")
    }
    assert changed == set(OPTIONAL)


def test_a_required_pass_is_not_left_out():
    pair = Pair(Shared(), lowering="aten", passes="-lease-saved")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="lease-saved is required"):
        pair.assert_step(rows(0, 7, 16))
