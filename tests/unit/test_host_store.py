"""Host memory: exact size, kinds, refusals, and the pool of host frames."""

import contextlib
import gc
import mmap
import os
import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from memo_runtime import host_store, pinned_memory
from memo_runtime.host_store import PREPARED, HostPool, HostStore, bytes_held
from memo_runtime.pinned_memory import HostStoreError

MIB = 2**20


def resident(kind: str) -> int:
    """Bytes of this process that /proc counts as ``kind``."""
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{kind}:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found.group(1)) * 1024


def test_bytes_are_views_of_one_page_aligned_memory():
    store = HostStore("shm", 1000)
    assert store.bytes(1000).data_ptr() % mmap.PAGESIZE == 0
    store.bytes(10, 5).fill_(3)
    assert store.bytes(1000).sum() == 30
    assert store.bytes(10, 5).data_ptr() == store.bytes(1000).data_ptr() + 5
    assert store.bytes(0, 1000).numel() == 0


@pytest.mark.parametrize(("num", "offset"), [(1001, 0), (1, 1000), (1, -1)])
def test_a_range_outside_is_an_error(num, offset):
    with pytest.raises(AssertionError, match="expected a range inside 1000 B of host memory"):
        HostStore("shm", 1000).bytes(num, offset)


def test_shared_memory_counts_as_shmem_and_goes_when_closed():
    gc.collect()
    shmem, anonymous = resident("RssShmem"), resident("RssAnon")
    store = HostStore("shm", 32 * MIB)
    store.bytes(32 * MIB).fill_(1)
    assert resident("RssShmem") - shmem >= 32 * MIB
    assert resident("RssAnon") - anonymous < 8 * MIB
    store.close()
    assert resident("RssShmem") - shmem < 8 * MIB


def test_a_tensor_over_a_closed_store_stays_valid():
    store = HostStore("shm", 4096)
    view = store.bytes(16).fill_(9)
    store.close()
    store.close()
    assert view.tolist() == [9] * 16
    with pytest.raises(AssertionError, match="closed"):
        store.bytes(1)


def test_a_file_store_leaves_no_name_and_counts_as_a_file(tmp_path):
    store = HostStore(f"file:{tmp_path}", 16 * MIB)
    assert list(tmp_path.iterdir()) == []
    shmem, anonymous = resident("RssShmem"), resident("RssAnon")
    store.bytes(16 * MIB).fill_(1)
    assert resident("RssAnon") - anonymous < 8 * MIB
    assert resident("RssShmem") - shmem in range(16 * MIB + 1)  # tmpfs counts as shared memory
    assert bool(store.bytes(16 * MIB).all())


@pytest.mark.parametrize(
    ("kind", "size", "reason"),
    [
        ("shm", 1 << 47, "Cannot allocate memory"),
        ("file:/nowhere", 4096, "No such file or directory"),
    ],
)
def test_a_refusal_names_size_kind_and_options(kind, size, reason):
    expected = rf"{size} B as {kind} \(.*{reason}.*Lower host_budget, or choose another host_store"
    with pytest.raises(HostStoreError, match=expected):
        HostStore(kind, size)


def test_a_full_disk_is_refused_before_the_first_copy(tmp_path):
    with pytest.raises(HostStoreError, match=r"host memory for offloaded activations was refused"):
        HostStore(f"file:{tmp_path}", 1 << 60)


def test_an_unknown_kind_is_refused():
    with pytest.raises(HostStoreError, match="expected the host store to be shm, pinned or file:"):
        HostStore("tape", 4096)


