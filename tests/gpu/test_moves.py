"""Steps that move bytes on a CUDA device: streams, events, pinned memory."""

import pytest
import torch
from memo_runtime.arena import arena_of
from memo_runtime.host_store import HostStore

from tests.steps.moving import (
    SCHEDULES,
    backward,
    forward,
    is_right,
    nothing_is_held,
    step,
    values,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # a GPU's machine has other versions than ours
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")


@pytest.mark.parametrize("host_store", ["pinned", "shm"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_went_to_the_host_comes_back(schedule, host_store):
    plan = step(device=CUDA, schedule=schedule, host_store=host_store, poison=True)
    for seed in range(3):
        assert is_right(plan, seed)
    assert nothing_is_held(plan)


def test_a_step_on_a_stream_of_the_user_is_right():
    plan = step(device=CUDA, host_store="pinned")
    with torch.cuda.stream(torch.cuda.Stream()):
        assert is_right(plan)


def test_the_stall_is_measured_when_asked():
    counted = []
    options = {"measure_stall": True, "on_step_end": counted.append}
    assert is_right(step(device=CUDA, host_store="pinned", **options))
    assert counted[0].stall_s > 0


def test_a_retained_graph_and_a_dropped_forward():
    plan = step(device=CUDA, host_store="pinned")
    x, g = values(0, CUDA), values(1, CUDA)
    _, handle = forward(plan, x)
    first = backward(plan, handle, g, keep_graph=True)
    assert torch.equal(first, backward(plan, handle, g, keep_graph=True))
    del handle
    assert nothing_is_held(plan)


def test_pinned_memory_is_pinned_of_exact_size_and_freed():
    store = HostStore("pinned", 3 * 2**20 + 4096)
    assert store.bytes(4096).is_pinned()
    assert store.size_bytes == 3 * 2**20 + 4096
    store.close()
    arena_of(CUDA).forget(0)
