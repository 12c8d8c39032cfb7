"""Memory that the device refuses: for the arena, and at every allocation of a step."""

import gc
import itertools
import re
import time

import pytest
import torch
from memo_runtime.arena import ArenaError
from memo_runtime.host_store import HostStoreError
from memo_runtime.run_step import StepPlan

import memo_compile
from memo_compile.driver.facts import GraphFacts
from memo_compile.reporting import state
from tests import models
from tests.cuda_emulated.computing import CUDA, Computing, leased, quick_collections, rows_of
from tests.cuda_emulated.device_calls import counts, grant, limit_device, pinned_bytes, refuse
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


@pytest.fixture
def uncached():
    """Each tensor's memory is asked of the device."""
    torch.cuda.synchronize()
    torch.cuda.memory.caching_allocator_enable(False)
    with quick_collections():
        yield
    grant()
    gc.collect()
    torch.cuda.memory.caching_allocator_enable(True)
    torch._dynamo.reset()
    state.reset()  # it counts forwards in ordinary memory


def held_bytes(steps: Computing) -> tuple[int, int]:
    """Of the device, and pinned, between two steps."""
    steps.ours.zero_grad(set_to_none=True)
    gc.collect()
    return counts().used_bytes, pinned_bytes()


def comes_back_to(before: tuple[int, int], steps: Computing) -> bool:
    """Autograd's thread lets go of a step that failed a little after its caller knows."""
    for _ in range(100):
        if held_bytes(steps) == before:
            return True
        time.sleep(0.02)
    return False


def test_every_request_of_a_step_that_is_refused_is_raised_and_the_next_step_is_whole(uncached):
    """Results, gradients, work space; and the frames of a forward beyond ``max_inflight``.

    Every second time all later requests are refused too.
    """
    torch._dynamo.reset()
    steps = Computing()
    steps.begin()
    x = rows_of(1).to(CUDA)

    def two_forwards() -> None:
        (steps.compiled(x) + steps.compiled(x)).backward()

    two_forwards()
    before, raised = held_bytes(steps), []
    for first in itertools.count():
        refuse(first, -1 if first % 2 else 1)
        said = ""
        try:
            two_forwards()
        except (RuntimeError, MemoryError) as error:
            said = f"{type(error).__name__}: {error}"
        assert (grant() > first) == bool(said), said
        if not said:
            break
        raised.append(said)
        assert comes_back_to(before, steps), said
        assert leased() == 0
        unplanned = memo_compile.report().unplanned_steps
        steps.assert_step(2 + first)
        assert memo_compile.report().unplanned_steps == unplanned
    own = (
        rf"^{ArenaError.__name__}: .*Lower memory_budget",
        rf"^{HostStoreError.__name__}: .*ulimit -l.*lower host_budget",
        r"^[a-zA-Z]+Error: .*out of memory",
    )
    found = [next(at for at, text in enumerate(own) if re.search(text, said)) for said in raised]
    assert found.count(0) == found.count(1) == 1
    assert found.count(2) > 20