class FakeCudart:
    """Registers memory, or refuses it with ``code``."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.limit_bytes = 2**62
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        code = 2 if sum(self.registered.values()) + size > self.limit_bytes else self.code
        if not code:
            self.registered[address] = size
        return code

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return f"error {code}"


@pytest.fixture
def cudart(monkeypatch):
    fake = FakeCudart(0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    return fake


def test_pinned_memory_is_registered_in_parts_and_its_progress_is_said(cudart, monkeypatch, caplog):
    monkeypatch.setattr(pinned_memory, "PART_BYTES", 8192)
    monkeypatch.setattr(pinned_memory, "SILENT_S", 0.0)
    caplog.set_level("INFO", "memo")
    store = HostStore("pinned", 20000)
    start = store.bytes(1).data_ptr()
    assert cudart.registered == {start: 8192, start + 8192: 8192, start + 16384: 3616}
    assert re.search(r"\d+ of 20000 B of host memory are pinned", caplog.text)
    store.close()
    assert cudart.registered == {}


@pytest.mark.parametrize("error", [HostStoreError, KeyboardInterrupt])
def test_parts_are_given_back_when_one_is_refused_or_interrupted(cudart, monkeypatch, error):
    monkeypatch.setattr(pinned_memory, "PART_BYTES", 8192)
    monkeypatch.setattr(pinned_memory, "_clear_cuda_error", lambda: None)
    cudart.limit_bytes = 20000
    if error is KeyboardInterrupt:
        monkeypatch.setattr(pinned_memory.PinnedMemory, "wait", interrupted_once())
    with pytest.raises(error):
        HostStore("pinned", 30000)
    assert cudart.registered == {}


def interrupted_once() -> Callable[[pinned_memory.PinnedMemory], None]:
    wait, calls = pinned_memory.PinnedMemory.wait, iter((False, True))

    def interrupted(memory: pinned_memory.PinnedMemory) -> None:
        if next(calls, False):  # the first is before anything has begun
            raise KeyboardInterrupt
        wait(memory)

    return interrupted


@pytest.mark.parametrize(
    ("offset", "num_bytes", "expected"),
    [
        (0, 100, [(0, 100)]),
        (0, 8192, [(0, 8192)]),
        (8191, 2, [(0, 1), (1, 2)]),
        (8192, 9000, [(0, 8192), (8192, 9000)]),
        (100, 20000, [(0, 8092), (8092, 16284), (16284, 20000)]),
        (5, 0, [(0, 0)]),
    ],
)
def test_parts_of_a_range(monkeypatch, offset, num_bytes, expected):
    monkeypatch.setattr(pinned_memory, "PART_BYTES", 8192)
    store = HostStore("shm", 30000)
    assert list(host_store.parts(store.bytes(num_bytes, offset))) == expected


@pytest.fixture
def slow(cudart, monkeypatch):
    """Parts are of two pages, and none is registered before ``slow.set()``."""
    monkeypatch.setattr(pinned_memory, "PART_BYTES", 8192)
    go, at_once = threading.Event(), cudart.cudaHostRegister

    def registered(*arguments: int) -> int:
        assert go.wait(60)
        return at_once(*arguments)

    cudart.cudaHostRegister = registered
    yield go
    go.set()


def sizes(cudart: FakeCudart) -> list[int]:
    return [size for _, size in sorted(cudart.registered.items())]


@pytest.mark.parametrize("size", [1000, 8192, 30000, 100_000, 120_000])
def test_what_is_pinned_beside_a_compilation_becomes_as_large_as_its_plan(cudart, slow, size):
    pool = HostPool()
    pool.prepare(100_000)  # returns, although nothing is registered
    (store,) = pool.stores
    assert store.size_bytes == 0
    begun = [thread for thread in store.pinned._threads if thread.is_alive()]
    assert len(begun) == pinned_memory.NUM_THREADS
    slow.set()
    start = store._tensor.data_ptr()
    assert pool.acquire("pinned", size, 1) is store
    assert (store.size_bytes, store.bytes(1).data_ptr(), store.plans) == (size, start, {1})
    assert sizes(cudart) == [8192] * (size // 8192) + ([size % 8192] if size % 8192 else [])
    pool.forget(PREPARED)
    assert sum(sizes(cudart)) == size
    pool.release(store)
    pool.forget(1)
    assert cudart.registered == {}


def test_what_no_plan_needs_is_given_back_without_pinning_the_rest(cudart, slow):
    pool = HostPool()
    pool.prepare(1 << 20)
    threading.Timer(0.2, slow.set).start()
    pool.forget(PREPARED)  # waits for the parts that have begun
    assert (pool.stores, cudart.registered) == ([], {})


def test_a_frame_that_a_plan_has_used_keeps_its_size_or_goes(cudart, monkeypatch):
    """CUDA graphs hold its addresses."""
    monkeypatch.setattr(pinned_memory, "PART_BYTES", 8192)
    pool = HostPool()
    pool.prepare(20000)
    small = pool.acquire("pinned", 20000, 1)
    pool.release(small)
    assert pool.acquire("pinned", 100, 2) is small
    assert small.size_bytes == 20000
    pool.release(small)
    large = pool.acquire("pinned", 40000, 3)
    assert large is not small
    assert (pool.stores, large.plans, sum(sizes(cudart))) == ([large], {1, 2, 3}, 40000)
    large.close()


def test_a_refusal_beside_a_compilation_is_said_when_the_memory_is_needed(cudart, monkeypatch):
    monkeypatch.setattr(pinned_memory, "PART_BYTES", 8192)
    monkeypatch.setattr(pinned_memory, "_clear_cuda_error", lambda: None)
    cudart.limit_bytes, pool = 50_000, HostPool()
    pool.prepare(100_000)
    pool.wait()
    with pytest.raises(HostStoreError, match=r"refused to pin 100000 B .*ulimit -l: "):
        pool.acquire("pinned", 100_000, 1)
    assert (pool.stores, cudart.registered) == ([], {})
    pool.prepare(100_000)
    store = pool.acquire("pinned", 40_000, 1)
    assert store.size_bytes == 40_000
    store.close()


def test_a_system_that_grants_no_more_addresses(cudart, monkeypatch):
    real = mmap.mmap

    def limited(file: int, size: int, **flags: int) -> mmap.mmap:
        if size > MIB:
            raise OSError(12, "Cannot allocate memory")
        return real(file, size, **flags)

    monkeypatch.setattr(mmap, "mmap", limited)
    pool = HostPool()
    pool.prepare(100_000)  # not begun
    assert cudart.registered == {}
    for size in (40_000, 100_000):  # the second takes the first one's place
        pool.release(pool.acquire("pinned", size, 1))
        assert [store.size_bytes for store in pool.stores] == [size]
    pool.forget(1)
    assert cudart.registered == {}


def test_addresses_take_no_memory(cudart):
    gc.collect()
    before, held = resident("RssAnon"), bytes_held("pinned", 0)
    pool = HostPool()
    pool.prepare(64 * MIB)
    pool.wait()
    assert resident("RssAnon") - before > 60 * MIB  # touched before it is registered
    assert bytes_held("pinned", 0) - held == 64 * MIB
    store = pool.acquire("pinned", 4 * MIB, 1)
    assert resident("RssAnon") - before < 8 * MIB
    assert store.size_bytes == 4 * MIB


def test_pinned_memory_is_unregistered_by_the_finalizer(cudart):
    store = HostStore("pinned", 8192)
    alive = weakref.ref(store)
    del store
    gc.collect()
    assert alive() is None
    assert cudart.registered == {}


def test_refused_pinning_clears_the_error_and_names_the_options(cudart, monkeypatch):
    cleared = []
    monkeypatch.setattr(pinned_memory, "_clear_cuda_error", lambda: cleared.append(1))
    cudart.code = 712
    expected = r"refused to pin 8192 B .*error 712.*ulimit -l.*host_budget.*host_store='shm'"
    with pytest.raises(HostStoreError, match=expected):
        HostStore("pinned", 8192)
    assert cleared == [1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_pinning_without_cuda_is_refused():
    with pytest.raises(HostStoreError, match="expected a CUDA device to pin memory for"):
        HostStore("pinned", 4096)


def test_live_steps_have_frames_of_their_own_and_free_ones_are_shared():
    pool = HostPool()
    first, second = pool.acquire("shm", 4096, 1), pool.acquire("shm", 4096, 1)
    assert first is not second
    pool.release(first)
    assert pool.acquire("shm", 1000, 2) is first
    assert [store.size_bytes for store in pool.stores] == [4096, 4096]


def test_a_free_frame_that_is_too_small_is_replaced_by_one_of_exact_size():
    pool = HostPool()
    small = pool.acquire("shm", 4096, 1)
    pool.release(small)
    large = pool.acquire("shm", 9000, 2)
    assert large is not small
    assert [store.size_bytes for store in pool.stores] == [large.size_bytes] == [9000]
    assert large.plans == {1, 2}


def test_forgetting_the_last_plan_frees_the_frame():
    pool = HostPool()
    store = pool.acquire("shm", 4096, 1)
    store.plans.add(2)
    pool.release(store)
    pool.forget(1)
    assert pool.stores == [store]
    pool.forget(2)
    assert pool.stores == []


def test_a_frame_of_a_forgotten_plan_goes_when_its_step_ends():
    pool = HostPool()
    store = pool.acquire("shm", 4096, 1)
    pool.forget(1)
    assert pool.stores == [store]
    pool.release(store)
    assert pool.stores == []


def test_a_refused_frame_leaves_the_pool_usable():
    pool = HostPool()
    with pytest.raises(HostStoreError):
        pool.acquire("shm", 1 << 47, 1)
    assert pool.acquire("shm", 4096, 1).leased


def test_memory_that_a_step_may_use_again():
    before = [bytes_held(kind, 0) for kind in ("shm", "file:/tmp")]
    pool = HostPool()
    frame, weights = pool.acquire("shm", 300, 1), HostStore("shm", 5000)
    held = [bytes_held("pinned", size) - before[0] for size in (0, 1000)]
    assert held == [300, 1300]
    assert bytes_held("file:/tmp", 1000) - before[1] == 0
    frame.close()
    assert bytes_held("shm", 0) == before[0]
    assert weights.size_bytes == 5000  # held to here


def test_a_forked_child_shares_no_frame_with_its_parent():
    pool = HostPool()
    pool.release(pool.acquire("shm", 4096, 1))
    pool.stores[0].bytes(4096).fill_(1)
    pid = os.fork()
    if not pid:
        pool.acquire("shm", 4096, 1).bytes(4096).fill_(2)
        os._exit(0)
    os.waitpid(pid, 0)
    assert bool((pool.stores[0].bytes(4096) == 1).all())


def test_no_tensor_lies_in_two_parts(monkeypatch):
    monkeypatch.setattr(pinned_memory, "PART_BYTES", 8192)
    sizes = [5000, 4000, 100, 20000, 8192, 1]
    offsets, size_bytes = host_store.end_to_end(sizes)
    for offset, size in zip(offsets, sizes, strict=True):
        assert offset % host_store.ALIGNMENT == 0
        assert size > 8192 or offset // 8192 == (offset + size - 1) // 8192
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    assert all(end <= after for end, after in zip(ends, [*offsets[1:], size_bytes], strict=True))
