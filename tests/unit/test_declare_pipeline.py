"""What ``memo_compile.pipeline`` refuses before anything is compiled."""

import pytest
from torch.distributed.pipelining import schedules

import memo_compile
from memo_compile.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("_ScheduleForwardOnly", "these are: ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B"),
        ("ScheduleDualPipeV", "cannot run a compiled stage's backward in two parts"),
        ("ScheduleInterleavedZeroBubble", "cannot run a compiled stage's backward in two parts"),
        ("ScheduleZBVZeroBubble", "cannot run a compiled stage's backward in two parts"),
    ],
)
def test_schedules_that_are_not_planned_are_refused_with_the_reason(name, reason):
    schedule = object.__new__(getattr(schedules, name))
    with pytest.raises(ConfigError, match=f"pipeline: {name}.*{reason}"):
        memo_compile.pipeline(schedule)


def test_an_option_that_cannot_be_used_is_refused():
    schedule = object.__new__(schedules.ScheduleGPipe)
    with pytest.raises(ConfigError, match="memory_budget"):
        memo_compile.pipeline(schedule, memory_budget="lots")
