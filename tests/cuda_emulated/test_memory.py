"""Planned bytes against those that torch's own allocator counts, on a device of known size."""

import gc

import pytest
import torch

import memo_compile
from memo_compile.lowering.cublas import LT_KIB, workspaces_bytes
from memo_compile.training_state import sizes
from tests import models
from tests.cuda_emulated.device_calls import counts, pinned_bytes
from tests.cuda_emulated.training_scenarios import small_chunks

POLICIES = ("auto", "save", "full-recompute", "full-offload", "memo", "greedy")
BUILDERS = (models.llama, models.gpt2, models.t5, models.qwen3_moe)
MOST_APART = 0.005
"""Of what a step's peak holds beside the libraries' memory."""


class Training:
    """A model on the device, in bfloat16, and steps of it, with ``update`` of its optimizer."""

    def __init__(self, builder, update=None, **options) -> None:
        torch._dynamo.reset()
        gc.collect()  # plans of earlier models hold frames
        torch.manual_seed(0)
        torch.cuda.synchronize()
        self.foreign_bytes = torch.cuda.memory_allocated()
        self.libraries_bytes = workspaces_bytes(torch.cuda.get_device_capability()[0])
        self.model, inputs, self.loss = builder(seq=64)
        self.model.to("cuda", torch.bfloat16)
        self.inputs = {key: value.cuda() for key, value in inputs.items()}
        self.optimizer = None
        if update is not None:
            adamw = torch.optim.AdamW(self.model.parameters())
            self.optimizer = memo_compile.offload(adamw, update=update)
        # Kernels compute nothing here, so that no tile is believed.
        fixed = {"strict": True, "optimizer_state_bytes_per_parameter": 0, "token_tiles": 1}
        self.planned = torch.compile(self.model, backend="memo", options=fixed | options)

    def step(self) -> int:
        """The step's peak: what this model and memo hold, without cuBLAS's workspaces."""
        self.model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.loss(self.planned, **self.inputs).backward()
        if self.optimizer is not None:
            self.optimizer.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - self.foreign_bytes


@pytest.fixture(scope="module", autouse=True)
def workspaces():
    """cuBLAS's and cublasLt's, for each thread that multiplies; they stay, and count apart."""
    weight = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    _MultipliesInBoth.apply(weight).sum().backward()


class _MultipliesInBoth(torch.autograd.Function):
    """A product with a bias, which is cublasLt's, in the forward's thread and in autograd's."""

    @staticmethod
    def forward(ctx, weight):
        ctx.save_for_backward(weight)
        return torch.addmm(weight[0], weight, weight)

    @staticmethod
    def backward(ctx, gradient):
        (weight,) = ctx.saved_tensors
        return torch.addmm(weight[0], gradient.contiguous(), weight)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("builder", BUILDERS, ids=lambda builder: builder.__name__)
def test_every_policy_trains_in_the_memory_that_was_planned(builder, policy):
    require_as_planned(builder, "aten", policy)


def require_as_planned(builder, lowering, policy):
    training = Training(builder, lowering=lowering, policy=policy)
    training.step()
    before = counts().host_copies
    peak = training.step()
    copies = counts().host_copies - before
    report = memo_compile.report()
    assert report.active, (policy, report.notes)
    assert report.unplanned_steps == 0
    plan = report.plans[-1]
    assert plan.check.ok
    planned = plan.peak_bytes - plan.fixed.libraries
    assert abs(peak - planned) <= MOST_APART * planned, (policy, peak, planned)
    assert (copies > 0) == (plan.offloaded_bytes > 0), policy  # each holds up the host
    assert pinned_bytes() >= plan.host_bytes, policy


@pytest.mark.parametrize(
    ("update", "weights"), [("device", "device"), ("host", "device"), ("host", "host")]
)
@pytest.mark.parametrize("least_chunk", [4096, sizes.LEAST_CHUNK_BYTES])
def test_training_state_takes_the_memory_that_was_planned(update, weights, least_chunk):
    """Gradients and the update are a part of the step. With small chunks, which borrow little,
    no less is taken than is planned; of others each optimizer makes as many tensors as it likes."""
    with small_chunks(least_chunk):
        training = Training(models.llama, update, lowering="aten", weights=weights)
        before = pinned_bytes()
        peaks = [training.step() for _ in range(3)]
        parameters_bytes = sum(each.nbytes for each in training.model.parameters())
        assert pinned_bytes() - before >= 2 * parameters_bytes
    (plan,) = memo_compile.report().plans[-1:]
    assert plan.check.ok
    assert plan.fixed.state_on_host == 2 * parameters_bytes
    assert (plan.fixed.parameters_on_host > 0) == (weights == "host")
    planned = plan.peak_bytes - plan.fixed.libraries
    if weights == "host":
        del peaks[0]  # in which the speed of copies was measured, with 64 MiB
    assert max(peaks) <= (1 + MOST_APART) * planned, (peaks, planned, plan.fixed)
    if least_chunk == 4096:
        assert min(peaks) >= (1 - MOST_APART) * planned, (peaks, planned, plan.fixed)


def test_cublas_keeps_what_is_counted_for_it(workspaces):
    training = Training(models.gpt2, lowering="aten")
    training.step()
    (plan,) = memo_compile.report().plans[-1:]
    torch._C._cuda_clearCublasWorkspaces()
    without = torch.cuda.memory_allocated()
    training.step()
    kept = torch.cuda.memory_allocated() - without
    # No product of the backward adds a bias, so that its handle has no workspace of cublasLt's.
    assert kept == plan.fixed.libraries - LT_KIB * 1024


def test_pinned_memory_that_is_refused_is_replaced_by_pageable(monkeypatch):
    monkeypatch.setenv("EMULATED_NO_PIN", "1")
    before = pinned_bytes()
    training = Training(models.llama, lowering="aten", policy="full-offload")
    training.step()
    training.step()
    plan = memo_compile.report().plans[-1]
    assert plan.offloaded_bytes > 0
    assert pinned_bytes() - before < plan.host_bytes  # torch pins a few bytes
