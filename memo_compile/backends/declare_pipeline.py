"""``memo_compile.pipeline``: a rank's stages, all of whose microbatches are planned together."""

from typing import Any

import torch
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from memo_compile import shim_pipelining
from memo_compile.config import resolve
from memo_compile.driver.declared import declare_stages
from memo_compile.errors import ConfigError

SUPPORTED = (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleLoopedBFS)


def pipeline(schedule: Any, *, memory_budget: int | str | None = None, **options: Any) -> Any:
    """Compile the rank's stages; all microbatches are planned as one step. Returns the schedule.

    ``schedule`` is a ``ScheduleGPipe``, ``Schedule1F1B``, ``ScheduleInterleaved1F1B`` or
    ``ScheduleLoopedBFS`` of torch.distributed.pipelining. Call this once, on every rank, before its
    first step. ``memory_budget`` bounds the whole step of the rank: what all microbatches of all
    its stages keep from their forwards to their backwards, in one frame and one host frame.
    ``options`` are those of ``torch.compile(..., backend="memo", options=...)``.

    The first step is watched and runs in ordinary memory: it may exceed the budget, and says so.
    From the second on the order of forwards and backwards is the one that was seen; a step in
    another order runs in ordinary memory where the budget allows it, and is planned for when it
    comes again. A budget that is too small is refused when that order is known: before the second
    step, or before the third where a graph was compiled in the middle of the first.

    A stage is one graph: one that Dynamo cannot capture whole raises its error in the first step.

    Raises ConfigError: the schedule is another one, or an option is unknown or cannot be used.
    """
    if type(schedule) not in SUPPORTED:
        raise ConfigError(_refusal(schedule))
    if memory_budget is not None:
        options["memory_budget"] = memory_budget
    resolve(options, None)  # which refuses before anything is compiled
    stages = shim_pipelining.pipeline_stages(schedule)
    count = shim_pipelining.num_microbatches(schedule)
    if not _runs_one_by_one(schedule):
        declare_stages(*(stage.submod for stage in stages), num_microbatches=count)
    elif count > 1:
        options.setdefault("gradients", "accumulated")
    for stage in stages:
        stage.submod = torch.compile(
            stage.submod, backend="memo", dynamic=False, fullgraph=True, options=dict(options)
        )
    return schedule


def _runs_one_by_one(schedule: Any) -> bool:
    """True where each microbatch's backward follows its forward: each is a step by itself."""
    stages = shim_pipelining.pipeline_stages(schedule)
    if len(stages) > 1:
        return False
    is_last = type(schedule) is Schedule1F1B and stages[0].is_last
    return is_last or shim_pipelining.num_microbatches(schedule) == 1


def _refusal(schedule: Any) -> str:
    name = type(schedule).__name__
    if "ZeroBubble" in name or "ZBV" in name or "DualPipe" in name:
        return (
            f"pipeline: {name} runs the gradients of inputs and of weights apart, and autograd "
            "cannot run a compiled stage's backward in two parts. Use ScheduleInterleaved1F1B"
        )
    return f"pipeline: {name} is not supported; these are: " + ", ".join(
        kind.__name__ for kind in SUPPORTED
    )
