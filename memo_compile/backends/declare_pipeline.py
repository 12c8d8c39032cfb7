"""``memo_compile.pipeline``: a pipeline's stage, all of whose microbatches are planned together."""

from typing import Any

import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from memo_compile import shim_pipelining
from memo_compile.config import resolve
from memo_compile.driver.declared import declare_stage
from memo_compile.errors import ConfigError


def pipeline(schedule: Any, *, memory_budget: int | str | None = None, **options: Any) -> Any:
    """Compile the rank's stage; its microbatches are planned as one step. Returns the schedule.

    ``schedule`` is a ``ScheduleGPipe`` or ``Schedule1F1B`` of torch.distributed.pipelining. Call
    this once, on every rank, before its first step. ``memory_budget`` bounds the whole step of the
    rank: what all microbatches keep from their forwards to their backwards, in one frame and one
    host frame. ``options`` are those of ``torch.compile(..., backend="memo", options=...)``.

    The first step is watched and runs in ordinary memory: it may exceed the budget, and says so.
    From the second on the order of forwards and backwards is the one that was seen; a step in
    another order runs in ordinary memory where the budget allows it, and is planned for when it
    comes again.

    A stage is one graph: one that Dynamo cannot capture whole raises its error in the first step.

    Raises ConfigError: the schedule is another one, or an option is unknown or cannot be used.
    """
    if type(schedule) not in (ScheduleGPipe, Schedule1F1B):
        raise ConfigError(_refusal(schedule))
    if memory_budget is not None:
        options["memory_budget"] = memory_budget
    resolve(options, None)  # which refuses before anything is compiled
    stage = shim_pipelining.pipeline_stage(schedule)
    declare_stage(stage.submod)
    stage.submod = torch.compile(
        stage.submod, backend="memo", dynamic=False, fullgraph=True, options=dict(options)
    )
    return schedule


def _refusal(schedule: Any) -> str:
    name = type(schedule).__name__
    if "ZeroBubble" in name or "ZBV" in name or "DualPipe" in name:
        return (
            f"pipeline: {name} runs the gradients of inputs and of weights apart, and autograd "
            "cannot run a compiled stage's backward in two parts. Use ScheduleGPipe or Schedule1F1B"
        )
    return (
        f"pipeline: {name} is not supported: one stage per rank is planned, in the order of "
        "ScheduleGPipe or Schedule1F1B"
    )
