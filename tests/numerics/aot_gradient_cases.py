"""More programs for ``test_aot_behaviours``: gradients, kinds of tensors, modes of torch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.numerics.aot_cases import (
    CASES,
    WIDTH,
    Case,
    Compile,
    case,
    deep,
    leaf,
    seen,
    steps,
    weights,
)

# Gradients


@case
def inputs_that_are_not_used(compile: Compile) -> list[Any]:
    def inputs(step: int) -> tuple[torch.Tensor, ...]:
        return leaf(4, WIDTH, seed=step), leaf(3, seed=5), torch.arange(4)

    return steps(compile(lambda x, y, z, ws: (deep(x, ws), z + 1)), inputs, weights())


def asked(of: Callable[[Any], torch.Tensor]) -> Case:
    """Gradients of some of three results."""

    def run_case(compile: Compile) -> list[Any]:
        def function(x: Any, ws: Any) -> Any:
            hidden = deep(x, ws)
            return hidden.sum(), hidden.square(), x * ws[0].sum()

        return steps(compile(function), lambda s: leaf(4, WIDTH, seed=s), weights(), loss=of)

    return run_case


CASES["gradient_of_the_first_result"] = asked(lambda results: results[0])
CASES["gradient_of_the_second_result"] = asked(lambda results: results[1].sum())
CASES["gradient_of_the_last_result"] = asked(lambda results: results[2].sum())
CASES["gradient_that_is_transposed"] = asked(
    lambda results: (results[1].t() * torch.arange(4)).sum()
)
CASES["gradient_of_a_part"] = asked(lambda results: results[1][1:, ::2].sum())
CASES["gradient_of_stride_zero"] = asked(lambda results: results[1].mean(0).sum() + results[0])


@case
def gradients_by_hand(compile: Compile) -> list[Any]:
    """torch.autograd.grad with gradients that lie otherwise than the results."""
    run, layers, found = compile(lambda x, ws: deep(x, ws)), weights(), []
    for step in range(2):
        x = leaf(4, WIDTH, seed=step)
        for given in (
            leaf(WIDTH, 4, grad=False).t(),
            leaf(1, WIDTH, grad=False).expand(4, WIDTH),
            leaf(8, 2 * WIDTH, grad=False)[::2, ::2],
        ):
            out = run(x, layers)
            found += [own.contiguous() for own in torch.autograd.grad(out, [x, *layers], given)]
    return found


@case
def backward_twice(compile: Compile) -> list[Any]:
    run, layers, found = compile(lambda x, ws: deep(x, ws)), weights(), []
    for step in range(2):
        out = run(x := leaf(4, WIDTH, seed=step), layers)
        out.square().sum().backward(retain_graph=True)
        out.sin().sum().backward(retain_graph=True)
        out.sum().backward()
        found += seen(out, x.grad, [w.grad for w in layers])
    return found


@case
def backward_twice_is_refused(compile: Compile) -> list[Any]:
    out = compile(lambda x, ws: deep(x, ws))(leaf(4, WIDTH), weights())
    out.sum().backward()
    try:
        out.sum().backward()
    except RuntimeError as error:
        return ["second time" in str(error)]
    return ["not refused"]


@case
def gradients_with_respect_to_some(compile: Compile) -> list[Any]:
    run, layers = compile(lambda x, ws: deep(x, ws)), weights()
    out = run(x := leaf(4, WIDTH), layers)
    first = torch.autograd.grad(out.sum(), [layers[1]], retain_graph=True)
    return seen(first, torch.autograd.grad(out.square().sum(), [x, layers[0]]))


@case
def some_layers_are_frozen(compile: Compile) -> list[Any]:
    layers = weights()
    layers[1].requires_grad_(False)
    found = steps(compile(lambda x, ws: deep(x, ws)), lambda s: leaf(4, WIDTH, seed=s), layers)
    layers[1].requires_grad_(True)
    return found


@case
def accumulated_gradients(compile: Compile) -> list[Any]:
    run, layers, found = compile(lambda x, ws: deep(x, ws)), weights(), []
    for step in range(4):
        run(leaf(4, WIDTH, seed=step, grad=False), layers).square().sum().backward()
        found += seen([w.grad for w in layers])
    return found


@case
def hooks_on_parameters_and_results(compile: Compile) -> list[Any]:
    run, layers, found = compile(lambda x, ws: deep(x, ws)), weights(), []
    layers[0].register_hook(lambda gradient: gradient * 2)
    layers[1].register_post_accumulate_grad_hook(lambda own: found.extend(seen(own.grad)))
    for step in range(2):
        out = run(x := leaf(4, WIDTH, seed=step), layers)
        out.register_hook(lambda gradient: gradient.clamp(-1, 1))
        out.square().sum().backward()
        found += seen(x.grad, [w.grad for w in layers])
    return found


@case
def a_hook_inside(compile: Compile) -> list[Any]:
    def function(x: Any, ws: Any) -> Any:
        for weight in ws:
            hidden = torch.tanh(x @ weight)
            hidden.register_hook(lambda gradient: gradient * 0.5)
            x = x + hidden
        return x

    return steps(compile(function), lambda s: leaf(4, WIDTH, seed=s), weights())


# Functions with a backward of their own


class Marked(torch.autograd.Function):
    """Writes into its input, keeps an input and a result, and returns what has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scale: float) -> Any:
        out = torch.tanh(x @ weight) * scale
        where = out > 0
        ctx.mark_non_differentiable(where)
        ctx.save_for_backward(x, weight, out)
        ctx.scale = scale
        return out, where

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> Any:
        x, weight, out = ctx.saved_tensors
        inner = gradient * (1 - (out / ctx.scale).square()) * ctx.scale
        return inner @ weight.t(), x.t() @ inner, None


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


