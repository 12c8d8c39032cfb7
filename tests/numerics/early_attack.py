"""Random models in random modes of autograd: every gradient and every hook as in eager.

``python -m tests.numerics.early_attack 100 300`` tries seeds 100 to 299.
"""

import contextlib
import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.numerics.small import Block
from tests.numerics.training import memo_compiled

HIDDEN = 16
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"debug": ("poison",)},
    {"policy": "full-recompute"},
    {"policy": "full-recompute", "debug": ("poison",)},
    {"policy": "full-offload", "debug": ("poison", "copies-late")},
    {"policy": "full-offload", "debug": ("poison", "copies-early")},
    {"max_inflight": 2},
)
TRAITS = ("tied", "twin", "frozen", "product", "outside_cast", "outside_view", "input", "detached")
"""What a model may have: one weight in two places; two parameters with one gradient; parameters
without; a parameter that is another's gradient; parameters that are no leaves of the graph; an
input with a gradient; a parameter that the graph is given a second time, without a gradient."""


class Drawn(nn.Module):
    """Residual layers between an entry and a head, with some of TRAITS; returns the loss."""

    def __init__(self, traits: frozenset[str], num_layers: int) -> None:
        super().__init__()
        self.traits = traits
        self.entry = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.layers = nn.ModuleList(Block(HIDDEN) for _ in range(num_layers))
        self.head = nn.Linear(HIDDEN, HIDDEN)
        self.twins = nn.ParameterList(nn.Parameter(torch.randn(HIDDEN)) for _ in range(2))
        self.outside = nn.Parameter(torch.randn(2 * HIDDEN))
        if "frozen" in traits:
            self.layers[0].requires_grad_(False)
            self.head.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, scale: torch.Tensor, again: torch.Tensor) -> torch.Tensor:
        x = self.entry(x).tanh() * scale
        for layer in self.layers:
            x = layer(x)
        if "twin" in self.traits:
            x = x + (self.twins[0] + self.twins[1])
        if "product" in self.traits:
            x = x + self.twins[0] * self.twins[1]
        if "detached" in self.traits:
            x = x * again
        if "tied" in self.traits:
            x = functional.linear(x, self.entry.weight)
        return self.head(x).pow(2).mean()

    def given(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What is passed beside the input: the scale of rows, and a parameter once more."""
        scale = self.outside[:HIDDEN]
        if "outside_cast" in self.traits:
            scale = self.outside.double().float()[HIDDEN:]
        elif "outside_view" not in self.traits:
            scale = scale.detach()
        return scale, self.layers[-1].norm.weight.detach()


def rows(seed: int) -> torch.Tensor:
    return torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(seed))


Event = tuple[str, str, torch.Tensor | None]
"""(kind of hook, parameter, what it saw)."""


@dataclass
class Run:
    """One of the twins, and what its hooks saw."""

    model: Drawn
    call: Callable[..., torch.Tensor]
    events: list[Event] = field(default_factory=list)
    extra: list[Any] = field(default_factory=list)
    failing: str | None = None
    stepping: bool = False

    def watch(self, kinds: set[str]) -> None:
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            if "pre" in kinds:
                parameter.register_hook(lambda grad, name=name: self._saw("pre", name, grad))
            if "scale" in kinds:
                parameter.register_hook(lambda grad: grad * 0.5)
            if "post" in kinds:
                parameter.register_post_accumulate_grad_hook(
                    lambda leaf, name=name: self._after(name, leaf)
                )

    def _saw(self, kind: str, name: str, value: torch.Tensor | None) -> None:
        self.events.append((kind, name, None if value is None else value.detach().clone()))

    def _after(self, name: str, leaf: torch.Tensor) -> None:
        self._saw("post", name, leaf.grad)
        if name == self.failing:
            raise ZeroDivisionError(name)
        if self.stepping:
            with torch.no_grad():
                leaf -= 0.05 * leaf.grad
            leaf.grad = None

    def loss(self, seed: int) -> torch.Tensor:
        x = rows(seed)
        if "input" in self.model.traits:
            x.requires_grad_()
            self.extra.append(x)
        return self.call(x, *self.model.given())

    def trained(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def sgd(self) -> None:
        with torch.no_grad():
            for parameter in self.trained().values():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad


def _plain(run: Run, seed: int, rng: random.Random) -> None:
    run.loss(seed).backward()


def _accumulated(run: Run, seed: int, rng: random.Random) -> None:
    for more in range(3):
        run.loss(seed + more).backward()


def _retained(run: Run, seed: int, rng: random.Random) -> None:
    loss = run.loss(seed)
    loss.backward(retain_graph=True)
    (2 * loss).backward()


def _grad_of_all(run: Run, seed: int, rng: random.Random) -> None:
    leaves = list(run.trained().values())
    run.extra += torch.autograd.grad(run.loss(seed), leaves, allow_unused=True)


def _grad_of_some(run: Run, seed: int, rng: random.Random) -> None:
    names = rng.sample(sorted(run.trained()), 3)
    leaves = [run.trained()[name] for name in names]
    run.extra += torch.autograd.grad(run.loss(seed), leaves, allow_unused=True)


def _inputs(run: Run, seed: int, rng: random.Random) -> None:
    names = rng.sample(sorted(run.trained()), 4)
    loss = run.loss(seed)
    with contextlib.suppress(RuntimeError):  # none of them is in the graph
        loss.backward(inputs=[run.trained()[name] for name in names])


def _exception(run: Run, seed: int, rng: random.Random) -> None:
    run.failing = rng.choice(["head.weight", "entry.weight", "layers.1.up.weight"])
    with contextlib.suppress(ZeroDivisionError):
        run.loss(seed).backward()
    run.failing = None
    run.events.clear()  # which hooks ran before is up to the order inside a layer
    run.extra.clear()
    run.model.zero_grad()
    run.loss(seed).backward()


def _scaled_and_clipped(run: Run, seed: int, rng: random.Random) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer = torch.optim.SGD(run.trained().values(), lr=0.05)
    scaler.scale(run.loss(seed)).backward()
    scaler.unscale_(optimizer)
    run.extra.append(nn.utils.clip_grad_norm_(run.trained().values(), 0.01))
    scaler.step(optimizer)
    scaler.update()


def _in_hooks(run: Run, seed: int, rng: random.Random) -> None:
    run.stepping = True
    run.loss(seed).backward()
    run.stepping = False


def _penalty_before(run: Run, seed: int, rng: random.Random) -> None:
    penalty = sum(p.pow(2).sum() for p in list(run.trained().values())[::2])
    (run.loss(seed) + 0.1 * penalty).backward()


def _penalty_after(run: Run, seed: int, rng: random.Random) -> None:
    loss = run.loss(seed)
    (loss + 0.1 * sum(p.pow(2).sum() for p in list(run.trained().values())[::3])).backward()


def _two_losses(run: Run, seed: int, rng: random.Random) -> None:
    (run.loss(seed) + 3 * run.loss(seed + 1)).backward()


def _two_backwards(run: Run, seed: int, rng: random.Random) -> None:
    first, second = run.loss(seed), run.loss(seed + 1)
    first.backward()
    second.backward()


def _checkpointed(run: Run, seed: int, rng: random.Random) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return run.call(x, *run.model.given())

    x = rows(seed).requires_grad_()
    torch.utils.checkpoint.checkpoint(call, x, use_reentrant=True).backward()


def _inner_backward(run: Run, seed: int, rng: random.Random) -> None:
    """A hook runs another forward and backward of the same graph."""
    name, busy = "layers.1.down.weight", []

    def hook(grad: torch.Tensor) -> None:
        if not busy:
            busy.append(1)
            with torch.enable_grad():
                loss = run.loss(seed + 5)
            run.extra += torch.autograd.grad(loss, [run.model.head.weight])

    handle = run.trained()[name].register_hook(hook)
    run.loss(seed).backward()
    handle.remove()


MODES: Mapping[str, Callable[[Run, int, random.Random], None]] = {
    mode.__name__.lstrip("_"): mode
    for mode in (
        _plain,
        _accumulated,
        _retained,
        _grad_of_all,
        _grad_of_some,
        _inputs,
        _exception,
        _scaled_and_clipped,
        _in_hooks,
        _penalty_before,
        _penalty_after,
        _two_losses,
        _two_backwards,
        _checkpointed,
        _inner_backward,
    )
}
KEEPS_ORDER = ("plain", "accumulated", "in_hooks")
"""Modes in which hooks of one layer come before those of the layer in front, as in eager."""


@dataclass(frozen=True)
class Case:
    traits: frozenset[str]
    num_layers: int
    options: Mapping[str, Any]
    modes: tuple[str, ...]
    kinds: frozenset[str]
    zeroes: bool


def drawn(seed: int) -> Case:
    rng = random.Random(seed)
    return Case(
        traits=frozenset(rng.sample(TRAITS, rng.randrange(4))),
        num_layers=rng.choice([2, 3]),
        options=rng.choice(OPTIONS),
        modes=tuple(rng.sample(sorted(MODES), 6)),
        kinds=frozenset(kind for kind in ("pre", "post", "scale") if rng.random() < 0.6) | {"post"},
        zeroes=rng.random() < 0.6,
    )


def attack(seed: int, **options: Any) -> Case:
    """Raise AssertionError where a gradient or a hook differs from eager in case ``seed``."""
    case = drawn(seed)
    torch.manual_seed(seed)
    model = Drawn(case.traits, case.num_layers)
    twin = copy.deepcopy(model)
    compiled = memo_compiled(model, strict=True, **{"lowering": "aten", **case.options, **options})
    runs = [Run(model, compiled), Run(twin, twin)]
    for run in runs:
        run.watch(set(case.kinds))
    for at, mode in enumerate(case.modes):
        for run in runs:
            MODES[mode](run, 10 * at, random.Random(seed + at))
        where = f"seed {seed}, {case}, mode {mode}"
        _compare(*runs, where, ordered=mode in KEEPS_ORDER)
        for run in runs:
            run.sgd()
            if case.zeroes:
                run.model.zero_grad()
    return case


def _compare(ours: Run, eager: Run, where: str, *, ordered: bool) -> None:
    for name, parameter in eager.model.named_parameters():
        _assert_equal(ours.model.get_parameter(name).grad, parameter.grad, f"{name} in {where}")
    kinds = {(kind, name) for kind, name, _ in (*ours.events, *eager.events)}
    for kind, name in sorted(kinds):
        seen = [
            [value for k, n, value in run.events if (k, n) == (kind, name)] for run in (ours, eager)
        ]
        assert len(seen[0]) == len(seen[1]), f"{kind} of {name}: {list(map(len, seen))} in {where}"
        for got, expected in zip(*seen, strict=True):
            _assert_equal(got, expected, f"{kind} of {name} in {where}")
    assert len(ours.extra) == len(eager.extra), where
    for got, expected in zip(ours.extra, eager.extra, strict=True):
        got, expected = (
            v.grad if v is not None and v.is_leaf and v.requires_grad else v
            for v in (got, expected)
        )
        _assert_equal(got, expected, f"extra in {where}")
    if ordered:
        assert list(_layers(ours)) == list(_layers(eager)), f"order in {where}"
    for run in (ours, eager):
        run.events.clear()
        run.extra.clear()


def _layers(run: Run) -> Iterator[str]:
    """The layers whose hooks ran, each once in a row."""
    last = ""
    for _, name, _ in run.events:
        layer = ".".join(name.split(".")[:2])
        if name.startswith("layers") and layer != last:
            last = layer
            yield layer


def _assert_equal(got: Any, expected: Any, what: str) -> None:
    assert (got is None) == (expected is None), f"{what}: got {got}, expected {expected}"
    if expected is not None:
        scale = float(expected.abs().max()) + 1e-6
        worst = float((got - expected).abs().max()) / scale
        assert worst < 2e-4, f"{what}: {worst:.1e} apart"


def main(first: int, last: int) -> None:
    failed = 0
    for seed in range(first, last):
        torch._dynamo.reset()
        try:
            attack(seed)
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:600]}", flush=True)
    print(f"{last - first} cases, {failed} failed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]))
