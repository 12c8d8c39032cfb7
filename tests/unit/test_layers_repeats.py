"""Token runs, module paths and the forms of small hand-made graphs."""

import operator

import pytest
import torch
from torch import fx

from memo_compile.analysis.layers import find_layers
from memo_compile.analysis.module_paths import role_of
from memo_compile.analysis.structure import make_tape

aten = torch.ops.aten


def chain(*widths: int) -> list[fx.Node]:
    """One addmm-free layer per width: x = x + relu(x @ up_width) @ down_width."""
    graph = fx.Graph()

    def value(node: fx.Node, *shape: int) -> fx.Node:
        node.meta["val"] = torch.empty(shape, device="meta")
        return node

    x = value(graph.placeholder("x"), 4, 8)
    weights = [
        (
            value(graph.placeholder(f"up_{index}"), 8, width),
            value(graph.placeholder(f"down_{index}"), width, 8),
        )
        for index, width in enumerate(widths)
    ]
    for width, (up, down) in zip(widths, weights, strict=True):
        inner = value(graph.call_function(aten.mm.default, (x, up)), 4, width)
        inner = value(graph.call_function(aten.relu.default, (inner,)), 4, width)
        outer = value(graph.call_function(aten.mm.default, (inner, down)), 4, 8)
        x = value(graph.call_function(aten.add.Tensor, (x, outer)), 4, 8)
    graph.output(x)
    return [node for node in graph.nodes if node.op == "call_function"]


def named(nodes: list[fx.Node], paths: list[str]) -> list[fx.Node]:
    for node, path in zip(nodes, paths, strict=True):
        node.meta["nn_module_stack"] = {"key": (path, object)}
    return nodes


def ranges(nodes: list[fx.Node]) -> list[tuple[int, int]]:
    return [(u.start, u.end) for u in find_layers(nodes).units if u.class_key is not None]


@pytest.mark.parametrize("num_layers", [2, 3, 7])
def test_every_layer_of_a_chain_is_a_unit(num_layers):
    assert ranges(chain(*[16] * num_layers)) == [(4 * i, 4 * i + 4) for i in range(num_layers)]


def test_the_residual_keeps_two_equal_products_in_one_layer():
    assert ranges(chain(*[8] * 5)) == [(4 * i, 4 * i + 4) for i in range(5)]


def test_a_constant_that_differs_ends_the_run():
    nodes = chain(*[16] * 6)
    last = nodes[4 * 3 + 3]
    last.args = (*last.args, 2)  # add(x, y, alpha=2) in the fourth layer
    assert ranges(nodes) == [(0, 4), (4, 8), (8, 12), (16, 20), (20, 24)]


def test_a_different_dtype_ends_the_run():
    nodes = chain(*[16] * 4)
    for node in nodes[12:]:
        node.meta["val"] = node.meta["val"].to(torch.bfloat16)
    assert ranges(nodes) == [(0, 4), (4, 8), (8, 12)]


def test_wiring_is_verified_not_only_tokens():
    """The fourth layer adds its first layer's input instead of its own: same ops and shapes."""
    nodes = chain(*[16] * 5)
    fourth = nodes[4 * 3 : 4 * 4]
    fourth[3].args = (nodes[4 * 0 + 3], fourth[2])
    assert ranges(nodes) == [(0, 4), (4, 8), (8, 12), (16, 20)]


def test_parallel_products_are_no_layers():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 8, device="meta")
    weights = [graph.placeholder(f"w{index}") for index in range(6)]
    for weight in weights:
        weight.meta["val"] = torch.empty(8, 8, device="meta")
    nodes = []
    for weight in weights:
        for target, args in ((aten.t.default, (weight,)), (aten.mm.default, (x, None))):
            if target is aten.mm.default:
                args = (x, nodes[-1])
            node = graph.call_function(target, args)
            node.meta["val"] = torch.empty(8, 8, device="meta")
            nodes.append(node)
    assert ranges(nodes) == []


def test_form_is_blind_to_names_and_sees_shared_inputs():
    nodes = chain(16, 16, 16)
    tape = make_tape(nodes)
    assert tape.canonical(0, 4) == tape.canonical(4, 8)
    assert tape.digest(0, 4) == tape.digest(8, 12)
    nodes[6].args = (nodes[5], nodes[2].args[1])  # layer 1 uses the weight of layer 0: same form
    assert make_tape(nodes).canonical(4, 8) == tape.canonical(0, 4)
    nodes[7].args = (nodes[6], nodes[6])  # and now adds a value to itself: another form
    assert make_tape(nodes).canonical(4, 8) != tape.canonical(0, 4)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("L['self'].model.layers.{}.mlp", "model.layers"),
        ("L['self']._modules['model']._modules['layers']._modules['{}']", "model.layers"),
        ("L['self'].__dict__['_modules']['model'].__dict__['layers'].{}", "model.layers"),
        ("L['model'].layers.{}", "layers"),
        ("L['self'].stages.1.blocks.{}", "stages.1.blocks"),
        ("L['self'].head", None),
    ],
)
def test_module_path(form, expected):
    nodes = chain(16, 16, 16)
    named(nodes, [form.format(index // 4) for index in range(12)])
    assert [c.module_path for c in find_layers(nodes).classes] == [expected]


def test_a_tensor_is_named_by_the_module_that_made_it():
    graph = fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(torch.ops.aten.mm.default, (x, x))
    attention = graph.call_function(
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, (x, x, x)
    )
    norm = graph.call_function(torch.ops.aten.native_layer_norm.default, (x, [8], None, None, 1e-5))
    results = [graph.call_function(operator.getitem, (attention, at)) for at in (0, 1)]
    rstd = graph.call_function(operator.getitem, (norm, 2))
    total = graph.call_function(torch.ops.aten.add.Tensor, (x, x))
    layer = "L['self']._modules['layers']._modules['3']"
    named([product, *results, rstd], [f"{layer}.mlp._modules['up']"] * 3 + [f"{layer}.norm_1"])
    named([total], [layer])
    found = [role_of(node) for node in (product, *results, rstd, total)]
    assert found == ["mlp.up", "attention output", "attention log-sum-exp", "norm_1 rstd", "add"]
    assert role_of(graph.call_function(torch.ops.aten.mm.default, (x, x))) == "mm"


def test_period_counts_module_layers_per_unit():
    """Two module layers share one indivisible unit: their border is wider than the outer one."""
    nodes = named(chain(16, 16), [f"L['self'].layers.{index // 2}" for index in range(8)])
    (found,) = find_layers(nodes).classes
    assert (found.num_layers, found.period, len(found.units)) == (4, 2, 2)
