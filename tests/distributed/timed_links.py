"""Two ranks whose link is slower than declared, and what they plan once they have found out."""

import copy
import os
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from memo_runtime import run_step
from memo_runtime.collectives import engine_for
from torch import nn

import memo_compile
from memo_compile.reporting import state
from tests.numerics.small import Stack, rows

LINK_BYTES_PER_S = 50_000.0
NUM_ROWS, HIDDEN, LAYERS = 8, 32, 2
SECONDS = NUM_ROWS * HIDDEN * 4 / LINK_BYTES_PER_S
"""Of each collective."""


class Summed(nn.Module):
    """Its block's result is the sum over the ranks."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.group_name = dist.group.WORLD.group_name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional_collectives.all_reduce(self.block(x), "sum", self.group_name)


def main(*, folder: str, grouped: bool = False) -> list[dict[str, Any]]:
    """What is planned and found in each of three steps; ``folder`` is the user's cache.

    The layers are compiled by themselves, as a group, where they are ``grouped``.
    """
    torch._dynamo.reset()
    state.reset()
    torch.manual_seed(0)
    model = Stack(hidden=HIDDEN, num_layers=LAYERS)
    model.layers = nn.ModuleList(Summed(layer) for layer in model.layers)
    eager = copy.deepcopy(model)
    options = {"lowering": "aten", "policy": "full-recompute", "token_tiles": 1, "strict": True}
    with ExitStack() as patched:
        patched.enter_context(mock.patch.dict(os.environ, {"XDG_CACHE_HOME": folder}))
        slow = mock.patch.object(
            run_step, "engine_for", lambda schedule, _: engine_for(schedule, LINK_BYTES_PER_S)
        )
        patched.enter_context(slow)
        if grouped:
            memo_compile.group(list(model.layers), **options)
        compiled = model if grouped else torch.compile(model, backend="memo", options=options)
        return [trained(compiled, model, eager, rows(step, NUM_ROWS)) for step in range(3)]


def trained(compiled: Any, ours: nn.Module, eager: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    """One step of both."""
    ours.zero_grad()
    eager.zero_grad()
    compiled(x).backward()
    eager(x).backward()
    report = memo_compile.report()
    plan = (report.groups or report.plans)[-1]
    pairs = zip(ours.parameters(), eager.parameters(), strict=True)
    return {
        "num_collectives": plan.num_collectives,
        "num_measured": plan.measured_collectives,
        "comm_s": plan.hidden_comm_s + plan.exposed_comm_s,
        "spans": [[own.lane, own.name, own.start_s, own.end_s] for own in plan.timeline.spans],
        "text": str(report),
        "error": max(float((mine.grad - its.grad).abs().max()) for mine, its in pairs),
        "notes": list(report.notes),
    }