@case
def functions_that_keep_inputs_and_results(compile: Compile) -> list[Any]:
    def function(x: Any, ws: Any) -> Any:
        for weight in ws:
            out, where = Marked.apply(x, weight, 0.5)
            x = x + out * where
        return x, where

    return steps(compile(function), lambda s: leaf(4, WIDTH, seed=s), weights())


@case
def functions_that_write(compile: Compile) -> list[Any]:
    def function(x: Any, ws: Any) -> Any:
        for weight in ws:
            x = x + Doubling.apply(torch.tanh(x @ weight) * 1)
        return x

    return steps(compile(function), lambda s: leaf(4, WIDTH, seed=s), weights())


# Kinds of tensors


@case
def tensors_of_two(compile: Compile) -> list[Any]:
    def two(*shape: int, seed: int = 0) -> torch.Tensor:
        a = leaf(*shape, seed=seed, grad=False)
        return TwoTensor(a, a.clone()).requires_grad_()

    layers = [two(WIDTH, WIDTH, seed=10 + at) for at in range(3)]
    run, found = compile(lambda x, ws: deep(x, ws)), []
    for step in range(2):
        out = run(x := two(4, WIDTH, seed=step), layers)
        out.square().sum().backward(retain_graph=True)
        out.sum().backward()
        found += seen(out, x.grad, [w.grad for w in layers])
    return found


@case
def complex_numbers(compile: Compile) -> list[Any]:
    run = compile(lambda x, ws: deep(x, ws))
    kind = torch.complex64
    return steps(run, lambda s: leaf(4, WIDTH, seed=s, dtype=kind), weights(dtype=kind))


@case
def no_rows(compile: Compile) -> list[Any]:
    return steps(compile(lambda x, ws: deep(x, ws)), lambda _: leaf(0, WIDTH), weights())


@case
def tensors_of_no_dimension(compile: Compile) -> list[Any]:
    def function(x: Any, scale: Any, ws: Any) -> Any:
        for weight in ws:
            x = x + torch.tanh(x @ weight) * scale
            scale = scale.sin()
        return x, scale

    return steps(compile(function), lambda s: (leaf(4, WIDTH, seed=s), leaf(seed=3)), weights())


