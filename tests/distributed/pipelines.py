"""Stages of torch.distributed.pipelining under memo, beside the whole model in one process."""

import copy
import gc
from typing import Any

import torch
import torch.distributed as dist
from memo_runtime.arena import arena_of
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    SplitPoint,
)
from torch.distributed.pipelining import pipeline as traced_pipeline

import memo_compile
from memo_compile.backends.entry import large_blocks_leave_the_heap
from memo_compile.costs.measure import watch_memory
from memo_compile.pipelines.split_result import PipelineSplit
from memo_compile.reporting import state
from memo_compile.step.serialise import plain
from memo_compile.torch_private.pipelining import pipeline_stages, receive_buffers
from tests.numerics.small import Block

HIDDEN, ROWS, STEPS = 32, 64, 4
SINGLE = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
LOOPED = {"interleaved": ScheduleInterleaved1F1B, "bfs": ScheduleLoopedBFS}
HEAVY = 8
"""So many times as wide as its input is the last layer of a model that is split by its costs."""

CHUNKS = 2
"""Stages of each rank in a looped schedule."""


def main(*, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each setting's training gives, one after the other in the same processes."""
    return [trained(**setting) for setting in settings]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).pow(2).mean()


class BrokenError(Exception):
    """What a stage raises."""


class Breaking(nn.Module):
    """A stage that raises in the forward number ``left``, if that is not None."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage
        self.left: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise BrokenError
        return self.stage(x)


class Pipeline:
    """A rank's stages under memo, and the whole model in eager."""

    def __init__(
        self,
        schedule: str,
        num_microbatches: int,
        hidden: int,
        options: dict[str, Any],
        traced_rows: int = 0,
        is_split: bool = False,
    ) -> None:
        torch._dynamo.reset()
        state.reset()
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.eager = nn.Sequential(*(Block(hidden) for _ in range(CHUNKS * num_ranks)))
        is_looped = schedule in LOOPED
        num_stages = num_ranks * (CHUNKS if is_looped else 1)
        chosen = {"lowering": "aten", "strict": True, "costs": "roofline", **options}
        per_stage = len(self.eager) // num_stages
        borders = list(range(0, len(self.eager) + 1, per_stage))
        self.split: PipelineSplit | None = None
        if is_split:
            self.eager.append(Block(hidden, HEAVY))
            example = torch.randn(traced_rows, hidden)
            budget = chosen.get("memory_budget")
            self.split = memo_compile.pipeline_split(
                self.eager,
                num_stages,
                (example,),
                num_microbatches=num_microbatches,
                schedule=schedule,
                num_ranks=num_ranks,
                loss_fn=loss_of,
                mb_target=example,
                **{**chosen, "memory_budget": max(budget) if isinstance(budget, list) else budget},
            )
            borders = [0, *map(int, self.split.split_points), len(self.eager)]
        self.theirs = [
            self.eager[borders[stage] : borders[stage + 1]]
            for stage in range(rank, num_stages, num_ranks)
        ]
        self.own = [copy.deepcopy(part) for part in self.theirs]
        stages = [
            PipelineStage(part, rank + num_ranks * at, num_stages, torch.device("cpu"))
            for at, part in enumerate(self.own)
        ]
        if traced_rows:
            points = [str(at) for at in borders[1:-1]]
            stages = self._traced(points, torch.randn(traced_rows, hidden))
        kind = {**SINGLE, **LOOPED}[schedule]
        made = kind(stages if is_looped else stages[0], num_microbatches, loss_fn=loss_of)
        if isinstance(budgets := chosen.get("memory_budget"), list):
            chosen["memory_budget"] = budgets[rank]
        self.run = memo_compile.pipeline(made, **chosen)

    def break_step(self, x: torch.Tensor, target: torch.Tensor, microbatch: int) -> None:
        """A step of one stage a rank under 1F1B, in which the last raises in ``microbatch``.

        Each rank before it raises one later, where nobody waits for what it did not send.
        """
        (stage,) = pipeline_stages(self.run)
        whole, stage.submod = stage.submod, Breaking(stage.submod)
        stage.submod.left = microbatch + dist.get_world_size() - 1 - dist.get_rank()
        error: BaseException | None = None
        try:
            _step(self.run, x, target)
        except RuntimeError as raised:
            error = raised.__cause__
        assert isinstance(error, BrokenError), error
        stage.submod = whole
        self.run._internal_losses.clear()  # torch keeps those of the broken step

    def _traced(self, points: list[str], example: torch.Tensor) -> list[Any]:
        """Stages as torch's tracing front end makes them: exported graphs, split at blocks."""
        spec = dict.fromkeys(points, SplitPoint.BEGINNING)
        pipe = traced_pipeline(copy.deepcopy(self.eager), mb_args=(example,), split_spec=spec)
        numbers = range(dist.get_rank(), len(points) + 1, dist.get_world_size())
        self.own = [pipe.get_stage_module(number) for number in numbers]
        return [pipe.build_stage(number, torch.device("cpu")) for number in numbers]

    def errors(self) -> dict[str, float]:
        """Per parameter how far its gradient is from eager's, as a share of the largest."""
        pairs = zip(self.own, self.theirs, strict=True)
        return {
            f"{at}.{name}": float((mine.grad - other.grad).abs().max() / other.grad.abs().max())
            for at, (own, theirs) in enumerate(pairs)
            for (name, mine), other in zip(own.named_parameters(), theirs.parameters(), strict=True)
        }


