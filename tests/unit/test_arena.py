"""Arena and leases: who holds which bytes, and when they go back."""

import contextlib
import ctypes
import gc
import mmap
import weakref
from types import SimpleNamespace

import pytest
import torch
from memo_runtime.arena import DeviceArena, FrameView, Slab
from memo_runtime.copies import Lane, Ticket
from memo_runtime.current import poison
from memo_runtime.instructions import Running
from memo_runtime.leases import Lease, LeaseTable, StepCounters, lease_frame, lease_ordinary, leases
from memo_runtime.pages import gives_pages_back
from memo_runtime.stream_order import StreamOrder

CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture
def arena() -> DeviceArena:
    return DeviceArena(CPU)


def test_a_free_slab_serves_the_next_frame(arena):
    first = arena.acquire(1024)
    arena.release(first)
    assert arena.acquire(512) is first
    assert arena.size_bytes == 1024


def test_a_slab_grows_only_while_it_is_free(arena):
    first = arena.acquire(1024)
    second = arena.acquire(2048)
    assert second is not first
    with pytest.raises(AssertionError, match="leased slab"):
        first.grow(4096)
    arena.release(first)
    assert arena.acquire(4096) is first
    assert first.size_bytes == 4096
    assert arena.size_bytes == 4096 + 2048


def test_the_tightest_slab_is_taken(arena):
    large, small = arena.acquire(4096), arena.acquire(1024)
    arena.release(large)
    arena.release(small)
    assert arena.acquire(1000) is small