@case
def integers(compile: Compile) -> list[Any]:
    def function(ids: Any, table: Any, ws: Any) -> Any:
        return deep(nn.functional.embedding(ids, table), ws), ids * 2

    def inputs(step: int) -> tuple[torch.Tensor, ...]:
        return torch.tensor([1, 3, 1, step]), leaf(5, WIDTH, seed=4)

    return steps(compile(function), inputs, weights())


@case
def channels_last(compile: Compile) -> list[Any]:
    layers = [leaf(4, 4, 3, 3, seed=at) for at in range(3)]

    def function(x: Any, ws: Any) -> Any:
        for weight in ws:
            x = x + torch.tanh(nn.functional.conv2d(x, weight, padding=1))
        return x

    def inputs(step: int) -> torch.Tensor:
        own = leaf(2, 4, 5, 5, seed=step, grad=False)
        return own.to(memory_format=torch.channels_last).requires_grad_()

    return steps(compile(function), inputs, layers)


@case
def inputs_of_odd_layouts(compile: Compile) -> list[Any]:
    run, layers, found = compile(lambda x, y, ws: deep(x + y, ws)), weights(), []
    for step in range(2):
        x, y = leaf(WIDTH, 4, seed=step), leaf(1, WIDTH, seed=9)
        out = run(x.t(), y.expand(4, WIDTH), layers)
        out.square().sum().backward()
        found += seen(out, x.grad, y.grad, [w.grad for w in layers])
    return found


# Modes of torch


@case
def random_numbers(compile: Compile) -> list[Any]:
    """Other numbers are drawn than in eager; they must be the same in forward and backward."""
    torch.manual_seed(3)

    def function(x: Any, ws: Any) -> Any:
        masks = []
        for weight in ws:
            mask = torch.rand_like(x) > 0.3
            x = x + torch.tanh(x @ weight) * mask
            masks.append(mask)
        return x, masks

    run, layers = compile(function), weights()
    out, masks = run(x := leaf(4, WIDTH), layers)
    out.square().sum().backward()
    ours = [x.grad, *(w.grad for w in layers)]
    again, fresh = leaf(4, WIDTH), weights()
    hidden: torch.Tensor = again
    for weight, mask in zip(fresh, masks, strict=True):
        hidden = hidden + torch.tanh(hidden @ weight) * mask
    hidden.square().sum().backward()
    for own, expected in zip(ours, [again.grad, *(w.grad for w in fresh)], strict=True):
        torch.testing.assert_close(own, expected)
    return [out.shape]


