"""memo on a CUDA device, bf16, against plain Inductor on the same device."""

import copy

import pytest
import torch

import memo_compile
from tests import models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # a GPU's machine has other versions than ours
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("builder", [models.llama, models.gemma2, models.mixtral, models.vit])
@pytest.mark.parametrize("debug", ["", "poison"])
def test_three_steps_equal_inductor(builder, debug):
    torch.manual_seed(0)
    model, inputs, loss = builder()
    model = model.to("cuda", torch.bfloat16)
    inputs = {
        key: value.cuda().bfloat16() if value.is_floating_point() else value.cuda()
        for key, value in inputs.items()
    }
    twin = copy.deepcopy(model)
    planned = torch.compile(model, backend="memo", options={"strict": True, "debug": debug})
    plain = torch.compile(twin, backend="inductor")
    optimizers = [torch.optim.SGD(trained.parameters(), lr=1e-2) for trained in (model, twin)]
    for _ in range(3):
        for optimizer, compiled in zip(optimizers, (planned, plain), strict=True):
            optimizer.zero_grad()
            loss(compiled, **inputs).backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=2e-2, atol=2e-3)
        for optimizer in optimizers:
            optimizer.step()
    report = memo_compile.report()
    assert report.active
    assert report.unplanned_steps == 0
    assert all(plan.check.ok for plan in report.plans)


def test_measured_peak_is_within_the_plan():
    torch.manual_seed(0)
    model, inputs, loss = models.llama(num_layers=4, seq=64)
    model = model.cuda()
    inputs = {key: value.cuda() for key, value in inputs.items()}
    planned = torch.compile(model, backend="memo", options={"strict": True})
    for _ in range(2):
        loss(planned, **inputs).backward()
        model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    loss(planned, **inputs).backward()
    plan = memo_compile.report().plans[-1]
    library_workspaces = 64 * 2**20  # cuBLAS's own, per handle; outside of any plan
    measured = torch.cuda.max_memory_allocated() - library_workspaces
    assert measured <= plan.peak_bytes - plan.fixed.optimizer_state