class Stream:
    """Stands in for a CUDA stream: what it was told, in order."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def record_event(self):
        self.log.append(f"{self.name} records")
        return self.name

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")


def test_the_next_user_on_another_stream_waits_for_the_last(monkeypatch):
    """The host gives memory back when it has launched the work, not when that is done."""
    log: list[str] = []
    current = {"stream": Stream("first", log)}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current["stream"])
    order = StreamOrder(torch.device("cuda", 0))
    memory = SimpleNamespace(
        record_stream=lambda stream: log.append(f"allocator told of {stream.name}")
    )
    order.begin()
    current["stream"] = Stream("collector", log)  # a finalizer may run anywhere
    order.end(memory)
    current["stream"] = Stream("second", log)
    order.begin()
    assert log == ["allocator told of first", "first records", "second waits for first"]


def test_a_slab_is_ordered_where_it_is_leased_and_given_back(arena, monkeypatch):
    log: list[str] = []
    monkeypatch.setattr(StreamOrder, "begin", lambda _: log.append("begin"))
    monkeypatch.setattr(StreamOrder, "end", lambda _, memory: log.append(f"end {memory.numel()}"))
    arena.release(arena.acquire(1024))
    arena.release(arena.acquire(2048))
    assert log == ["begin", "end 1024", "begin", "end 2048"]


TABLE = [
    [
        FrameView(offset_bytes=512, dtype=torch.float32, size=(2, 3), stride=(3, 1)),
        FrameView(offset_bytes=1024, dtype=torch.int64, size=(4,), stride=(1,)),
    ]
]


def test_views_lie_at_their_offsets_and_are_made_anew_after_growth(arena):
    slab = arena.acquire(2048)
    (floats, numbers), *_ = slab.tables(1, TABLE)
    floats.fill_(1.5)
    numbers.fill_(7)
    raw = slab.bytes(2048)
    assert torch.equal(raw[512 : 512 + 24].view(torch.float32), torch.full((6,), 1.5))
    assert torch.equal(raw[1024 : 1024 + 32].view(torch.int64), torch.full((4,), 7))
    arena.release(slab)
    assert slab.tables(1, TABLE)[0][0] is floats
    slab.grow(1 << 20)
    floats = slab.tables(1, TABLE)[0][0]
    floats.fill_(2.5)
    assert torch.equal(slab.bytes(24, 512).view(torch.float32), torch.full((6,), 2.5))


def test_a_slab_grows_while_others_look_at_its_old_memory(arena):
    """A storage that numpy has seen can never be resized; what DLPack gave away must stay."""
    slab = arena.acquire(2048)
    view = slab.tables(1, TABLE)[0][0]
    of_numpy, of_dlpack = view.fill_(1.5).numpy(), torch.from_dlpack(view)
    old = weakref.ref(view)
    del view
    arena.release(slab)
    assert arena.acquire(1 << 20) is slab
    slab.bytes(slab.size_bytes).fill_(255)
    assert (of_numpy == 1.5).all()
    assert (of_dlpack == 1.5).all()
    assert slab.tables(1, TABLE)[0][0].untyped_storage().nbytes() == 1 << 20
    del of_numpy, of_dlpack
    assert old() is None, "nothing of the arena's keeps the old memory"


def test_a_misaligned_view_is_an_error(arena):
    view = FrameView(offset_bytes=2, dtype=torch.float32, size=(1,), stride=(1,))
    with pytest.raises(AssertionError, match=r"offset 2 is not aligned for torch\.float32"):
        arena.acquire(512).tables(1, [[view]])


def test_forgetting_the_last_plan_frees_the_slab(arena):
    slab = arena.acquire(1024)
    slab.tables(1, [])
    slab.tables(2, [])
    arena.release(slab)
    arena.forget(1)
    assert arena.size_bytes == 1024
    arena.forget(2)
    assert arena.size_bytes == 0


def test_a_lease_ends_with_its_handle(arena):
    lease = lease_frame(arena, 1024)
    handle = lease.handle()
    assert leases.find(handle) is lease
    assert leases.find(handle.clone()) is lease
    copied = handle.clone()
    del handle
    gc.collect()
    assert leases.find(copied) is None
    assert not arena.acquire(1024).size_bytes > 1024
    assert len(arena._slabs) == 1


def test_a_lease_is_given_back_once(arena):
    given, at_end = [], contextlib.ExitStack()
    at_end.callback(given.append, 1)
    lease = LeaseTable().open(arena.acquire(512), 512, None, at_end)
    lease.saved = [torch.ones(1)]
    lease.release()
    lease.release()
    assert given == [1]
    assert lease.saved == []


def test_a_lease_that_nobody_can_end_gives_its_frame_back(arena, monkeypatch):
    """Ctrl-C came before its step began, or while its release ran."""
    lease = lease_frame(arena, 1024)
    slab = lease.slab
    del lease
    gc.collect()
    assert not slab.leased

    def interrupted(_):
        raise KeyboardInterrupt

    lease = lease_frame(arena, 1024)
    monkeypatch.setattr(Lease, "_end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lease.release()
    assert slab.leased
    del lease
    gc.collect()
    assert not slab.leased


def test_a_frame_under_a_copy_is_not_given_to_another_step(arena):
    lease = lease_frame(arena, 1024)
    slab, content = lease.slab, lease.slab.bytes(8)
    lease.tickets[0] = Ticket(Lane.D2H, content.clone(), content)
    del lease
    gc.collect()
    assert slab.leased


def test_a_handle_outlives_its_plan_without_its_memory(arena):
    """A result that the user holds keeps the handle, also where the step was planned again."""
    lease = lease_frame(arena, 1024, plan_key=1)
    lease.slab.tables(1, [])
    slab, handle = weakref.ref(lease.slab), lease.handle()
    lease.release()
    arena.forget(1)
    assert slab() is None
    assert leases.find(handle) is None


def test_a_view_of_the_handle_keeps_the_lease(arena):
    """Autograd may hold the handle through another tensor of the same storage."""
    lease = lease_frame(arena, 512)
    other = lease.handle().view(2, -1).detach()
    gc.collect()
    assert lease.active
    del other
    gc.collect()
    assert not lease.active


def test_snapshot_and_restore(arena):
    lease = lease_frame(arena, 1024)
    content = lease.slab.bytes(1024)
    content.copy_(torch.arange(1024) % 251)
    snapshot = lease.snapshot()
    content.fill_(0)
    lease.restore(snapshot)
    assert torch.equal(content, (torch.arange(1024) % 251).to(torch.uint8))


def test_ordinary_memory_is_no_part_of_the_arena(arena):
    lease = lease_ordinary(CPU, 1024)
    assert arena.size_bytes == 0
    handle = lease.handle()
    assert leases.find(handle) is lease
    lease.release()
    assert leases.find(handle) is None


def test_dropped_pages_read_as_zero_and_the_rest_stays(arena):
    page = 4096
    slab = arena.acquire(8 * page)
    slab.bytes(8 * page).fill_(9)
    slab.drop_tail(4 * page)
    assert bool((slab.bytes(4 * page) == 9).all())
    assert bool((slab.bytes(2 * page, 5 * page) == 0).all())  # whole pages of the system's


@pytest.mark.parametrize("poisons", [False, True])
def test_the_tail_of_a_frame_is_lost_when_no_call_needs_it(arena, poisons):
    page = 4096
    lease = lease_frame(arena, 8 * page)
    lease.slab.bytes(8 * page).fill_(9)
    running = Running(
        lease=lease,
        env=[],
        tables=(),
        resident_bytes=8 * page,
        poison=poisons,
        counted=StepCounters(),
    )
    running.keep(4 * page)
    running.keep(6 * page)  # what is gone stays gone
    assert bool((lease.slab.bytes(4 * page) == 9).all())
    whole = lease.slab.bytes(2 * page, 5 * page)  # of the system's pages
    assert bool((whole == (255 if poisons else 0)).all())
    lease.release()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_poison_is_nan(dtype):
    value = torch.ones(3, dtype=dtype)
    poison(value)
    assert bool(value.isnan().all())


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.int64, -1), (torch.uint8, 255), (torch.bool, True)]
)
def test_poison_of_whole_numbers(dtype, value):
    tensor = torch.zeros(3, dtype=dtype)
    poison(tensor)
    assert tensor.tolist() == [value] * 3


_MADV_COLLAPSE = 25
"""Linux 6.1: what khugepaged does every ten seconds, at once."""


@pytest.mark.skipif(not gives_pages_back(CPU), reason="pages stay where they are")
def test_what_was_given_back_does_not_come_back_with_large_pages():
    """Step by step, as in a backward; each step leaves a huge page's range in memory in part."""
    slab = Slab(CPU, 64 * MIB)
    slab.occupy(64 * MIB)
    slab.bytes(64 * MIB).fill_(1)
    address = slab._storage.data_ptr()
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for kept in range(62 * MIB + MIB // 4, 20 * MIB, -5 * MIB):
        slab.drop_tail(kept)
        first = -(-address // (2 * MIB)) * 2 * MIB
        for start in range(first, address + 62 * MIB, 2 * MIB):
            libc.madvise(start, 2 * MIB, _MADV_COLLAPSE)
        assert _resident_bytes(address, 64 * MIB) <= kept + 2 * mmap.PAGESIZE
    assert slab.occupy(64 * MIB) <= 62 * MIB
    slab.bytes(64 * MIB).fill_(2)  # the next frame has all of it


def _resident_bytes(address: int, num_bytes: int) -> int:
    """Pages of whole mappings' part in ``[address, address + num_bytes)`` that are in memory."""
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    count = -(-(address + num_bytes - first) // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert libc.mincore(first, count * mmap.PAGESIZE, flags) == 0
    return sum(flag & 1 for flag in flags) * mmap.PAGESIZE
