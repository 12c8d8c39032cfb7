"""What memo needs of ``torch.distributed.pipelining`` that has no public name."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx


def pipeline_stages(schedule: Any) -> tuple[Any, ...]:
    """Returns the stages that a schedule runs on this rank, in the order of the model.

    Private in 2.13.0 (``schedules.PipelineScheduleSingle._stage``,
    ``schedules.PipelineScheduleMulti._stages``).
    """
    single = getattr(schedule, "_stage", None)
    return tuple(schedule._stages) if single is None else (single,)


def num_microbatches(schedule: Any) -> int:
    """How many microbatches a step has. Private in 2.13.0 (``schedules._PipelineSchedule``)."""
    return int(schedule._n_microbatches)


def room_for_graphs(num_stages: int) -> dict[str, Any]:
    """Returns options of torch.compile by which each stage may have as many graphs as one alone.

    Stages of one class share Dynamo's limit, and beyond it ``fullgraph`` is an error: three stages,
    two batch sizes and an evaluation are nine graphs. Empty where torch.compile (2.11) has no such
    parameter.
    """
    if "recompile_limit" not in inspect.signature(torch.compile).parameters:
        return {}
    return {"recompile_limit": num_stages * torch._dynamo.config.recompile_limit}


def call_plainly(module: torch.nn.Module) -> None:
    """Makes errors of ``module`` come out of it unchanged.

    An exported stage is a ``GraphModule``, each of a class of its own, whose ``__call__`` looks at
    the frames of an error to print the line of its code. Where whole graphs are asked for, Dynamo
    raises that it cannot compile that search, in place of the error (2.13.0).
    """
    if isinstance(module, fx.GraphModule):
        type(module).__call__ = torch.nn.Module.__call__  # type: ignore[method-assign]


def receive_buffers(stages: Iterable[Any]) -> tuple[torch.UntypedStorage, ...]:
    """Returns the memory that inputs and gradients of microbatches are received in.

    It stays from step to step. Private in 2.13.0 (``stage._RecvInfo.buffer``); none where torch
    keeps it elsewhere.
    """
    infos = [
        info
        for stage in stages
        for name in ("args_recv_info", "grad_recv_info")
        for of_microbatch in getattr(stage, name, {}).values()
        for info in of_microbatch
    ]
    buffers = (getattr(info, "buffer", None) for info in infos)
    storages = (each.untyped_storage() for each in buffers if isinstance(each, torch.Tensor))
    return tuple({storage._cdata: storage for storage in storages}.values())