def trained(
    *,
    schedule: str,
    num_microbatches: int = 4,
    rows: int = ROWS,
    hidden: int = HIDDEN,
    options: dict[str, Any] | None = None,
    is_traced: bool = False,
    is_split: bool = False,
    breaks_in: int | None = None,
) -> dict[str, Any]:
    """Some steps of both, with an optimizer; the errors after each.

    Between the second step and the third the stages are evaluated, and microbatch ``breaks_in``, if
    any, raises in a step that nobody compares. ``peaks`` are bytes from the second step on:
    parameters, the batch, where other ranks send to, and what came on top. ``options`` may have a
    memory_budget for each rank.
    """
    large_blocks_leave_the_heap()
    traced_rows = rows if is_traced else 0
    both = Pipeline(schedule, num_microbatches, hidden, options or {}, traced_rows, is_split)
    parameters = [own for part in both.own for own in part.parameters()]
    optimizers = [torch.optim.SGD(found, lr=0.1) for found in (parameters, both.eager.parameters())]
    errors, unplanned, peaks = [], [], []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x, target = _batch(step, num_microbatches * rows, hidden)
        if step == 2:
            with torch.no_grad():
                [part(x) for part in both.own]
        if step == 2 and breaks_in is not None:
            both.break_step(x, target, breaks_in)
            for optimizer in optimizers:
                optimizer.zero_grad()
        gc.collect()
        arena_of(torch.device("cpu")).release_pages()  # what is there before does not count
        with watch_memory() as memory:
            _step(both.run, x, target)
        given = [x] if dist.get_rank() == 0 else []
        held = [own.untyped_storage() for own in (*parameters, *given)]
        received = receive_buffers(pipeline_stages(both.run))
        peaks.append(memory.growth_bytes + sum(own.nbytes() for own in (*held, *received)))
        parts = zip(x.chunk(num_microbatches), target.chunk(num_microbatches), strict=True)
        for given, wanted in parts:
            (loss_of(both.eager(given), wanted) / num_microbatches).backward()
        errors.append(both.errors())
        for optimizer in optimizers:
            optimizer.step()
        unplanned.append(memo_compile.report().unplanned_steps)
    report = memo_compile.report()
    return {
        "errors": errors,
        "active": report.active,
        "unplanned": unplanned,
        "peaks": peaks[1:],
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
        "split": both.split and plain(both.split),
        "planned_bytes": [plan.peak_bytes for plan in report.plans],
    }


def _step(schedule: Any, x: torch.Tensor, target: torch.Tensor) -> None:
    is_last = dist.get_rank() == dist.get_world_size() - 1
    schedule.step(
        *((x,) if dist.get_rank() == 0 else ()), **({"target": target} if is_last else {})
    )


def _batch(step: int, rows: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    both = torch.randn(2, rows, hidden, generator=generator)
    return both[0].clone(), both[1].clone()
