"""Operators that are told where in a storage they begin, and such as make a layout of their own.

Under the aten lowering the storage of a value is the arena.
"""

import pytest
import torch
from torch.nn import functional

from memo_compile.passes.cut import content_of
from tests.numerics.training import memo_compiled

ROWS, WIDTH = 16, 8


def whole(x, **offset):
    return torch.as_strided_copy(x, (ROWS, WIDTH), (WIDTH, 1), **offset)


OPERATORS = (
    lambda x: whole(x, storage_offset=0),
    lambda x: torch.as_strided_copy(x, (ROWS - 1, WIDTH), (WIDTH, 1), 3)[0],
    lambda x: torch.as_strided_copy(x[3:, 2:], (9, 4), (WIDTH, 1), 1).mean(),
    lambda x: torch.as_strided_copy(x[3:, 2:], (9, 4), (WIDTH, 1)).mean(),
    lambda x: torch.as_strided_copy(x.t(), (WIDTH, ROWS), (1, WIDTH), 0).t(),
    lambda x: torch.view_as_real(
        torch.as_strided_copy(torch.view_as_complex(x.view(ROWS, 4, 2)), (ROWS, 4), (4, 1), 0)
    ).reshape(ROWS, WIDTH),
    lambda x: (
        torch.as_strided(x[3:], size=(4, WIDTH), stride=(WIDTH, 1), storage_offset=5).sin().mean(0)
    ),
    lambda x: torch.as_strided(x.view(torch.complex128), (ROWS, 4), (4, 1), 0).real.mean(),
    lambda x: torch.as_strided_scatter(x, x[:4].sin(), (4, WIDTH), (WIDTH, 1), storage_offset=5),
)


def compared(layer, dtype=torch.float64, **options):
    """Loss and gradients of three layers, by memo and by eager."""
    x = torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True)
    weights = torch.randn(3, WIDTH, WIDTH, dtype=dtype, requires_grad=True)

    def run(x, weights):
        for number in range(3):
            x = torch.tanh(x @ weights[number])
            x = x + layer(x)
        return x.square().sum()

    for function in (memo_compiled(run, **options), run):
        torch.manual_seed(1)
        loss = function(x, weights)
        yield loss.detach(), *torch.autograd.grad(loss, (x, weights))


@pytest.mark.parametrize("policy", ["save", "full-recompute"])
def test_a_storage_offset_follows_its_tensor_into_the_arena(policy):
    def layer(x):
        return sum(operator(x) for operator in OPERATORS)

    torch.testing.assert_close(*compared(layer, policy=policy))


def test_regions_that_begin_elsewhere_in_their_inputs_are_two():
    base = torch.arange(100.0)
    graphs = []
    for begin in (16, 32):
        graph = torch.fx.Graph()
        given = graph.placeholder("x")
        given.meta["val"] = base[begin : begin + 16]
        graph.output(
            (graph.call_function(torch.ops.aten.as_strided.default, (given, (4,), (1,), 8)),)
        )
        graphs.append(torch.fx.GraphModule(torch.nn.Module(), graph))
    assert content_of(graphs[0]) != content_of(graphs[1])


LAYOUTS = (
    lambda x: functional.gumbel_softmax(x, tau=0.7),
    lambda x: functional.gumbel_softmax(x, tau=0.7, hard=True),
    lambda x: x * torch.rand_like(x.t(), memory_format=torch.preserve_format).t(),
    lambda x: x * torch.randn_like(x.t(), memory_format=torch.contiguous_format).t(),
    lambda x: x * torch.randint_like(x, 3, memory_format=torch.contiguous_format),
    lambda x: x + torch.full_like(x, 2.0, memory_format=torch.preserve_format).sin(),
    lambda x: x + torch.empty_like(x, memory_format=torch.preserve_format).fill_(2.0),
    lambda x: x.t().clone(memory_format=torch.contiguous_format).t().sin(),
    lambda x: (
        (x.view(2, 2, 4, 8).clone(memory_format=torch.channels_last).view_as(x.view(2, 2, 4, 8)))
        .sin()
        .reshape(ROWS, WIDTH)
    ),
    lambda x: functional.rrelu(x, training=True),
)


def test_an_operator_with_a_memory_format_writes_into_its_buffer():
    def layer(x):
        for operator in LAYOUTS:
            x = operator(x)
        return x

    torch.testing.assert_close(*compared(layer, inductor_options={"fallback_random": True}))
