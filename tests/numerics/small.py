"""A small model with two equal layers, and what most tests of survival do with it."""

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from memo_runtime.arena import arena_of
from memo_runtime.instructions import Instruction
from torch import nn
from torch.nn import functional

from memo_compile.driver.joint_plan import JointStepPlan
from tests.numerics.closeness import assert_equals_eager
from tests.numerics.training import memo_compiled

CPU = torch.device("cpu")


def in_two_threads(monkeypatch: pytest.MonkeyPatch, run: Callable[[int], Any]) -> list[Any]:
    """What ``run`` returns for 0 and 1, at once: both threads begin the forwards of a joint step
    together, if nothing keeps the second one out."""
    both, inner, found = threading.Barrier(2), JointStepPlan.begin_forward, {}

    def together(plan: JointStepPlan, member: int, **more: Any) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        return inner(plan, member, **more)

    monkeypatch.setattr(JointStepPlan, "begin_forward", together)
    threads = [
        threading.Thread(target=lambda at=at: found.update({at: run(at)})) for at in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[at] for at in range(2)]


class Block(nn.Module):
    def __init__(self, hidden: int, factor: int = 2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, factor * hidden)
        self.down = nn.Linear(factor * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Two residual layers and a head; returns the loss."""

    def __init__(self, hidden: int = 32, num_layers: int = 2) -> None:
        super().__init__()
        self.entry = nn.Linear(hidden, hidden)
        self.layers = nn.ModuleList(Block(hidden) for _ in range(num_layers))
        self.head = nn.Linear(hidden, 4)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x).tanh()
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x)).pow(2).mean()


def rows(seed: int, num_rows: int = 8, hidden: int = 32) -> torch.Tensor:
    return torch.randn(num_rows, hidden, generator=torch.Generator().manual_seed(seed))


class Pair:
    """A model under memo and its eager twin, with the same weights."""

    def __init__(self, model: nn.Module, **options: object) -> None:
        self.eager = copy.deepcopy(model)
        self.ours = model
        self.compiled = memo_compiled(model, **options)

    def zero_grad(self) -> None:
        self.eager.zero_grad()
        self.ours.zero_grad()

    def each(self, run: Callable[[nn.Module], None]) -> None:
        """``run`` on the compiled model, then on the eager one."""
        run(self.compiled)
        run(self.eager)

    def assert_equal(self) -> None:
        assert_equals_eager(self.ours, self.eager)

    def assert_step(self, *inputs: torch.Tensor) -> None:
        """A fresh step of both gives equal gradients."""
        self.zero_grad()
        self.each(lambda model: model(*inputs).backward())
        self.assert_equal()


def leased_slabs() -> int:
    return sum(slab.leased for slab in arena_of(CPU)._slabs)


class Calls:
    """Counts the region calls of every step, and raises at one of them when told to."""

    def __init__(self) -> None:
        self.count = 0
        self.fail_at: int | None = None
        self.error: type[BaseException] = ValueError

    def enter(self) -> None:
        number = self.count
        self.count += 1
        if number == self.fail_at:
            raise self.error(f"injected at region call {number}")


def watched_calls(monkeypatch: pytest.MonkeyPatch, *, behind: bool = False) -> Calls:
    """Every instruction of every step goes through the returned counter first.

    With ``behind`` once more when it has run: even numbers are before one, odd ones after it.
    """
    calls = Calls()
    for kind in get_args(Instruction):
        monkeypatch.setattr(kind, "execute", _entering(calls, kind.execute, behind))
    return calls


def _entering(calls: Calls, execute: Callable, behind: bool) -> Callable:
    def enter(instruction, running) -> None:
        calls.enter()
        execute(instruction, running)
        if behind:
            calls.enter()

    return enter
