"""Stages of torch.distributed.pipelining under memo, beside the whole model in one process."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import memo_compile
from memo_compile.reporting import state
from tests.numerics.small import Block

HIDDEN, ROWS, STEPS = 32, 64, 4
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def main(*, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each setting's training gives, one after the other in the same processes."""
    return [trained(**setting) for setting in settings]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).pow(2).mean()


def trained(
    *,
    schedule: str,
    num_microbatches: int = 4,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Some steps of both, with an optimizer; the errors after each.

    Between the second step and the third the stage is evaluated.
    """
    torch._dynamo.reset()
    state.reset()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    eager = nn.Sequential(*(Block(HIDDEN) for _ in range(2 * num_ranks)))
    own = copy.deepcopy(eager[2 * rank : 2 * rank + 2])
    stage = PipelineStage(own, rank, num_ranks, torch.device("cpu"))
    chosen = {"lowering": "aten", "strict": True, "costs": "roofline", **(options or {})}
    run = memo_compile.pipeline(
        SCHEDULES[schedule](stage, num_microbatches, loss_fn=loss_of), **chosen
    )
    theirs = eager[2 * rank : 2 * rank + 2]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (own, eager)]
    errors, unplanned = [], []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x, target = _batch(step, num_microbatches)
        if step == 2:
            with torch.no_grad():
                own(x)
        _step(run, x, target)
        parts = zip(x.chunk(num_microbatches), target.chunk(num_microbatches), strict=True)
        for given, wanted in parts:
            (loss_of(eager(given), wanted) / num_microbatches).backward()
        errors.append(
            {
                name: float((mine.grad - other.grad).abs().max() / other.grad.abs().max())
                for (name, mine), other in zip(
                    own.named_parameters(), theirs.parameters(), strict=True
                )
            }
        )
        for optimizer in optimizers:
            optimizer.step()
        unplanned.append(memo_compile.report().unplanned_steps)
    report = memo_compile.report()
    return {
        "errors": errors,
        "active": report.active,
        "unplanned": unplanned,
        "groups": [
            {
                "num_instances": group.num_instances,
                "arena_bytes": group.arena_bytes,
                "peak_bytes": group.peak_bytes,
                "budget_bytes": group.budget_bytes,
                "offloaded_bytes": group.offloaded_bytes,
                "host_bytes": group.host_bytes,
            }
            for group in report.groups
        ],
        "notes": list(report.notes),
    }


def _step(schedule: Any, x: torch.Tensor, target: torch.Tensor) -> None:
    is_last = dist.get_rank() == dist.get_world_size() - 1
    schedule.step(
        *((x,) if dist.get_rank() == 0 else ()), **({"target": target} if is_last else {})
    )


def _batch(step: int, num_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    both = torch.randn(2, num_microbatches * ROWS, HIDDEN, generator=generator)
    return both[0], both[1]