@case
def autocast_inside(compile: Compile) -> list[Any]:
    def function(x: Any, ws: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return deep(x, ws)

    single = torch.float32
    run = compile(function)
    return steps(run, lambda s: leaf(4, WIDTH, seed=s, dtype=single), weights(single))


@case
def autocast_outside(compile: Compile) -> list[Any]:
    run = compile(lambda x, ws: deep(x, ws))

    def function(x: Any, ws: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return run(x, ws)

    single = torch.float32
    return steps(function, lambda s: leaf(4, WIDTH, seed=s, dtype=single), weights(single))


@case
def evaluation_between_steps(compile: Compile) -> list[Any]:
    run, layers = compile(lambda x, ws: deep(x, ws)), weights()
    found = steps(run, lambda s: leaf(4, WIDTH, seed=s), layers)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found += [run(leaf(4, WIDTH, grad=False), layers).clone()]
    return found + steps(run, lambda s: leaf(4, WIDTH, seed=s), layers)


@case
def gradients_are_switched_inside(compile: Compile) -> list[Any]:
    def function(x: Any, ws: Any) -> Any:
        with torch.no_grad():
            scale = deep(x, ws).abs().mean()
            with torch.enable_grad():
                out = deep(x, ws) * scale
        return out, scale

    return steps(compile(function), lambda s: leaf(4, WIDTH, seed=s), weights())


@case
def numbers_beside_tensors(compile: Compile) -> list[Any]:
    def function(x: Any, factor: float, names: Any, ws: Any) -> Any:
        return {"out": deep(x * factor, ws), "factor": factor, "names": [*names, None]}

    return steps(compile(function), lambda s: (leaf(4, WIDTH, seed=s), 2.5, ("a",)), weights())


@case
def an_input_with_a_gradient_is_set(compile: Compile) -> list[Any]:
    def function(x: Any, y: Any, ws: Any) -> Any:
        hidden = deep(x * 2, ws)
        with torch.no_grad():
            x.set_(y)
        return hidden

    def inputs(step: int) -> tuple[torch.Tensor, ...]:
        return leaf(4, WIDTH, seed=step), leaf(4, WIDTH, seed=7, grad=False)

    return steps(compile(function), inputs, weights())


@case
def data_of_an_input_is_replaced(compile: Compile) -> list[Any]:
    def function(x: Any, ws: Any) -> Any:
        hidden = deep(x * 2, ws)
        x.data = x.data * 0.5
        return hidden

    return steps(compile(function), lambda s: leaf(4, WIDTH, seed=s, grad=False), weights())


@case
def a_view_of_a_view_is_given_back(compile: Compile) -> list[Any]:
    def function(x: Any, ws: Any) -> Any:
        hidden = deep(x, ws)
        inner = hidden.view(2, 2, WIDTH).transpose(0, 1)
        inner[0].mul_(2)
        return inner.select(1, 0), x.view(2, 2, WIDTH)[0].unsqueeze(0)

    return steps(compile(function), lambda s: leaf(4, WIDTH, seed=s), weights())


@case
def results_that_are_expanded(compile: Compile) -> list[Any]:
    def function(x: Any, ws: Any) -> Any:
        hidden = deep(x, ws)
        return hidden.mean(0).expand(3, WIDTH), hidden.unfold(1, 3, 1), hidden.diagonal()

    return steps(compile(function), lambda s: leaf(4, WIDTH, seed=s), weights())


@case
def an_input_is_copied_into(compile: Compile) -> list[Any]:
    """A cache that a step fills and gives back, and a counter."""

    def function(x: Any, cache: Any, count: Any, ws: Any) -> Any:
        for at, weight in enumerate(ws):
            x = x + torch.tanh(x @ weight + cache[at])
            cache[at].copy_(x.detach())
        count += 1
        return x, cache, count

    cache, count = torch.zeros(3, 4, WIDTH, dtype=torch.float64), torch.zeros(())
    return steps(compile(function), lambda s: (leaf(4, WIDTH, seed=s), cache, count), weights())


@case
def a_result_of_no_gradient_is_written_afterwards(compile: Compile) -> list[Any]:
    run = compile(lambda x, ws: (hidden := deep(x, ws), hidden.detach()))
    layers, found = weights(), []
    for step in range(2):
        out, apart = run(x := leaf(4, WIDTH, seed=step), layers)
        apart.mul_(2)
        out.sum().backward()
        found += seen(out, x.grad, [w.grad for w in layers])
    return found


@case
def two_forwards_then_two_backwards(compile: Compile) -> list[Any]:
    run, layers, found = compile(lambda x, ws: deep(x, ws)), weights(), []
    for step in range(2):
        first, second = (run(leaf(4, WIDTH, seed=step + at), layers) for at in (0, 5))
        first.square().sum().backward()
        second.sin().sum().backward()
        found += seen(first, second, [w.grad for w in layers])
    return found


@case
def the_result_goes_in_again(compile: Compile) -> list[Any]:
    run, layers, found = compile(lambda x, ws: deep(x, ws)), weights(), []
    for step in range(2):
        out = run(run(x := leaf(4, WIDTH, seed=step), layers), layers)
        out.square().sum().backward()
        found += seen(out, x.grad, [w.grad for w in layers])
    return found
