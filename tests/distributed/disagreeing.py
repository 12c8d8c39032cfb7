"""Two ranks that compile something else, or one of them nothing, and what each of them is told."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import fx, nn

from memo_compile.backends import entry
from memo_compile.errors import UnsupportedGraph
from memo_compile.reporting import state

TIMEOUT_S = 60.0
DIFFERENT_S = 15.0
"""So long the second of two ranks waits for the first, which compiles something else."""


class Reduced(nn.Module):
    """A layer whose sum over the ranks comes ``times`` times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.times = times

    def forward(self, x: torch.Tensor, *, logs: bool = False) -> torch.Tensor:
        for _ in range(self.times):
            x = self.linear(x).tanh()
            x = functional_collectives.all_reduce(x, "sum", dist.group.WORLD)
        return x.square().mean() + (1.0 if logs else 0.0)


class Crossed(nn.Module):
    """Sums over the ranks in two groups, on one rank in the other order."""

    def __init__(self, *, is_second: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.groups = [dist.new_group([0, 1]).group_name for _ in range(2)]
        self.is_second = is_second

    def forward(self, x: torch.Tensor, *, logs: bool = False) -> torch.Tensor:
        h = self.linear(x)
        parts = [(h.tanh(), self.groups[0]), (h.sin(), self.groups[1])]
        if self.is_second:
            parts.reverse()
        a, b = (functional_collectives.all_reduce(part, "sum", group) for part, group in parts)
        return (a * b).square().mean()


def main(*, case: str) -> dict[str, Any]:
    """What the first step of this rank raised, and after how many seconds.

    Case ``branch``: of three steps; in the second one rank takes a branch that the other does not.
    Case ``caught``: the first of two models does not fit on one rank, and the program goes on.
    Case ``crossed``: of three steps whose groups come in another order on each rank.
    Case ``aside``: one rank has no plan.
    """
    torch._dynamo.reset()
    state.reset()
    is_second = dist.get_rank() == 1
    times = 3 if is_second and case == "one more" else 2
    budget = 1 if is_second and case == "caught" else None
    timeout_s = DIFFERENT_S if case == "one more" else TIMEOUT_S
    compiled = compiled_model(times, memory_budget=budget, ranks_timeout_s=timeout_s)
    if case == "crossed":
        compiled = in_plan(Crossed(is_second=is_second), ranks_timeout_s=TIMEOUT_S)
    dist.barrier()
    start_s, error, sums, plain = time.monotonic(), "", [], []
    failing = mock.Mock(side_effect=UnsupportedGraph("not here"))
    is_aside = is_second and case == "aside"
    fails = mock.patch.object(entry, "assemble", failing) if is_aside else nullcontext()
    with mock.patch.object(entry.inductor_api, "compile_fx", eagerly(plain)), fails:
        try:
            for step in range(3 if case in ("branch", "crossed") else 1):
                sums.append(trained(compiled, logs=is_second and step == 1))
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    took_s = time.monotonic() - start_s
    if case == "caught":
        sums.append(trained(compiled_model(1)))
    return {"error": error, "took_s": took_s, "sums": sums, "num_plain": len(plain)}


def eagerly(seen: list[fx.GraphModule]) -> Callable[..., Any]:
    """Stands for plain Inductor, whose compilation takes seconds; counts what it is given."""
    original = entry.inductor_api.compile_fx

    def compiled(gm: fx.GraphModule, inputs: Sequence[Any], **of_memo: Any) -> Any:
        if of_memo:
            return original(gm, inputs, **of_memo)
        seen.append(gm)
        return gm.forward

    return compiled


def compiled_model(times: int, **options: Any) -> Any:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return in_plan(Reduced(times), **options)


def in_plan(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="memo", options={"lowering": "aten", **options})


def trained(compiled: Any, *, logs: bool = False) -> float:
    """A step's gradients, as one number."""
    compiled.zero_grad()
    compiled(torch.ones(4, 8), logs=logs).backward()
    return float(compiled.linear.weight.grad.abs().sum())
