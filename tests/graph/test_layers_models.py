"""The layers of unmodified transformers models, with and without module names."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from memo_compile.analysis.layers import LayerStructure, find_layers
from memo_compile.analysis.structure import make_tape
from memo_compile.analysis.views import storage_of
from memo_compile.passes.hoist import apply_order, hoist_invariants
from tests import models
from tests.numerics.training import in_ci
from tests.steps.joint_graphs import capture_model, forward_part

CASES = [
    (models.llama, {}, [(3, "model.layers")]),
    (models.llama, {"tied": True}, [(3, "model.layers")]),
    (models.gpt2, {}, [(3, "transformer.h")]),
    (models.gemma2, {}, [(4, "model.layers")]),
    (models.gemma3, {"num_layers": 7}, [(7, "model.layers")]),
    (models.mixtral, {}, [(3, "model.layers")]),
    (
        models.qwen3_moe,
        {"sparse_step": 2, "num_layers": 4},
        [(2, "model.layers"), (2, "model.layers")],
    ),
    (models.bert, {}, [(3, "bert.encoder.layer")]),
    (models.t5, {}, [(3, "encoder.block"), (3, "decoder.block")]),
    (models.vit, {}, [(3, "vit.layers")]),
    (models.functional_transformer, {"num_layers": 2}, [(2, None)]),
    (models.functional_with_outputs, {"num_layers": 3}, [(3, None)]),
    (models.resnet, {"depths": (1, 1, 4, 1)}, []),
]
IN_CI = (models.qwen3_moe, models.functional_transformer)
"""Two kinds of layers in turns, and one without module names."""
IDS = [f"{builder.__name__}-{sizes}" for builder, sizes, _ in CASES]


each_model = pytest.mark.parametrize(
    ("builder", "sizes", "expected"),
    in_ci(CASES, *(case for case in CASES if case[0] in IN_CI)),
    ids=IDS,
)


def summary(structure: LayerStructure) -> list[tuple[int, str | None]]:
    return [(found.num_layers, found.module_path) for found in structure.classes]


def assert_sound(nodes, structure: LayerStructure) -> None:
    """Units cover the sequence; those of a class are one function; strangers are not."""
    tape = make_tape(nodes)
    edges = [0, *(unit.end for unit in structure.units)]
    assert edges == [*(unit.start for unit in structure.units), len(nodes)]
    for found in structure.classes:
        members = [structure.units[index] for index in found.units]
        assert len({tape.canonical(unit.start, unit.end) for unit in members}) == 1
        assert [unit.instance for unit in members] == list(range(len(members)))
        assert found.num_layers == len(members) * found.period


def carried_values(nodes, structure: LayerStructure) -> list[int]:
    """For each border between two units: how many storages made in the first the second reads."""
    position_of = {node: index for index, node in enumerate(nodes)}
    counts = []
    for left, right in zip(structure.units, structure.units[1:], strict=False):
        if left.class_key is None or right.class_key is None:
            continue
        sources = {
            storage_of(source)
            for node in nodes[right.start : right.end]
            for source in node.all_input_nodes
        }
        made = [s for s in sources if left.start <= position_of.get(s, -1) < left.end]
        counts.append(len(made))
    return counts


@each_model
def test_classes_of_a_model(builder, sizes, expected):
    nodes = hoist_invariants(capture_model(builder, **sizes).forward_nodes)
    structure = find_layers(nodes)
    assert summary(structure) == expected
    assert all(found.period == 1 for found in structure.classes)
    assert_sound(nodes, structure)


@each_model
def test_only_the_residual_stream_crosses_a_border(builder, sizes, expected):
    nodes = hoist_invariants(capture_model(builder, **sizes).forward_nodes)
    counts = carried_values(nodes, find_layers(nodes))
    assert len(counts) >= sum(num_layers - 1 for num_layers, _ in expected)
    assert set(counts) <= {1}


@each_model
def test_module_names_are_not_needed(builder, sizes, expected):
    nodes = hoist_invariants(capture_model(builder, **sizes).forward_nodes)
    with_names = [(unit.start, unit.end) for unit in find_layers(nodes).units]
    names = [node.meta.pop("nn_module_stack", None) for node in nodes]
    try:
        structure = find_layers(nodes)
    finally:
        for node, name in zip(nodes, names, strict=True):
            if name is not None:
                node.meta["nn_module_stack"] = name
    assert [(unit.start, unit.end) for unit in structure.units] == with_names
    assert summary(structure) == [(num_layers, None) for num_layers, _ in expected]


@pytest.mark.full
def test_without_hoisting_the_first_t5_blocks_stay_in_the_gaps():
    nodes = capture_model(models.t5).forward_nodes
    assert summary(find_layers(nodes)) == [(2, "encoder.block"), (2, "decoder.block")]


@pytest.mark.full
def test_layers_are_equal_but_for_the_indices_of_their_seeds():
    nodes = capture_model(models.gpt2).forward_nodes
    structure = find_layers(nodes)
    units = [structure.units[index] for index in structure.classes[0].units]
    seeds = torch.ops.prims.inductor_lookup_seed.default
    values = [
        [node.args[1] for node in nodes[unit.start : unit.end] if node.target is seeds]
        for unit in units
    ]
    assert len(values[0]) == 3  # attention, projection, MLP
    assert sorted(value for unit in values for value in unit) == list(
        range(1, 10)
    )  # 0 is the embedding's


def test_reordering_keeps_the_results():
    joint = capture_model(models.t5, num_layers=2, seq=16, dropout=0.0)
    torch.manual_seed(0)
    inputs = [_example(node.meta["val"]) for node in joint.gm.graph.find_nodes(op="placeholder")]
    primals = [n for n in joint.gm.graph.find_nodes(op="placeholder") if "tangents" not in n.name]
    arguments = inputs[: len(primals)], inputs[len(primals) :]
    before = tree_leaves(joint.gm(*arguments))
    order = hoist_invariants(joint.forward_nodes)
    assert order != joint.forward_nodes
    apply_order(joint.gm.graph, order)
    joint.gm.recompile()
    assert forward_part(joint.gm, joint.num_fwd_outputs) == order
    for old, new in zip(before, tree_leaves(joint.gm(*arguments)), strict=True):
        assert (old is None and new is None) or torch.equal(old, new)


def _example(value: torch.Tensor) -> torch.Tensor:
    if value.dtype.is_floating_point:
        return 0.1 * torch.randn(value.shape, dtype=value.dtype)
    return torch.randint(0, 8, tuple(value.shape), dtype=value.dtype)
