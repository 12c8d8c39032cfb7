"""What the forward keeps for the backward, on graphs of three equal layers that are small to read.

Each layer is a product and a sine; a node of the backward reads the product of the middle layer.
"""

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from memo_compile.analysis.joint_units import SAVED, UNIT, JointUnits, saved_nodes, tag_saved
from memo_compile.analysis.layers import IsomorphicUnits, LayerStructure, Unit
from memo_compile.offline.shapes import parallel
from memo_compile.passes.equal_cut import EqualCut, SufficientCut
from memo_compile.passes.gather_once import GatherOnce
from memo_compile.passes.numbers import PutNumbers
from memo_compile.passes.runner import PassRunner, graph_text

LAYERS = 3


def three_layers() -> tuple[fx.GraphModule, JointUnits]:
    """Layer n makes ``mm_n`` and ``sin_n``, the first without number; ``mul`` reads ``mm_1``."""

    def step(x, weight, tangents_1):
        products = []
        for _ in range(LAYERS):
            products.append(x @ weight)
            x = products[-1].sin()
        return x, tangents_1 * products[1]

    with FakeTensorMode():
        gm = make_fx(step)(*(torch.empty(4, 4) for _ in range(3)))
    for node in gm.graph.find_nodes(op="placeholder"):
        if "tangents" in node.name:
            node.target = "tangents_1"
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    forward = tuple(node for node in nodes if "mul" not in node.name)
    for at, node in enumerate(forward):
        node.meta[UNIT] = at // 2
    units = tuple(
        Unit(
            start=2 * at,
            end=2 * at + 2,
            class_key="layer",
            instance=at,
        )
        for at in range(LAYERS)
    )
    layers = IsomorphicUnits(
        class_key="layer",
        num_layers=LAYERS,
        period=1,
        module_path=None,
        units=tuple(range(LAYERS)),
    )
    structure = LayerStructure(units=units, classes=(layers,))
    return gm, JointUnits(structure=structure, forward=forward)


def names_saved(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in saved_nodes(gm)]


def tagged(gm: fx.GraphModule, *names: str) -> None:
    tag_saved(gm, {node for node in gm.graph.nodes if node.name in names})


def run(gm: fx.GraphModule, graph_pass) -> str:
    """The text of the graph behind ``graph_pass``; the runner checks what it says of itself."""
    return graph_text(PassRunner().run(gm, [graph_pass], stage="joint"))


def test_every_layer_keeps_what_the_middle_one_keeps():
    gm, units = three_layers()
    tagged(gm, "sin", "mm_1", "sin_2")
    text = run(gm, EqualCut(units=units, drops_above=None))
    assert names_saved(gm) == ["mm", "mm_1", "mm_2"]
    assert text.count("# torch.float32[4, 4], saved\n") == LAYERS


def test_an_equal_cut_stays_as_it_is():
    gm, units = three_layers()
    tagged(gm, "mm", "mm_1", "mm_2")
    result = EqualCut(units=units, drops_above=None)(gm)
    assert not result.modified
    assert names_saved(gm) == ["mm", "mm_1", "mm_2"]


def test_what_a_backward_needs_of_another_layer_is_saved():
    gm, units = three_layers()
    next(node for node in gm.graph.nodes if "mul" in node.name).meta[UNIT] = 2
    run(gm, SufficientCut(units=units, num_fwd_outputs=1))
    assert "mm_1" in names_saved(gm)


def test_what_a_backward_makes_itself_is_not_saved_for_it():
    gm, units = three_layers()
    next(node for node in gm.graph.nodes if "mul" in node.name).meta[UNIT] = 1
    run(gm, SufficientCut(units=units, num_fwd_outputs=1))
    kept = names_saved(gm)
    assert "mm_1" not in kept
    assert {"sin", "weight_1"} <= set(kept)  # what layer 1 is computed from


def test_tags_go_when_others_are_set():
    gm, _ = three_layers()
    tagged(gm, "mm")
    assert not tag_saved(gm, set(saved_nodes(gm)))
    tagged(gm)
    assert all(SAVED not in node.meta for node in gm.graph.nodes)


@pytest.mark.parametrize("number", [7, 2.5])
def test_a_symbol_becomes_its_number(number):
    graph = fx.Graph()
    size, x = graph.placeholder("size"), graph.placeholder("x")
    read = graph.call_method("item", (size,)) if isinstance(number, float) else size
    graph.output((graph.call_function(torch.mul, (x, read)),))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    run(gm, PutNumbers(numbers={0: number}))
    assert [node.op for node in gm.graph.nodes] == ["placeholder", "call_function", "output"]
    gm.recompile()
    assert gm(torch.ones(2))[0].tolist() == [number, number]


def gathered_twice() -> fx.GraphModule:
    """The tokens ``x`` gathered for the forward, and behind the gradient for the weight's."""

    def step(x, weight, tangents_1):
        whole = parallel.all_gather(x, 1, 2)
        again = parallel.all_gather(x, 1, 2, tangents_1)
        return whole @ weight, again.flatten(0, 1).t() @ tangents_1.flatten(0, 1)

    with FakeTensorMode():
        sizes = ((1, 4, 8), (8, 16), (1, 8, 16))
        gm = make_fx(step)(*map(torch.empty, sizes))
    gm.graph.find_nodes(op="placeholder")[2].target = "tangents_1"
    return gm


def gathers(gm: fx.GraphModule) -> int:
    target = torch.ops._c10d_functional.all_gather_into_tensor.default
    return len(gm.graph.find_nodes(op="call_function", target=target))


def test_tokens_that_the_backward_recomputes_with_are_gathered_once_in_each_half():
    gm = gathered_twice()
    tagged(gm, "wait_tensor")
    assert gathers(gm) == 2
    run(gm, GatherOnce())
    assert gathers(gm) == 1
    assert names_saved(gm) == [gm.graph.find_nodes(op="placeholder")[0].name], (
        "not what is gathered"
    )
    gm.graph.lint()


def test_what_is_not_saved_is_gathered_again():
    gm = gathered_twice()
    tagged(gm, gm.graph.find_nodes(op="placeholder")[0].name)
    assert not GatherOnce()(gm).modified
    assert gathers(gm) == 2
