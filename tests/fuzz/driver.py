"""Trains one model and writes down everything that can be compared. Imports torch only: a failing
case's script carries this file with it.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Compile = Callable[[nn.Module], Callable[..., Any]]
Offload = Callable[[torch.optim.Optimizer], torch.optim.Optimizer]

OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "adam": functools.partial(torch.optim.Adam, amsgrad=True),
    "fused": functools.partial(torch.optim.AdamW, fused=True),
    "foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "radam": torch.optim.RAdam,
    "nadam": torch.optim.NAdam,
    "rmsprop": functools.partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
}


@dataclass(slots=True, kw_only=True)
class Record:
    """What one training run computed, step by step, under names like ``loss 0``."""

    steps: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """Copies: losses, outputs, gradients, buffers; outputs again after one of them was written."""
    shared: set[str] = field(default_factory=set)
    """Pairs of gradients or of outputs that share memory."""
    starts: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """Parameters and buffers before every step."""
    updates: dict[str, float] = field(default_factory=dict)
    """By parameter: the most by which an offloaded update missed the plain optimizer's, as a part
    of the parameter's largest entry."""


def train(
    model: nn.Module,
    namespace: Mapping[str, Any],
    run: Mapping[str, Any],
    dtype: torch.dtype,
    compile: Compile = lambda model: model,
    starts: Sequence[Mapping[str, torch.Tensor]] | None = None,
    offload: Offload | None = None,
) -> Record:
    """Train ``model`` as ``run`` says; every step starts with the values of ``starts``, if given.

    So that steps are compared one by one: rounding does not grow from step to step. With
    ``offload`` each update is compared with that of the plain optimizer, given the same gradients.
    """
    record = Record()
    for parameter in itertools.islice(model.parameters(), 2 if run["frozen"] else 0):
        parameter.requires_grad_(False)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    optimizer = _optimizer(trained.values(), run)
    twin = None if offload is None else _Twin(trained, run)
    optimizer = optimizer if offload is None else offload(optimizer)
    called = compile(model)
    held: list[Any] = []
    lengths = itertools.cycle((namespace["T"], *run["lengths"]))
    for step in range(run["steps"]):
        if starts is not None:
            _load(model, starts[step])
        record.starts.append({name: value.detach().clone() for name, value in _state(model)})
        optimizer.zero_grad(set_to_none=not run["keep_zero"])
        batches = [
            _inputs(namespace, 100 * step + number, dtype, model, run, next(lengths))
            for number in range(run["accumulate"])
        ]
        seen: dict[str, torch.Tensor] = {}
        for number, (inputs, outputs, loss) in _forwards(called, batches, namespace, run):
            _backward(loss, run)
            what = {"loss": loss, "model": model, "run": run}
            _note(seen, record.shared, f"{number}", inputs, outputs, **what)
            if run["hold"]:
                held.append((f"step {step} output {number}", outputs))
            del inputs, outputs, loss
        _note_gradients(seen, record.shared, model)
        record.steps.append(seen)
        if twin is not None:
            twin.step()
        _clip(trained.values(), run)
        optimizer.step()
        if twin is not None:
            twin.compare(record.updates)
    record.steps[-1].update(
        {
            f"held {name}.{at}": output.detach().clone()
            for name, outputs in held
            for at, output in enumerate(outputs)
        }
    )
    return record


def _optimizer(parameters: Iterable[torch.Tensor], run: Mapping[str, Any]) -> torch.optim.Optimizer:
    held, number = list(parameters), run["groups"]
    groups = [
        {"params": held[at::number], "lr": 0.01 / (at + 1), "weight_decay": 0.1 * at}
        for at in range(number)
        if held[at::number]
    ]
    return OPTIMIZERS[run["optimizer"]](groups if number > 1 else held, lr=0.01)


def _clip(parameters: Iterable[torch.Tensor], run: Mapping[str, Any]) -> None:
    if run["clip"] == "norm":
        nn.utils.clip_grad_norm_(parameters, 0.1)
    if run["clip"] == "value":
        nn.utils.clip_grad_value_(parameters, 0.01)


