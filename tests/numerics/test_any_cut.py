"""What torch's partitioner saves is a proposal: no cut changes a gradient."""

import pytest
import torch

from memo_compile.torch_private import partitioner
from tests.numerics.small import Pair, Stack, rows


@pytest.mark.parametrize("most", [0, 40])
def test_a_cut_that_saves_nothing_or_everything_changes_no_gradient(monkeypatch, most):
    asked = []

    def names(joint, *_, **__):
        asked.append([node.name for node in joint.graph.nodes][:most])
        return asked[-1]

    monkeypatch.setattr(partitioner, "min_cut_saved_names", names)
    torch.manual_seed(0)
    Pair(Stack(hidden=16)).assert_step(rows(1, 8, hidden=16))
    assert [len(saved) > 0 for saved in asked] == [most > 0]
