"""A host frame goes from one step to the next, whose stream may be another."""

import torch
from memo_runtime.host_store import HostPool

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
