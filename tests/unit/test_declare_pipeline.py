"""What ``memo_compile.pipeline`` refuses before anything is compiled, and how it compiles."""

import inspect
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules

import memo_compile
from memo_compile.errors import ConfigError
from memo_compile.torch_private import pipelining


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


@pytest.mark.parametrize("offload", [1.5, -0.1, "all", (0.5,), (0.5, 2.0), (0.5, "x")])
def test_an_amount_that_cannot_be_is_refused(offload):
    schedule = object.__new__(schedules.ScheduleInterleaved1F1B)
    schedule._stages = [SimpleNamespace(stage_index=at, num_stages=8) for at in (3, 7)]
    with pytest.raises(ConfigError, match=r"offload: expected 'auto', .* rank's 2 stages"):
        memo_compile.pipeline(schedule, offload=offload)


def test_an_option_that_cannot_be_used_is_refused():
    schedule = object.__new__(schedules.ScheduleGPipe)
    with pytest.raises(ConfigError, match="memory_budget"):
        memo_compile.pipeline(schedule, memory_budget="lots")


@dataclass(eq=False)
class Stage:
    """What ``pipeline`` needs of a stage."""

    stage_index: int
    submod: nn.Module
    num_stages: int = 3


@pytest.mark.skipif(
    "recompile_limit" not in inspect.signature(torch.compile).parameters,
    reason="torch.compile takes no limit of its own",
)
def test_three_stages_of_one_class_in_three_batch_sizes():
    """Nine graphs of one code object: Dynamo's limit, an error under fullgraph, is eight."""
    torch._dynamo.reset()
    kinds = (nn.Tanh, nn.Sigmoid, nn.ReLU)  # other kinds, so that no graph serves two stages
    own = [nn.Sequential(nn.Linear(4, 4), kind()) for kind in kinds]
    schedule = object.__new__(schedules.ScheduleInterleaved1F1B)
    schedule._stages = [Stage(at, part) for at, part in enumerate(own)]
    schedule._n_microbatches = 2
    memo_compile.pipeline(schedule, lowering="aten", strict=True, costs="roofline")
    for rows in (2, 3, 5):
        for stage, part in zip(schedule._stages, own, strict=True):
            x = torch.randn(rows, 4)
            found = torch.autograd.grad(stage.submod(x).sum(), list(part.parameters()))
            wanted = torch.autograd.grad(part(x).sum(), list(part.parameters()))
            torch.testing.assert_close(found, wanted)


def test_what_an_exported_stage_raises_comes_out_of_it() -> None:
    def refusing(gm: object, examples: object) -> object:
        def run(*args: object) -> None:
            raise KeyError("its own")

        return run

    stage = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    pipelining.call_plainly(stage)
    with pytest.raises(KeyError, match="its own"):
        torch.compile(stage, backend=refusing, fullgraph=True)(torch.ones(1, 2))
