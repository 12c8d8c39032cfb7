"""Bodies in Dynamo graphs: marked regions in place, numbers read outside of them."""

import operator

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memo_compile.passes.bodies import InlineRegions, ReadOutside, with_plain_bodies

region = torch.compiler.nested_compile_region
invoke_subgraph = torch.ops.higher_order.invoke_subgraph


def dynamo_graph(function, *inputs, dynamic=False):
    """The Dynamo graph of ``function``, which runs eagerly, and what it is given."""
    found = []

    def backend(gm, given):
        found.append((gm, given))
        return gm

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
    return found[0]


def targets(gm):
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def rows():
    return torch.randn(2, 4, requires_grad=True)


def test_a_region_called_twice_stands_there_twice():
    constant = torch.arange(4.0)

    @region
    def inner(x):
        return torch.tanh(x) * constant, x + 1

    def outer(x):
        for _ in range(2):
            first, second = inner(x)
            x = first * second
        return x

    x = rows()
    gm, given = dynamo_graph(outer, x)
    result = InlineRegions()(gm)
    assert result.modified
    assert invoke_subgraph not in targets(gm)
    assert operator.getitem not in targets(gm)
    assert targets(gm).count(torch.tanh) == 2
    assert not list(gm.children())
    gm.recompile()
    torch.testing.assert_close(gm(*given)[0], outer(x))
    assert not InlineRegions()(gm).modified


def test_a_region_in_a_checkpointed_body_and_in_a_region():
    @region
    def innermost(x):
        return torch.tanh(x)

    @region
    def inner(x):
        return innermost(x) + 1

    def outer(x):
        return checkpoint(inner, checkpoint(innermost, x, use_reentrant=False), use_reentrant=False)

    x = rows()
    gm = with_plain_bodies(dynamo_graph(outer, x)[0])
    bodies = [body for body in gm.modules() if isinstance(body, torch.fx.GraphModule)]
    assert len(bodies) == 3, "the graph, and the bodies of two checkpoints"
    assert all(invoke_subgraph not in targets(body) for body in bodies)
    torch.testing.assert_close(gm(x)[0], outer(x))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.weight = 0.5, nn.Parameter(torch.randn(4))

    def inner(self, x):
        return torch.tanh(x * self.scale) * self.weight + self.scale

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def test_a_number_is_read_where_the_body_is_called():
    gm, _ = dynamo_graph(Scaled(), rows(), dynamic=True)
    (body,) = gm.children()
    assert not any(node.target == "item" for node in gm.graph.nodes)
    assert ReadOutside()(gm).modified
    (item,) = [node for node in gm.graph.nodes if node.target == "item"]
    (call,) = item.users
    assert call.target is torch.ops.higher_order.tag_activation_checkpoint
    assert not any(node.target == "item" for node in body.graph.nodes)
    given = dict(zip(body.graph.find_nodes(op="placeholder"), call.args[1:], strict=True))
    (number,) = [node for node, operand in given.items() if operand is item]
    assert len(number.users) == 2
    assert isinstance(number.meta["example_value"], torch.SymFloat)
    assert not ReadOutside()(gm).modified
