"""Memory that the device refuses: for the arena, and at any allocation of a step."""

import gc

import pytest
import torch
from memo_runtime.run_step import StepPlan

import memo_compile
from memo_compile.driver.facts import GraphFacts
from tests import models
from tests.cuda_emulated.device_calls import counts, limit_device
from tests.cuda_emulated.test_memory import Training, workspaces

__all__ = ["workspaces"]  # a fixture

CONTEXT_BYTES = 600 << 20
"""What ``device/device.h`` keeps for itself."""
GRANULE_BYTES = 2 << 20
"""The device gives memory in pieces of this size."""
TOKENS = 2048
"""Enough for an arena above 10 MiB: for less torch's allocator asks for 20 MiB at once."""


@pytest.fixture(autouse=True)
def _whole_device():
    yield
    limit_device(0)


def leave(num_bytes: int) -> None:
    """So much is free on the device, and nothing in torch's cache."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    limit_device(counts().used_bytes + CONTEXT_BYTES + num_bytes)


def long_llama(seq: int):
    return models.llama(seq=TOKENS)


def launches_of(training: Training) -> int:
    before = counts()
    training.step()
    after = counts()
    return after.launches - before.launches + after.triton_launches - before.triton_launches


def test_an_arena_that_is_refused_is_planned_smaller(monkeypatch, caplog):
    monkeypatch.setattr(GraphFacts, "bytes_left", lambda facts: None)  # another process takes it
    training = Training(long_llama, lowering="aten")
    training.step()
    (whole,) = memo_compile.report().plans[-1:]
    assert whole.arena_bytes > 4 * GRANULE_BYTES
    del training
    training, reserve = Training(long_llama, lowering="aten"), StepPlan.reserve

    def reserve_and_lift(plan: StepPlan) -> None:
        reserve(plan)
        limit_device(0)

    monkeypatch.setattr(StepPlan, "reserve", reserve_and_lift)
    leave(int(0.8 * whole.arena_bytes))
    training.step()
    training.step()
    assert "Planned again: arena" in caplog.text
    report = memo_compile.report()
    assert report.active
    assert report.unplanned_steps == 0
    (plan,) = report.plans[-1:]
    assert plan.check.ok
    assert plan.arena_bytes <= 0.8 * whole.arena_bytes


@pytest.mark.parametrize("policy", ["save", "full-offload", "full-recompute"])
def test_memory_that_runs_out_in_a_step_is_said_and_the_next_step_is_whole(policy):
    training = Training(long_llama, lowering="aten", policy=policy)
    training.step()
    normal = launches_of(training)
    refused = 0
    for pieces in range(64):
        training.model.zero_grad(set_to_none=True)
        leave(pieces * GRANULE_BYTES)
        try:
            training.step()
        except torch.OutOfMemoryError:
            refused += 1
        else:
            break
        finally:
            limit_device(0)
        assert launches_of(training) == normal
    assert refused > 0
    assert memo_compile.report().active
    assert memo_compile.report().unplanned_steps == 0
