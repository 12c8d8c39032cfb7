"""Results and gradients lie in memory of their own, unless the user's program shares it."""

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import nn

from tests.numerics.closeness import assert_equals_eager
from tests.numerics.small import rows
from tests.numerics.training import assert_planned, in_ci

WIDTH = 8
ROWS = 4

both_lowerings = pytest.mark.parametrize("lowering", ["aten", "inductor"])

THROUGH_INDUCTOR = ("columns", "saved", "equal-views", "times-ones")
"""In CI; the others are compiled in `make numerics-full`."""


def in_ways(names: Iterable[str]) -> pytest.MarkDecorator:
    """Every name op by op, and some through Inductor."""
    ways = list(itertools.product(names, ("aten", "inductor")))
    kept = [way for way in ways if way[1] == "aten" or way[0] in THROUGH_INDUCTOR]
    return pytest.mark.parametrize(("name", "lowering"), in_ci(ways, *kept))


class Parameters(nn.Module):
    """``function(x, *parameters)`` with parameters of the given shapes."""

    def __init__(self, function: Callable, *shapes: Sequence[int]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self, x: torch.Tensor):
        return self.function(x, *self.weights)


def compiled(model: Callable, lowering: str) -> Callable:
    options = {"lowering": lowering, "strict": True, "debug": "poison"}
    return torch.compile(model, backend="memo", options=options)


class _ReturnsWhatItSaved(torch.autograd.Function):
    """Its backward hands out a saved activation as the gradient of its second input."""

    @staticmethod
    def forward(ctx, h, p):
        y = h.exp()
        ctx.save_for_backward(y)
        return y * p.sum()

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * y, y


def _two_biases(x, w, a, b):
    return torch.tanh(x @ w.t() + a + b)


def _two_products(x, w, v, c):
    return (x @ w + x @ v @ c).sin()


SQUARE, ROW, BIAS = (WIDTH, WIDTH), (1, WIDTH), (WIDTH,)
GRADIENTS = {
    "two-biases": (_two_biases, SQUARE, BIAS, ROW),
    "two-products": (_two_products, SQUARE, SQUARE, SQUARE),
    "added": (lambda x, p, q: p + q + x, (ROWS, WIDTH), (ROWS, WIDTH)),
    "added-view": (lambda x, p, q: p + q.view(ROWS, WIDTH) + x, (ROWS, WIDTH), (ROWS * WIDTH,)),
    "two-views": (
        lambda x, p, q: (p.view(ROWS, WIDTH) + q.view(ROWS, WIDTH) + x).sin(),
        (ROWS * WIDTH,),
        (ROWS * WIDTH,),
    ),
    "expanded": (lambda x, p, q: (x + p.expand(ROWS, WIDTH) + q).sin(), ROW, BIAS),
    "columns": (lambda x, p, q: torch.cat([p, q], 1).sin() @ x.t(), (2, 4), (2, 4)),
    "saved": (_ReturnsWhatItSaved.apply, (ROWS, WIDTH)),
}


@in_ways(GRADIENTS)
def test_no_two_gradients_share_memory(name, lowering):
    function, *shapes = GRADIENTS[name]
    model = Parameters(function, *shapes)
    twin = copy.deepcopy(model)
    planned = compiled(model, lowering)
    x = rows(1, ROWS, WIDTH)
    for step in range(3):
        for run, owner in ((planned, model), (twin, twin)):
            run(x).square().sum().backward()
            if owner is twin:  # eager shares the gradients of two views of one sum
                for parameter in twin.parameters():
                    parameter.grad = parameter.grad.clone()
            for number, parameter in enumerate(owner.parameters()):
                parameter.grad.mul_(0.5 / (1 + step + number))  # clipping, in place
        for first, second in itertools.combinations(model.parameters(), 2):
            assert not _overlap(first.grad, second.grad)
        assert_equals_eager(model, twin)
    assert_planned(1)


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    ends = [(t.data_ptr(), t.data_ptr() + _extent_bytes(t)) for t in (first, second)]
    return ends[0][0] < ends[1][1] and ends[1][0] < ends[0][1]


def _extent_bytes(tensor: torch.Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


@both_lowerings
def test_a_gradient_is_no_view_of_what_arrived(lowering):
    """The gradient that comes in is that of a parameter outside the graph as well."""

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Parameters(lambda x, p: x + p.view(ROWS, WIDTH), (ROWS * WIDTH,))
            self.outer = nn.Parameter(torch.randn(ROWS, WIDTH))

    model = Outside()
    twin = copy.deepcopy(model)
    planned = compiled(model.inner, lowering)
    for _ in range(3):
        for inner, owner in ((planned, model), (twin.inner, twin)):
            (inner(rows(1, ROWS, WIDTH)) + owner.outer).sin().sum().backward()
            owner.outer.grad.mul_(0.5)
        assert not _overlap(model.outer.grad, model.inner.weights[0].grad)
        assert_equals_eager(model, twin)


RESULTS = {
    "equal": lambda h: (torch.relu(h * 2), torch.relu(h * 2)),
    "equal-views": lambda h: (torch.relu(h).view(-1), torch.relu(h).view(-1)),
    "equal-parts": lambda h: (torch.var_mean(h, 1)[0] * 1.0, torch.var_mean(h, 1)[1].exp()),
    "times-ones": lambda h: _and(torch.tanh(h), lambda y: y * torch.ones_like(y)),
    "plus-zeros": lambda h: _and(torch.tanh(h), lambda y: y + torch.zeros(ROWS, WIDTH)),
    "clone": lambda h: _and(torch.tanh(h), torch.clone),
    "view": lambda h: _and(torch.tanh(h), lambda y: y.view(-1)),
    "detached": lambda h: _and(torch.tanh(h), torch.detach),
    "the-same": lambda h: _and(torch.tanh(h), lambda y: y),
    "parts": lambda h: tuple(torch.tanh(h).split(2)),
    "constants": lambda h: (h.sin(), torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)),
}


def _and(y: torch.Tensor, other: Callable) -> tuple[torch.Tensor, torch.Tensor]:
    return y, other(y)


@in_ways(RESULTS)
def test_writing_into_a_result_changes_what_it_changes_in_eager(name, lowering):
    function = RESULTS[name]
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def forward(x, w):
        return function(x @ w)

    found = []
    for run in (compiled(forward, lowering), forward):
        results = run(rows(1, ROWS, WIDTH), weight)
        with torch.no_grad():
            for number, result in enumerate(results):
                result.detach().add_(10.0**number)
        found.append([result.detach() for result in results])
    torch.testing.assert_close(found[0], found[1])


@both_lowerings
def test_an_input_times_one_is_no_view_of_the_input(lowering):
    def forward(x, w):
        return x * torch.ones(ROWS, WIDTH), x @ w

    x, weight = rows(1, ROWS, WIDTH), torch.randn(WIDTH, WIDTH, requires_grad=True)
    before = x.clone()
    compiled(forward, lowering)(x, weight)[0].add_(100)
    torch.testing.assert_close(x, before)
