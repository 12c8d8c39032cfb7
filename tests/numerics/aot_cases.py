"""Programs for ``test_aot_behaviours``: inputs that share memory, results that are views, writes.

Each is given a compiler, trains three equal layers for a few steps, and returns what a program can
see of it: numbers, layouts, errors.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
Case = Callable[[Compile], list[Any]]

CASES: dict[str, Case] = {}
WIDTH = 6


def case(function: Case) -> Case:
    """Enters ``function`` in the table, under its name."""
    CASES[function.__name__] = function
    return function


def leaf(
    *shape: int, seed: int = 0, grad: bool = True, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Of float64, so that rounding hides nothing."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(grad)


def weights(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [leaf(WIDTH, WIDTH, seed=10 + at, dtype=dtype) for at in range(3)]


def deep(x: torch.Tensor, layers: list[torch.Tensor]) -> torch.Tensor:
    """Three equal layers."""
    for weight in layers:
        x = x + torch.tanh(x @ weight)
    return x


def summed(results: Any) -> torch.Tensor:
    """A loss of all results that have a gradient, each with a weight of its own."""
    parts = [own for own in tree_leaves(results) if isinstance(own, torch.Tensor)]
    parts = [own for own in parts if own.requires_grad]
    return sum((at + 1) * own.abs().square().sum() for at, own in enumerate(parts))


def seen(*values: Any) -> list[Any]:
    """What a program sees of tensors: numbers, layout, and whether they have a gradient."""
    found: list[Any] = []
    for value in tree_leaves(values):
        if not isinstance(value, torch.Tensor):
            found.append(value)
            continue
        plain = value.a if isinstance(value, TwoTensor) else value
        facts = (tuple(value.shape), value.stride(), value.dtype, value.requires_grad)
        found += [facts, plain.detach().clone()]
    return found


def steps(
    compiled: Callable[..., Any],
    inputs: Callable[[int], Any],
    layers: list[torch.Tensor],
    loss: Callable[[Any], torch.Tensor] = summed,
) -> list[Any]:
    """Two steps: results, inputs afterwards, and all gradients."""
    found = []
    for step in range(2):
        given = inputs(step)
        given = given if isinstance(given, tuple) else (given,)
        results = compiled(*given, layers)
        loss(results).backward()
        with_gradient = [x for x in given if isinstance(x, torch.Tensor) and x.is_leaf]
        found += seen(results, given, [x.grad for x in with_gradient], [w.grad for w in layers])
    return found


# Inputs that share memory


@case
def same_input_twice(compile: Compile) -> list[Any]:
    run = compile(lambda x, y, ws: deep(x * 2 + y, ws))
    return steps(run, lambda step: (own := leaf(4, WIDTH, seed=step), own), weights())


@case
def overlapping_views_without_gradient(compile: Compile) -> list[Any]:
    def inputs(step: int) -> tuple[torch.Tensor, ...]:
        base = leaf(6, WIDTH, seed=step, grad=False)
        return base[:4], base[2:]

    def function(x: Any, y: Any, ws: Any) -> Any:
        x.mul_(2)
        return deep(x + y, ws), y

    return steps(compile(function), inputs, weights())


@case
def overlapping_views_with_history(compile: Compile) -> list[Any]:
    run = compile(lambda x, y, ws: (x.mul_(2), deep(x + y, ws))[1])
    layers, found = weights(), []
    for step in range(2):
        start = leaf(6, WIDTH, seed=step)
        base = start * 1
        out = run(base[:4], base[2:], layers)
        (summed(out) + base.sum()).backward()
        found += seen(out, base, start.grad, [w.grad for w in layers])
    return found


@case
def views_that_do_not_overlap(compile: Compile) -> list[Any]:
    def inputs(step: int) -> tuple[torch.Tensor, ...]:
        base = leaf(8, WIDTH, seed=step, grad=False)
        return base[:4], base[4:]

    run = compile(lambda x, y, ws: (y.add_(1), deep(x + y, ws))[1])
    return steps(run, inputs, weights())


@case
def tied_parameters(compile: Compile) -> list[Any]:
    (weight, other, _) = weights()
    run = compile(lambda x, ws: deep(x, [ws[0], ws[1], ws[0]]))
    return steps(run, lambda step: leaf(4, WIDTH, seed=step), [weight, other])


# Results that are views, or the same


@case
def result_is_an_input(compile: Compile) -> list[Any]:
    run, layers, found = compile(lambda x, ws: (deep(x, ws), x)), weights(), []
    for step in range(2):
        out, same = run(x := leaf(4, WIDTH, seed=step), layers)
        summed((out, same)).backward()
        found += [same is x, *seen(out, x.grad, [w.grad for w in layers])]
    return found


@case
def results_are_views_of_an_input(compile: Compile) -> list[Any]:
    run = compile(lambda x, ws: (deep(x, ws), x.t(), x[1:].view(-1), x.detach()))
    layers, found = weights(), []
    for step in range(2):
        start = leaf(4, WIDTH, seed=step)
        x = start * 1
        out, turned, flat, apart = run(x, layers)
        shared = [own.untyped_storage()._cdata == x.untyped_storage()._cdata for own in (turned,)]
        (summed((out, flat)) + turned.sum()).backward()
        found += [*shared, *seen(out, turned, flat, apart, start.grad, [w.grad for w in layers])]
    return found


@case
def results_are_views_of_an_intermediate(compile: Compile) -> list[Any]:
    def function(x: Any, ws: Any) -> Any:
        hidden = deep(x, ws)
        return hidden.t(), hidden[1:], hidden.view(-1)[3:].view(-1, 3)

    return steps(compile(function), lambda s: leaf(4, WIDTH, seed=s), weights())


@case
def a_result_and_its_view(compile: Compile) -> list[Any]:
    def function(x: Any, ws: Any) -> Any:
        hidden = deep(x, ws)
        return hidden, hidden.view(-1), hidden

    run, layers, found = compile(function), weights(), []
    for step in range(2):
        out, flat, same = run(x := leaf(4, WIDTH, seed=step), layers)
        summed((out, flat, same)).backward()
        found += [same is out, flat.untyped_storage()._cdata == out.untyped_storage()._cdata]
        found += seen(out, x.grad, [w.grad for w in layers])
    return found


@case
def a_result_is_written_afterwards(compile: Compile) -> list[Any]:
    run = compile(lambda x, ws: (hidden := deep(x, ws), hidden[1:]))
    layers, found = weights(), []
    for step in range(2):
        x = leaf(4, WIDTH, seed=step)
        hidden, part = run(x, layers)
        part.mul_(3)
        hidden.add_(1)
        hidden.square().sum().backward()
        found += seen(hidden, part, x.grad, [w.grad for w in layers])
    return found


@case
def the_same_result_twice_and_none(compile: Compile) -> list[Any]:
    def function(x: Any, ws: Any) -> Any:
        hidden = deep(x, ws)
        return hidden, None, hidden, 3, (hidden.sum(), [hidden.detach(), "text"])

    return steps(compile(function), lambda s: leaf(4, WIDTH, seed=s), weights())


@case
def results_without_a_gradient(compile: Compile) -> list[Any]:
    def function(x: Any, ws: Any) -> Any:
        hidden = deep(x, ws)
        return hidden, hidden.argmax(-1), hidden > 0, hidden.detach() * 2, torch.ones(2)

    return steps(compile(function), lambda s: leaf(4, WIDTH, seed=s), weights())


@case
def a_result_of_a_frozen_part(compile: Compile) -> list[Any]:
    def function(x: Any, ws: Any) -> Any:
        with torch.no_grad():
            frozen = deep(x, ws)
        return deep(x + frozen, ws), frozen

    return steps(compile(function), lambda s: leaf(4, WIDTH, seed=s), weights())


# Writes


@case
def an_input_is_written(compile: Compile) -> list[Any]:
    run = compile(lambda x, ws: (x.mul_(2).add_(1), deep(x, ws))[1])
    return steps(run, lambda s: leaf(4, WIDTH, seed=s, grad=False), weights())


@case
def an_input_with_history_is_written(compile: Compile) -> list[Any]:
    run = compile(lambda x, ws: (x.mul_(2).sin_(), deep(x, ws))[1])
    layers, found = weights(), []
    for step in range(2):
        start = leaf(4, WIDTH, seed=step)
        x = start * 1
        out = run(x, layers)
        (summed(out) + (x * 3).sum()).backward()
        found += seen(out, x, start.grad, [w.grad for w in layers])
    return found


@case
def a_leaf_is_written_without_gradients(compile: Compile) -> list[Any]:
    def function(x: Any, ws: Any) -> Any:
        hidden = deep(x * 1, ws)
        with torch.no_grad():
            x.mul_(0.5)
        return hidden

    return steps(compile(function), lambda s: leaf(4, WIDTH, seed=s), weights())


@case
def a_leaf_is_written(compile: Compile) -> list[Any]:
    run = compile(lambda x, ws: (x.mul_(2), deep(x, ws))[1])
    try:
        run(leaf(4, WIDTH), weights())
    except RuntimeError:
        return ["refused"]
    return ["written"]


@case
def a_view_is_written(compile: Compile) -> list[Any]:
    def function(x: Any, ws: Any) -> Any:
        hidden = x * 2
        for weight in ws:
            hidden[1:].mul_(0.5)
            hidden.t()[0].add_(1)
            hidden = hidden + torch.tanh(hidden @ weight)
        hidden.view(-1)[2:5].zero_()
        return hidden

    return steps(compile(function), lambda s: leaf(4, WIDTH, seed=s), weights())


@case
def a_view_of_an_input_is_written(compile: Compile) -> list[Any]:
    run = compile(lambda x, ws: (x[1:].t().mul_(2), deep(x, ws))[1])
    return steps(run, lambda s: leaf(4, WIDTH, seed=s, grad=False), weights())


@case
def layers_write_in_place(compile: Compile) -> list[Any]:
    def function(x: Any, ws: Any) -> Any:
        hidden = x * 1
        for weight in ws:
            hidden = (hidden @ weight).add_(hidden).mul_(0.5).tanh_()
        return hidden

    return steps(compile(function), lambda s: leaf(4, WIDTH, seed=s), weights())


@case
def metadata_of_an_input_is_changed(compile: Compile) -> list[Any]:
    def function(x: Any, ws: Any) -> Any:
        x.t_()
        x.unsqueeze_(0)
        return deep(x.squeeze(0).t(), ws)

    return steps(compile(function), lambda s: leaf(4, WIDTH, seed=s, grad=False), weights())


@case
def metadata_and_data_are_changed(compile: Compile) -> list[Any]:
    def function(x: Any, ws: Any) -> Any:
        x.transpose_(0, 1)
        x.mul_(2)
        return deep(x.t(), ws)

    return steps(compile(function), lambda s: leaf(4, WIDTH, seed=s, grad=False), weights())


@case
def metadata_of_an_input_with_history(compile: Compile) -> list[Any]:
    run = compile(lambda x, ws: (x.t_(), deep(x.t(), ws))[1])
    layers, found = weights(), []
    for step in range(2):
        start = leaf(4, WIDTH, seed=step)
        x = start * 1
        out = run(x, layers)
        (summed(out) + x[0].sum()).backward()
        found += seen(out, x, start.grad, [w.grad for w in layers])
    return found


@case
def an_input_is_set_to_another(compile: Compile) -> list[Any]:
    def function(x: Any, y: Any, ws: Any) -> Any:
        hidden = deep(x * 2, ws)
        x.set_(y)
        return hidden + x

    def inputs(step: int) -> tuple[torch.Tensor, ...]:
        return leaf(4, WIDTH, seed=step, grad=False), leaf(4, WIDTH, seed=7, grad=False)

    return steps(compile(function), inputs, weights())


@case
def an_intermediate_is_resized(compile: Compile) -> list[Any]:
    def function(x: Any, ws: Any) -> Any:
        extra = torch.empty(0)
        extra.resize_(4, WIDTH)
        extra.copy_(x.detach())
        return deep(x + extra, ws)

    return steps(compile(function), lambda s: leaf(4, WIDTH, seed=s), weights())


@case
def detached_and_written(compile: Compile) -> list[Any]:
    def function(x: Any, ws: Any) -> Any:
        for weight in ws:
            hidden = x @ weight
            hidden.detach().mul_(2)
            x = x + torch.tanh(hidden)
        return x, x.detach()

    return steps(compile(function), lambda s: leaf(4, WIDTH, seed=s), weights())


@case
def detach_in_place(compile: Compile) -> list[Any]:
    def function(x: Any, ws: Any) -> Any:
        first = deep(x, ws)
        first = first * 1
        first.detach_()
        return deep(first + x, ws)

    return steps(compile(function), lambda s: leaf(4, WIDTH, seed=s), weights())


@case
def a_gradient_is_asked_for_inside(compile: Compile) -> list[Any]:
    def function(x: Any, ws: Any) -> Any:
        own = torch.ones(WIDTH).requires_grad_()
        return deep(x * own, ws), own

    return steps(compile(function), lambda s: leaf(4, WIDTH, seed=s), weights())


@case
def buffers_are_updated(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3)]
    model = nn.Sequential(*blocks).double()
    run = compile(model)
    found = []
    for step in range(3):
        model.train(step < 2)
        out = run(x := leaf(5, WIDTH, seed=step))
        out.square().sum().backward()
        found += seen(out, x.grad, list(model.buffers()), [w.grad for w in model.parameters()])
    return found


@case
def parameters_are_swapped(compile: Compile) -> list[Any]:
    run, layers, found = compile(lambda x, ws: deep(x, ws)), weights(), []
    for step in range(3):
        out = run(x := leaf(4, WIDTH, seed=step), layers)
        out.square().sum().backward()
        found += seen(out, x.grad, [w.grad for w in layers])
        for weight in layers:
            weight.data = weight.data * 0.5
            weight.grad = None
    return found
