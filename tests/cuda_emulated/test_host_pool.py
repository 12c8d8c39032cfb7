"""Host frames: pinned in parts, and from one step to the next, whose stream may be another."""

import logging

import pytest
import torch
from memo_runtime import host_store
from memo_runtime.copies import CopyEngine, CopySchedule, Lane
from memo_runtime.host_store import HostPool, HostStore

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


@pytest.mark.parametrize("schedule", list(CopySchedule))
def test_a_copy_across_the_border_of_two_pinned_parts(monkeypatch, caplog, schedule):
    """CUDA refuses it as one copy: memory that was registered in two calls is not one."""
    monkeypatch.setattr(host_store, "PART_BYTES", 8192)
    monkeypatch.setattr(host_store, "SILENT_S", 0.0)
    with caplog.at_level(logging.INFO, logger="memo"):
        store, engine = HostStore("pinned", 5 * 8192 + 100, DEVICE), CopyEngine(DEVICE, schedule)
    assert caplog.text.count("of host memory are pinned") == 6  # of each part, as soon as it is
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
