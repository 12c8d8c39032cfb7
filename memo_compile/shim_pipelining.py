"""What memo needs of ``torch.distributed.pipelining`` that has no public name."""

from typing import Any


def pipeline_stages(schedule: Any) -> tuple[Any, ...]:
    """The stages that a schedule runs on this rank, in the order of the model.

    Private in 2.13.0 (``schedules.PipelineScheduleSingle._stage``,
    ``schedules.PipelineScheduleMulti._stages``).
    """
    single = getattr(schedule, "_stage", None)
    return tuple(schedule._stages) if single is None else (single,)


def num_microbatches(schedule: Any) -> int:
    """How many microbatches a step has. Private in 2.13.0 (``schedules._PipelineSchedule``)."""
    return int(schedule._n_microbatches)
