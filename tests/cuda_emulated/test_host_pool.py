"""Host frames: pinned in parts, and from one step to the next, whose stream may be another."""

import copy
import gc
import time

import pytest
import torch
from memo_runtime import pinned_memory
from memo_runtime.arena import arena_of
from memo_runtime.copies import CopyEngine, CopySchedule, Lane
from memo_runtime.host_store import HostPool, HostStore
from memo_runtime.pinned_memory import PinnedMemory

import memo_compile
from memo_compile.costs import bandwidth
from memo_compile.driver import pipeline
from tests.cuda_emulated.device_calls import pinned_bytes
from tests.cuda_emulated.test_memory import Training

DEVICE = torch.device("cuda", 0)
FRAME_BYTES = 64 << 20
NUM_COPIES = 64
LINK_BYTES_PER_S = 55e9


def lent(pool: HostPool):
    return pool.acquire("pinned", FRAME_BYTES, plan_key=1)


def test_the_next_user_s_stream_waits_for_the_last_user_s_copy():
    pool = HostPool(device=DEVICE)
    own = torch.empty(FRAME_BYTES, dtype=torch.uint8, device=DEVICE)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(first):
        store = lent(pool)
        begin.record()
        for _ in range(NUM_COPIES):
            own.copy_(store.bytes(FRAME_BYTES), non_blocking=True)
        pool.release(store)
    with torch.cuda.stream(second):
        assert lent(pool) is store
        end.record()
    end.synchronize()
    copies_ms = NUM_COPIES * FRAME_BYTES / LINK_BYTES_PER_S * 1e3
    assert begin.elapsed_time(end) >= 0.9 * copies_ms
    pool.release(store)
    pool.forget(1)


MIB = 1 << 20
PIN_S_PER_PART = 0.02


def layers(seq: int):
    """Equal layers that save many more bytes than they have weights."""
    layer = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64), torch.nn.GELU())
    rows = torch.randn(64 * seq, 64, dtype=torch.bfloat16)
    model = torch.nn.Sequential(*(copy.deepcopy(layer) for _ in range(4)))
    return model, {"input": rows}, lambda run, input: run(input).float().pow(2).mean()


def test_memory_is_pinned_while_regions_are_lowered(monkeypatch):
    """However slow it is: here lowering takes as long as the pinning that has begun before it.

    Then the first step waits for what remains, which is at most a twentieth. Nothing is left over.
    """
    pinned, after_lowering = [], []
    register, lower_step = PinnedMemory._register, pipeline.lower_step

    def slowly(memory: PinnedMemory, address: int, num_bytes: int) -> None:
        time.sleep(PIN_S_PER_PART)
        register(memory, address, num_bytes)
        pinned.append(num_bytes)

    def lowered(*arguments, **settings):
        (store,) = arena_of(DEVICE).host.stores
        until = time.monotonic() + 60
        while any(thread.is_alive() for thread in store.pinned._threads):
            assert time.monotonic() < until
            time.sleep(PIN_S_PER_PART)
        after_lowering.append(sum(pinned))
        return lower_step(*arguments, **settings)

    monkeypatch.setattr(pinned_memory, "PART_BYTES", MIB // 4)
    monkeypatch.setattr(PinnedMemory, "_register", slowly)
    monkeypatch.setattr(pipeline, "lower_step", lowered)
    monkeypatch.setattr(bandwidth, "COPY_BYTES", MIB)
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.synchronize()
    arena_of(DEVICE).host.give_back()  # frames of other tests, which this one would take or free
    before = pinned_bytes()
    training = Training(layers, lowering="aten", policy="full-offload")
    training.step()
    (plan,) = memo_compile.report().plans[-1:]
    assert plan.host_bytes > 4 * MIB
    assert after_lowering[0] > 0.95 * plan.host_bytes
    assert pinned_bytes() - before == plan.host_bytes
    assert sum(pinned) <= after_lowering[0] + 0.05 * plan.host_bytes + 2 * MIB  # copies were timed


@pytest.mark.parametrize("schedule", list(CopySchedule))
def test_a_copy_across_the_border_of_two_pinned_parts(monkeypatch, schedule):
    """CUDA refuses it as one copy: memory that was registered in two calls is not one."""
    monkeypatch.setattr(pinned_memory, "PART_BYTES", 8192)
    store, engine = HostStore("pinned", 5 * 8192 + 100, DEVICE), CopyEngine(DEVICE, schedule)
    wanted = torch.arange(store.size_bytes, dtype=torch.int32).to(torch.uint8)
    store.bytes(store.size_bytes).copy_(wanted)
    for start, end in ((0, store.size_bytes), (8000, 30000), (8192, 16384), (41000, 41060)):
        host, own = store.bytes(end - start, start), torch.empty(end - start, device=DEVICE)
        own = own.to(torch.uint8)
        assert host.is_pinned()
        engine.wait(engine.issue(Lane.H2D, own, host))
        torch.cuda.synchronize()
        host.zero_()
        engine.wait(engine.issue(Lane.D2H, host, own))
        torch.cuda.synchronize()
        assert torch.equal(host, wanted[start:end])
    store.close()
