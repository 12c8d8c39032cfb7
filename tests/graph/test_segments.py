"""What is no layer is cut at its narrow places: where, and what stays whole."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from memo_compile.analysis.layers import find_layers
from memo_compile.analysis.segments import MAX_SEGMENTS, with_segments
from memo_compile.analysis.structure import make_tape
from memo_compile.passes.hoist import hoist_invariants
from tests import models
from tests.numerics.training import in_ci
from tests.steps.joint_graphs import capture_joint, capture_model


def assert_covers(nodes, structure):
    """Units follow each other from the first node to the last, and classes name their own."""
    edges = [(unit.start, unit.end) for unit in structure.units]
    assert edges[0][0] == 0
    assert edges[-1][1] == len(nodes)
    assert all(before[1] == after[0] for before, after in pairwise(edges))
    for found in structure.classes:
        assert all(structure.units[at].class_key == found.class_key for at in found.units)
    others = [unit.instance for unit in structure.units if unit.class_key is None]
    assert others == list(range(len(others)))


@pytest.mark.parametrize("builder", in_ci([models.resnet, models.unet], models.unet))
def test_a_model_without_layers_is_cut_where_few_bytes_cross(builder):
    nodes = capture_model(builder).forward_nodes
    structure = with_segments(nodes, find_layers(nodes))
    assert_covers(nodes, structure)
    assert not structure.classes
    assert 4 <= len(structure.units) <= MAX_SEGMENTS


def test_cuts_lie_where_a_model_is_narrow():
    narrow, widths = 8, (64, 72, 80, 88, 96, 104, 112)
    parts = [
        nn.Sequential(nn.Linear(narrow, width), nn.ReLU(), nn.Linear(width, narrow))
        for width in widths
    ]
    x = torch.ones(16, narrow)
    _, _, nodes = capture_joint(lambda x: nn.Sequential(*parts)(x).sum(), x)
    structure = with_segments(nodes, find_layers(nodes))
    assert_covers(nodes, structure)
    assert len(widths) - 2 <= len(structure.units) <= len(widths)
    tape = make_tape(nodes)
    assert {tape.border_bytes(unit.start, 0) for unit in structure.units[1:]} == {x.nbytes}


@pytest.mark.parametrize(
    "builder",
    in_ci(
        [models.llama, models.gpt2, models.t5, models.vit, models.bert], models.llama, models.vit
    ),
)
def test_layers_and_loss_heads_stay_whole(builder):
    nodes = hoist_invariants(capture_model(builder).forward_nodes)
    structure = find_layers(nodes)
    assert with_segments(nodes, structure) == structure


def test_layers_beside_a_range_without_them_keep_their_class():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(*(nn.Linear(8 + at, 9 + at) for at in range(8)))
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(3)
            )

        def forward(self, x):
            x = self.stem(x).tanh()
            for layer in self.layers:
                x = x + layer(x)
            return x.sum()

    _, _, nodes = capture_joint(Both(), torch.ones(4, 8))
    structure = with_segments(nodes, find_layers(nodes))
    assert_covers(nodes, structure)
    (found,) = structure.classes
    assert found.num_layers == 3
    assert min(found.units) >= 2
