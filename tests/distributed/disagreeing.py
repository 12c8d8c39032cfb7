"""Two ranks that compile something else, or one of them nothing, and what each of them is told."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import fx, nn

from memo_compile.backends import entry
from memo_compile.errors import UnsupportedGraph
from memo_compile.reporting import state

TIMEOUT_S = 5.0
ENDED_S = 300.0
"""Who waits for a rank that has ended need not wait so long."""


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


class Meshed(nn.Module):
    """Sums over the rows and over the columns of a mesh of 2 x 2 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        made = [(dist.new_group(ranks), ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
        own = dist.get_rank()
        self.groups = [group.group_name for group, ranks in made if own in ranks]

    def forward(self, x: torch.Tensor, *, logs: bool = False) -> torch.Tensor:
        for group in self.groups:
            x = functional_collectives.all_reduce(self.linear(x).tanh(), "sum", group)
        return x.square().mean()


def main(*, case: str) -> dict[str, Any]:
    """What the first step of this rank raised, and after how many seconds.

    Case ``branch``: of three steps; in the second one rank takes a branch that the other does not.
    Case ``caught``: the first of two models does not fit on one rank, and the program goes on.
    Case ``mesh``: of four ranks, of which the last one cannot have the step.
    Case ``crossed``: of three steps whose groups come in another order on each rank.
    Cases ``aside`` and ``aside after``: one rank has no plan. In the second case both had one
    before, so that they have agreed on these collectives. ``aside again``: neither has one then.
    Case ``again``: the program tries a step that fits on no rank once more, with more memory.
    Case ``ended``: the process of one rank ends before it has compiled anything.
    """
    torch._dynamo.reset()
    state.reset()
    is_second = dist.get_rank() == dist.get_world_size() - 1
    if case.startswith("aside"):
        return stepping_aside(is_second=is_second, case=case)
    if case == "again":
        return refused_and_again()
    if case == "ended" and is_second:
        os.kill(os.getpid(), signal.SIGKILL)
    times = 3 if is_second and case == "one more" else 2
    rows = 6 if is_second and case == "another" else 4
    budget = 1 if is_second and case in ("caught", "mesh") else None
    timeout_s = ENDED_S if case == "ended" else TIMEOUT_S
    compiled = compiled_model(times, memory_budget=budget, ranks_timeout_s=timeout_s)
    if case == "crossed":
        compiled = in_plan(Crossed(is_second=is_second))
    if case == "mesh":
        compiled = in_plan(Meshed(), memory_budget=budget)
    if case != "ended":
        dist.barrier()
    start_s, error, sums = time.monotonic(), "", []
    if not (is_second and case == "absent"):
        try:
            for step in range(3 if case in ("branch", "crossed") else 1):
                sums.append(trained(compiled, rows, logs=is_second and step == 1))
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    took_s = time.monotonic() - start_s
    if case == "absent":
        wait_for_each_other()
    if case == "caught":
        sums.append(trained(compiled_model(1), rows))
    return {"error": error, "took_s": took_s, "sums": sums}


def refused_and_again() -> dict[str, Any]:
    """What was said of both tries; one rank comes to each long before the other."""
    found = {"error": "", "refused": ""}
    for budget in (1, None):
        torch._dynamo.reset()
        time.sleep(0.5 * dist.get_rank())
        try:
            trained(compiled_model(2, memory_budget=budget), 4)
        except Exception as raised:
            found["error" if budget is None else "refused"] = str(raised)
    return found


def stepping_aside(*, is_second: bool, case: str) -> dict[str, Any]:
    """The sum of a step that memo does not plan, what was said, and after how many seconds."""
    dist.barrier()
    after, fails = case != "aside", is_second or case == "aside again"
    if after:
        trained(compiled_model(2), 4)
        torch._dynamo.reset()
    plain, start_s, found = [], time.monotonic(), {"error": "", "sums": []}
    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(entry.inductor_api, "compile_fx", eagerly(plain)))
        if fails:
            failing = mock.Mock(side_effect=UnsupportedGraph("not here"))
            patched.enter_context(mock.patch.object(entry, "assemble", failing))
        try:
            if fails or not after:
                timeout_s = 1.0 if case == "aside after" else TIMEOUT_S
                model = compiled_model(2, ranks_timeout_s=timeout_s)
                found["sums"].append(trained(model, 4))
        except Exception as raised:
            found["error"] = f"{type(raised).__name__}: {raised}"
    return {**found, "took_s": time.monotonic() - start_s, "num_plain": len(plain)}


def eagerly(seen: list[fx.GraphModule]) -> Callable[..., Any]:
    """Stands for plain Inductor, whose compilation takes seconds; counts what it is given."""
    original = entry.inductor.compile_fx

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
    options = {"lowering": "aten", "ranks_timeout_s": TIMEOUT_S, **options}
    return torch.compile(model, backend="memo", options=options)


def trained(compiled: Any, rows: int, *, logs: bool = False) -> float:
    """A step's gradients, as one number."""
    compiled.zero_grad()
    compiled(torch.ones(rows, 8), logs=logs).backward()
    return float(compiled.linear.weight.grad.abs().sum())


def wait_for_each_other() -> None:
    """The rank that has nothing to do does not end while the other still looks for it."""
    dist.barrier()
