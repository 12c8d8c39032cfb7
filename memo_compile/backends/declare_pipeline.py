"""``memo_compile.pipeline``: plans all microbatches of a rank's stages as one step."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from memo_compile.config import resolve
from memo_compile.driver.declared import declare_stages
from memo_compile.errors import ConfigError
from memo_compile.torch_private import pipelining

SUPPORTED = (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleLoopedBFS)


def pipeline(
    schedule: Any,
    *,
    memory_budget: int | str | None = None,
    offload: str | float | Sequence[float] = "auto",
    **options: Any,
) -> Any:
    """Compiles the rank's stages; all microbatches are planned as one step. Returns the schedule.

    ``schedule`` is a ``ScheduleGPipe``, ``Schedule1F1B``, ``ScheduleInterleaved1F1B`` or
    ``ScheduleLoopedBFS`` of torch.distributed.pipelining. Call this once, on every rank, before its
    first step. ``memory_budget`` bounds the whole step of the rank: what all microbatches of all
    its stages keep from their forwards to their backwards, in one frame and one host frame.
    ``options`` are those of ``torch.compile(..., backend="memo", options=...)``.

    With ``offload="auto"`` the plan decides what is kept, offloaded and recomputed, Kwai's amounts
    among its candidates. A number in [0, 1] is Kwai's alpha: so much of what each microbatch saves
    goes to the host and nothing is recomputed, but on the last two ranks of 1F1B, and in the last
    stage of ``ScheduleInterleaved1F1B``, whose backwards follow at once, nothing goes. A sequence
    names a number for each stage of the rank, and no exception is made.

    The first step is watched and runs in ordinary memory: it may exceed the budget, and says so.
    From the second on the order of forwards and backwards is the one that was seen; a step in
    another order runs in ordinary memory where the budget allows it, and is planned for when it
    comes again. A budget that is too small is refused when that order is known: before the second
    step, or before the third where a graph was compiled in the middle of the first.

    A stage is one graph: one that Dynamo cannot capture whole raises its error in the first step.
    ``stage.submod`` becomes what ``torch.compile(stage.submod)`` gives: names in its state_dict
    begin with ``_orig_mod.``; the module that the stage was made of keeps its own.

    Raises ConfigError: the schedule is another one, or an option is unknown or cannot be used.
    """
    if type(schedule) not in SUPPORTED:
        raise ConfigError(_refusal(schedule))
    if memory_budget is not None:
        options["memory_budget"] = memory_budget
    resolve(options, None)  # which refuses before anything is compiled
    stages = pipelining.pipeline_stages(schedule)
    shares = _shares(schedule, offload)
    count = pipelining.num_microbatches(schedule)
    if not _runs_one_by_one(schedule):
        alive = weakref.WeakSet(stages)  # the declaration, which is global, keeps no stage alive
        declare_stages(
            *(stage.submod for stage in stages),
            num_microbatches=count,
            shares=shares,
            kept=lambda: pipelining.receive_buffers(list(alive)),
        )
    elif count > 1:  # each microbatch is planned as a step, beside what others leave:
        options.setdefault("gradients", "accumulated")  # one set, which all add to
        options.setdefault("microbatches", count)  # inputs and results, which the schedule keeps
    if len(stages) > 1:  # other tiles of one stage would change the floor of all of them
        options.setdefault("token_tiles", 1)
    room = pipelining.room_for_graphs(len(stages))
    for stage in stages:
        pipelining.call_plainly(stage.submod)
        stage.submod = torch.compile(
            stage.submod,
            backend="memo",
            dynamic=False,
            fullgraph=True,
            options=dict(options),
            **room,
        )
    return schedule


def _shares(schedule: Any, offload: str | float | Sequence[float]) -> tuple[float, ...]:
    """Returns each stage's share by ``offload``; empty: the plan decides. Raises ConfigError."""
    stages = pipelining.pipeline_stages(schedule)
    if offload == "auto":
        return ()
    if isinstance(offload, float | int):
        shares = [0.0 if _follows_at_once(schedule, stage) else offload for stage in stages]
        is_right = 0 <= offload <= 1
    else:
        shares = [share for share in offload if isinstance(share, float | int) and 0 <= share <= 1]
        is_right = len(shares) == len(offload) == len(stages)
    if not is_right:
        raise ConfigError(
            f"offload: expected 'auto', a number in [0, 1], or one for each of the rank's "
            f"{len(stages)} stages, got {offload!r}"
        )
    return tuple(map(float, shares))


def _follows_at_once(schedule: Any, stage: Any) -> bool:
    """True for stages from which Kwai offloads nothing: their backwards follow at once."""
    last: dict[Any, int] = {Schedule1F1B: 2, ScheduleInterleaved1F1B: 1}
    return bool(stage.stage_index >= stage.num_stages - last.get(type(schedule), 0))


def _runs_one_by_one(schedule: Any) -> bool:
    """True where each microbatch's backward follows its forward: each is a step by itself."""
    stages = pipelining.pipeline_stages(schedule)
    if len(stages) > 1:
        return False
    is_last = type(schedule) is Schedule1F1B and stages[0].is_last
    return is_last or pipelining.num_microbatches(schedule) == 1


def _refusal(schedule: Any) -> str:
    """Says why a schedule of another class than ``SUPPORTED`` is refused."""
    name = type(schedule).__name__
    if "ZeroBubble" in name or "ZBV" in name or "DualPipe" in name:
        return (
            f"pipeline: {name} runs the gradients of inputs and of weights apart, and autograd "
            "cannot run a compiled stage's backward in two parts. Use ScheduleInterleaved1F1B"
        )
    return f"pipeline: {name} is not supported; these are: " + ", ".join(
        kind.__name__ for kind in SUPPORTED
    )
