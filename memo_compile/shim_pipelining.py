"""What memo needs of ``torch.distributed.pipelining`` that has no public name."""

from typing import Any


def pipeline_stage(schedule: Any) -> Any:
    """The stage of a schedule that has one stage per rank.

    Private in 2.13.0 (``schedules.PipelineScheduleSingle._stage``).
    """
    return schedule._stage
