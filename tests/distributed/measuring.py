"""Two ranks that measure other costs of one step, of which a budget allows two plans."""

import time
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import nn

import memo_compile
from memo_compile.costs.bandwidth import CopyBandwidth
from memo_compile.driver import knowledge
from memo_compile.reporting import state
from memo_compile.step.problem import CallKind
from tests.numerics.small import Stack, rows

TIMEOUT_S = 15.0
COPY = CopyBandwidth(d2h_bytes_per_s=1e6, h2d_bytes_per_s=1e6, latency_s=0.0, source="made up")
SECONDS = 1e-6, 1.0
"""Of a region on each rank: there it is faster to compute again, here to copy."""


class Summed(nn.Module):
    """Its block's result is the sum over the ranks."""

    def __init__(self, block: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.block = block
        self.group_name = (group or dist.group.WORLD).group_name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional_collectives.all_reduce(self.block(x), "sum", self.group_name)


def main(*, is_shared: bool, strict: bool, cheaper: int) -> dict[str, Any]:
    """What this rank has planned, or why not; rank ``cheaper`` finds computation cheap."""
    torch._dynamo.reset()
    state.reset()
    rank = dist.get_rank()
    region_s = SECONDS[rank != cheaper]

    def measured(lowered: Any, graphs: Any, **_: Any) -> dict[str, float]:
        kinds = {name: graphs[name].kind for name in lowered}
        return {name: region_s if kinds[name] is CallKind.RUN else 0.0 for name in lowered}

    torch.manual_seed(0)
    model = Stack(hidden=32, num_layers=2)
    model.layers = nn.ModuleList(Summed(layer) for layer in model.layers)
    options = {"lowering": "aten", "strict": strict, "ranks_timeout_s": TIMEOUT_S}
    options |= {"policy": "greedy", "memory_budget": 222_000, "token_tiles": 1}
    error, start_s = "", time.monotonic()
    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(knowledge, "measure_all", measured))
        patched.enter_context(mock.patch.object(knowledge, "copy_bandwidth", return_value=COPY))
        if not is_shared:
            alone = mock.patch.object(knowledge, "first_told", lambda keys, own: own(list(keys)))
            patched.enter_context(alone)
        compiled = torch.compile(model, backend="memo", options=options)
        try:
            compiled(rows(1, 32)).backward()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    report = memo_compile.report()
    plan = report.plans[-1] if report.plans else None
    return {
        "error": error,
        "took_s": time.monotonic() - start_s,
        "notes": list(report.notes),
        "planned": plan
        and [plan.recomputed_bytes, plan.offloaded_bytes, plan.peak_bytes, plan.step_s],
        "gradient": None if error else float(model.entry.weight.grad.double().square().sum()),
    }