class _Twin:
    """Copies of the parameters, which the plain optimizer updates by the same gradients."""

    def __init__(self, trained: Mapping[str, torch.Tensor], run: Mapping[str, Any]) -> None:
        self._run = run
        self._trained = trained
        self._copies = {name: each.detach().clone() for name, each in trained.items()}
        self._optimizer = _optimizer(self._copies.values(), run)

    def step(self) -> None:
        """Clips and updates the copies, before the parameters are."""
        for name, parameter in self._trained.items():
            copied, gradient = self._copies[name], parameter.grad
            copied.copy_(parameter.detach())
            copied.grad = None if gradient is None else gradient.detach().clone()
        _clip(self._copies.values(), self._run)
        self._optimizer.step()

    def compare(self, worst: dict[str, float]) -> None:
        """Notes how far the parameters are from the copies; NaN beside NaN is no difference."""
        for name, parameter in self._trained.items():
            mine, theirs = parameter.detach().double(), self._copies[name].double()
            is_same = (mine == theirs) | (mine.isnan() & theirs.isnan())
            apart = (mine - theirs).abs().masked_fill(is_same, 0.0).nan_to_num(torch.inf)
            largest = theirs.nan_to_num(0.0, 0.0, 0.0).abs().max() if theirs.numel() else 1.0
            off = float(apart.max() / largest) if apart.any() else 0.0
            worst[name] = max(worst.get(name, 0.0), off)


def _forwards(
    called: Callable[..., Any],
    batches: Sequence[tuple[Any, ...]],
    namespace: Mapping[str, Any],
    run: Mapping[str, Any],
) -> Iterable[tuple[int, tuple[Any, Any, Any]]]:
    """Inputs, outputs and loss of every micro-batch; with ``overlap`` all forwards come first."""

    def forward(inputs: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        outputs = called(*inputs)
        return inputs, outputs, namespace["loss_of"](outputs, *inputs[3:])

    done = map(forward, batches)
    return enumerate(list(done) if run["overlap"] else done)


def _backward(loss: torch.Tensor, run: Mapping[str, Any]) -> None:
    loss.backward(retain_graph=run["retain"])
    if run["retain"]:
        loss.backward()


def _inputs(
    namespace: Mapping[str, Any],
    seed: int,
    dtype: torch.dtype,
    model: nn.Module,
    run: Mapping[str, Any],
    tokens: int,
) -> tuple[Any, ...]:
    """Made in ``dtype``, then as precise as the model is, and where it is."""
    precise, device = next((each.dtype, each.device) for each in model.parameters())
    made = namespace["inputs_of"](seed, dtype, tokens)
    made = [value.to(precise) if value.is_floating_point() else value for value in made]
    made = [value.to(device) for value in made]
    made[1].requires_grad_(run["input_gradient"])
    return tuple(made)


def _note(
    seen: dict[str, torch.Tensor],
    shared: set[str],
    number: str,
    inputs: tuple[Any, ...],
    outputs: tuple[Any, ...],
    *,
    loss: torch.Tensor,
    model: nn.Module,
    run: Mapping[str, Any],
) -> None:
    seen[f"loss {number}"] = loss.detach().clone()
    for at, output in enumerate(outputs):
        seen[f"output {number}.{at}"] = output.detach().clone()
    if inputs[1].grad is not None:
        seen[f"gradient of the input {number}"] = inputs[1].grad.clone()
    named = [(f"output {at}", output) for at, output in enumerate(outputs)]
    named += [(f"input {at}", value) for at, value in enumerate(inputs)]
    shared |= _overlaps([*named, *_state(model)], bytes_of=_extent)
    floats = [output for output in outputs if output.is_floating_point() and not output.is_leaf]
    if run["in_place"] and floats:
        with contextlib.suppress(RuntimeError):  # an expanded result, which eager refuses as well
            floats[-1].detach().add_(100)
        for at, output in enumerate(outputs):
            seen[f"output {number}.{at} after a write"] = output.detach().clone()


def _note_gradients(seen: dict[str, torch.Tensor], shared: set[str], model: nn.Module) -> None:
    grads = [
        (name, parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    ]
    for name, grad in grads:
        seen[f"gradient {name}"] = grad.detach().clone()
    for name, buffer in model.named_buffers():
        seen[f"buffer {name}"] = buffer.detach().clone()
    shared |= _overlaps(
        [(f"gradient {name}", gradient) for name, gradient in grads], bytes_of=_storage
    )


def _state(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _load(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in _state(model):
            value.copy_(values[name])


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.untyped_storage().data_ptr()
    return start, start + tensor.untyped_storage().nbytes()


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """From the first to behind the last byte that the tensor reaches."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _overlaps(
    named: Sequence[tuple[str, torch.Tensor]],
    bytes_of: Callable[[torch.Tensor], tuple[int, int]],
) -> set[str]:
    """Names of all pairs that share a byte."""
    spans = [(name, *bytes_of(tensor)) for name, tensor in named if tensor.numel()]
    return {
        f"{first} and {second}"
        for (first, start, end), (second, other, until) in itertools.combinations(spans, 2)
        if start < until and other < end
    }
