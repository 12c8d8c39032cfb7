"""State and gradients on the host under DDP: what one of the ranks finds."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from memo_runtime.host_tensors import place_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memo_compile
from memo_compile.reporting import state
from tests.numerics.small import Stack, rows

OPTIONS = {"lowering": "aten", "strict": True, "costs": "roofline", "debug": ("poison",)}
HIDDEN, STEPS = 32, 3


def main(*, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each setting of DDP gives."""
    return [in_parallel(**setting) for setting in settings]


def in_parallel(**arguments: Any) -> dict[str, Any]:
    """Two micro-batches a step, of which the second one is reduced; beside the plain optimizer."""
    plain, _ = _trained(arguments, update=None)
    ours, at_home = _trained(arguments, update="host")
    report = memo_compile.report()
    return {
        "same": [torch.equal(mine, theirs) for mine, theirs in zip(ours, plain, strict=True)],
        "at_home": at_home,
        "active": report.active,
        "unplanned_steps": report.unplanned_steps,
        "training_state": report.training_state.update,
    }


def _trained(
    arguments: dict[str, Any], update: str | None
) -> tuple[list[torch.Tensor], list[bool]]:
    """The last weights, and whether each gradient of the last step was at home after it."""
    torch._dynamo.reset()
    state.reset()
    torch.manual_seed(0)
    model = Stack(HIDDEN, num_layers=3)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if update is not None:
        optimizer = memo_compile.offload(optimizer, update=update)
    rank, at_home = dist.get_rank(), []
    with torch._dynamo.config.patch(optimize_ddp=False):
        parallel = DistributedDataParallel(model, bucket_cap_mb=0.008, **arguments)
        run = torch.compile(parallel, backend="memo", options=OPTIONS)
        for step in range(STEPS):
            for part, syncs in enumerate((False, True)):
                x = rows(10 * step + 2 * part + rank, 12, HIDDEN)
                with contextlib.nullcontext() if syncs else parallel.no_sync():
                    run(x).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            at_home = [place_of(each.grad) is not None for each in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    return [each.detach().clone() for each in model.parameters()], at_home
