"""Planned bytes against those that torch's own allocator counts, on a device of known size."""

import pytest
import torch

import memo_compile
from memo_compile.errors import Infeasible
from tests import models
from tests.cuda_emulated.device_calls import counts, pinned_bytes

POLICIES = ("save", "full-recompute", "full-offload", "memo", "greedy")
MODELS = (models.llama, models.gpt2, models.qwen3_moe, models.t5)
MOST_APART = 0.005
"""Of what a step's peak holds beside cuBLAS's workspaces."""


def case(builder):
    """The model on the device in bfloat16, and a function from options to a training step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs, loss = builder(seq=64)
    model = model.to("cuda", torch.bfloat16)
    inputs = {key: value.cuda() for key, value in inputs.items()}

    def compiled(**options):
        options = {"strict": True, "optimizer_state_bytes_per_parameter": 0, **options}
        planned = torch.compile(model, backend="memo", options=options)

        def step() -> int:
            """The peak in bytes."""
            model.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            loss(planned, **inputs).backward()
            return torch.cuda.max_memory_allocated()

        return step

    return compiled


def is_near(measured: int, plan) -> bool:
    libraries = plan.fixed.libraries
    planned = plan.peak_bytes - libraries
    return abs(measured - libraries - planned) <= MOST_APART * planned


@pytest.mark.parametrize("builder", MODELS, ids=lambda builder: builder.__name__)
def test_every_policy_trains_in_the_memory_that_was_planned(builder):
    compiled = case(builder)
    for policy in POLICIES:
        torch._dynamo.reset()
        step = compiled(policy=policy)
        step()
        before = counts()
        peaks = [step(), step()]
        copies = counts().host_copies - before.host_copies
        torch.cuda.synchronize()
        report = memo_compile.report()
        assert report.active, (policy, report.notes)
        assert report.unplanned_steps == 0
        plan = report.plans[-1]
        assert plan.check.ok
        assert all(is_near(peak, plan) for peak in peaks), (policy, peaks, plan)
        assert (copies > 0) == (plan.offloaded_bytes > 0), policy
        assert pinned_bytes() >= plan.host_bytes


def test_no_step_exceeds_its_budget_not_even_the_first():
    compiled = case(models.llama)
    with pytest.raises(Infeasible) as refused:
        compiled(memory_budget=1)()
    floor = refused.value.floor_bytes
    torch._dynamo.reset()
    step = compiled(memory_budget=floor)
    assert max(step(), step()) <= floor
    assert is_near(step(), memo_compile.report().plans[-1])
