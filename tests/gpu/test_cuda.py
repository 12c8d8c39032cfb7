"""memo on a CUDA device beside plain Inductor on the same device."""

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


DTYPES = {
    models.llama: torch.bfloat16,
    models.gemma2: torch.bfloat16,
    models.mixtral: torch.float32,  # rounded to bf16, a router chooses other experts
    models.vit: torch.bfloat16,
}


@pytest.mark.parametrize("builder", DTYPES)
@pytest.mark.parametrize("debug", ["", "poison"])
def test_three_steps_are_as_near_the_exact_ones_as_inductors(builder, debug):
    """Exact: eager in float64, from the same weights at each step.

    Two sums in bf16 differ by what each of them is off, so neither is the other's measure.
    """
    torch.manual_seed(0)
    dtype = DTYPES[builder]
    model, inputs, loss = builder()
    model = model.to("cuda", dtype)
    inputs = on_device(inputs, dtype)
    exact_inputs = on_device(inputs, torch.float64)
    twin = copy.deepcopy(model)
    planned = torch.compile(model, backend="memo", options={"strict": True, "debug": debug})
    plain = torch.compile(twin, backend="inductor")
    optimizers = [torch.optim.SGD(trained.parameters(), lr=1e-2) for trained in (model, twin)]
    for _ in range(3):
        errors = []
        for trained, optimizer, compiled in zip(
            (model, twin), optimizers, (planned, plain), strict=True
        ):
            optimizer.zero_grad()
            loss(compiled, **inputs).backward()
            errors.append(largest_error(trained, loss, exact_inputs))
            optimizer.step()
        ours, theirs = errors
        assert ours <= 2 * theirs + torch.finfo(dtype).eps
    report = memo_compile.report()
    assert report.active
    assert report.unplanned_steps == 0
    assert all(plan.check.ok for plan in report.plans)


def on_device(inputs, dtype):
    return {
        key: value.to("cuda", dtype) if value.is_floating_point() else value.cuda()
        for key, value in inputs.items()
    }


def largest_error(trained, loss, exact_inputs) -> float:
    """Of the gradients: the norm of what each is off, in parts of its own norm.

    A gradient that should vanish (a key's bias) is measured by a hundredth of the largest.
    """
    exact = copy.deepcopy(trained).to(torch.float64)
    exact.zero_grad(set_to_none=True)
    loss(exact, **exact_inputs).backward()
    pairs = [
        (found.grad.double(), wanted.grad)
        for found, wanted in zip(trained.parameters(), exact.parameters(), strict=True)
        if wanted.grad is not None
    ]
    least = 1e-2 * max(wanted.norm() for _, wanted in pairs)
    errors = [(found - wanted).norm() / max(wanted.norm(), least) for found, wanted in pairs]
    return float(max(errors))


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
