"""Inputs that go on after a graph: it writes into them, or gives back a view of them.

What the caller's tensor is made of then includes what the graph did to it.
"""

import pytest
import torch

import memo_compile
from memo_compile.backends.capture import TIED_INPUTS
from tests.numerics.small import Stack, rows
from tests.numerics.training import ATEN, in_ci, memo_compiled

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"  # Dynamo looks at any input's
)
WRITES = {
    "scaled": lambda x: x.mul_(5),
    "of itself": lambda x: x.mul_(x * 1),
    "copied": lambda x: x.copy_((x * 1).sin()),
    "tanh": lambda x: x.tanh_(),
    "a part": lambda x: x[:4].mul_(5),
}


def written(model, write, *, first):
    """A function that writes into its input before the model reads it, or afterwards."""

    def run(x):
        if first:
            write(x)
        hidden = model(x * 1)
        if not first:
            write(x)
        return hidden

    return run


def trained(model, run, use, *, is_leaf=False, num_steps=3):
    """Gradients of what came before the graph and of the model, of some steps."""
    found = []
    for step in range(num_steps):
        model.zero_grad()
        leaf = rows(step + 1).requires_grad_()
        before = leaf if is_leaf else leaf * 2
        use(before, run(before)).backward()
        found += [leaf.grad, *(parameter.grad for parameter in model.parameters())]
    return [gradient.clone() for gradient in found]


def require_equal(model, function, use, *, is_leaf=False, **options):
    expected = trained(model, function, use, is_leaf=is_leaf)
    ours = trained(model, memo_compiled(function, **ATEN, **options), use, is_leaf=is_leaf)
    for own, eager in zip(ours, expected, strict=True):
        torch.testing.assert_close(own, eager, rtol=1e-4, atol=1e-5)
    report = memo_compile.report()
    assert len(report.plans) == 1
    assert report.unplanned_steps == 0
    assert TIED_INPUTS in report.notes


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("write", in_ci(WRITES, "copied", "a part"))
def test_a_write_is_differentiated(write, first):
    model = Stack(num_layers=4)
    function = written(model, WRITES[write], first=first)
    require_equal(model, function, lambda x, hidden: (x * 3).sum() + hidden.sum())


@pytest.mark.parametrize("policy", in_ci(["full-recompute", "full-offload"], "full-recompute"))
def test_a_write_is_differentiated_where_the_step_moves(policy):
    model = Stack(num_layers=4)
    function = written(model, WRITES["scaled"], first=False)
    require_equal(model, function, lambda x, own: (x * 3).sum() + own.sum(), policy=policy)


def test_a_write_into_a_view_reaches_what_it_is_a_view_of():
    model = Stack(num_layers=4)
    function = written(model, WRITES["scaled"], first=False)

    def use(x, hidden):
        return (x * 3).sum() + hidden.sum()

    def run(inner):
        def through_view(x):
            return inner(x[:])

        return through_view

    expected = trained(model, run(function), use)
    ours = trained(model, run(memo_compiled(function, **ATEN)), use)
    for own, eager in zip(ours, expected, strict=True):
        torch.testing.assert_close(own, eager, rtol=1e-4, atol=1e-5)


def test_what_is_written_into_a_returned_view_is_in_the_input():
    model = Stack(num_layers=4)

    def use(x, found):
        hidden, view = found
        view.mul_(5)
        return (x * 3).sum() + hidden.sum() + view.square().sum()

    require_equal(model, lambda x: (model(x * 1), x[1:3]), use)


@pytest.mark.parametrize("is_leaf", in_ci([True, False], False))
def test_a_returned_view_that_nobody_writes(is_leaf):
    model = Stack(num_layers=4)

    def use(x, found):
        hidden, view = found
        return x.sum() + hidden.sum() + view.square().sum()

    require_equal(model, lambda x: (model(x), x.t()), use, is_leaf=is_leaf)


def test_a_model_broken_behind_a_write():
    model = Stack(num_layers=4)

    def broken(x):
        hidden = model(x * 1)
        x.mul_(2)
        torch._dynamo.graph_break()
        return model(x) + hidden

    expected = trained(model, broken, lambda x, result: result.square().sum() + x.sum())
    compiled = memo_compiled(broken, **ATEN)
    ours = trained(model, compiled, lambda x, result: result.square().sum() + x.sum())
    for own, eager in zip(ours, expected, strict=True):
        torch.testing.assert_close(own, eager, rtol=1e-4, atol=1e-4)
