"""Collectives that the program begins in its own backward, whatever a rank computes with them."""

import pytest
import torch
from torch import fx

from memo_compile.analysis.joint_units import UNIT, backward_positions
from memo_compile.passes.traced_collectives import TracedCollectives

aten, ranks = torch.ops.aten, torch.ops._c10d_functional
IS_FORWARD = {"partitioner_tag": "is_forward"}


def rotated_twice(*, reads_it: bool) -> fx.GraphModule:
    """Two layers; each's backward sends a saved value around, then a gradient.

    A rank that reads what comes (``reads_it``) begins the first of them early in its layer.
    """
    graph = fx.Graph()
    example = torch.empty(4)

    def call(target, *args, **meta):
        node = graph.call_function(target, args)
        node.meta = {"val": example, **meta}
        return node

    def exchange(source, **meta):
        return call(ranks.all_to_all_single.default, source, [4, 0], [4, 0], "0", **meta)

    x, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    x.meta = tangent.meta = {"val": example}
    saved = []
    for unit in range(2):
        x = call(aten.sin.default, x, **IS_FORWARD, **{UNIT: unit})
        coming = call(ranks.wait_tensor.default, exchange(x, **IS_FORWARD), **IS_FORWARD)
        saved.append(x)
        x = call(aten.add.Tensor, x, coming, **IS_FORWARD, **{UNIT: unit})
    gradient = tangent
    for unit in (1, 0):
        gradient = call(aten.neg.default, gradient, **{UNIT: unit})
        coming = call(ranks.wait_tensor.default, exchange(saved[unit]))
        again = call(ranks.wait_tensor.default, call(aten.view.default, coming, [4]))
        if reads_it:
            gradient = call(aten.mul.Tensor, gradient, again)
        gradient = call(ranks.wait_tensor.default, exchange(gradient))
    graph.output((x, gradient))
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("reads_it", [True, False])
def test_each_runs_in_the_backward_of_its_layer_in_the_order_of_the_program(reads_it):
    gm = rotated_twice(reads_it=reads_it)
    assert TracedCollectives()(gm).modified
    collectives = [n for n in gm.graph.nodes if n.target is ranks.all_to_all_single.default]
    tags = [node.meta.get("partitioner_tag") for node in collectives]
    assert tags == ["is_forward"] * 2 + ["must_be_in_backward"] * 4
    positions = backward_positions(gm.graph, num_units=2)
    assert [positions[node] for node in collectives[2:]] == [0, 0, 1, 1]


def test_what_has_arrived_is_waited_for_once():
    gm = rotated_twice(reads_it=True)
    TracedCollectives()(gm)
    waits = [n for n in gm.graph.nodes if n.target is ranks.wait_tensor.default]
    assert len(waits) == 6
    assert all(n.all_input_nodes[0].target is ranks.all_to_all_single.default for n in waits)
    assert not TracedCollectives()(gm).modified
    gm.graph.lint()
