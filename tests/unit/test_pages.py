"""Results in mappings of their own: what the user drops is the system's at once."""

import os
import subprocess
import sys

import pytest
import torch
from memo_runtime.pages import MIN_OWN_MAPPING_BYTES, MOST_OCCUPIED_BYTES, own_mapping

from memo_compile.costs.measure import MIN_OWN_BLOCK_BYTES, resident_bytes

MIB = 2**20


@pytest.mark.parametrize(
    ("size", "stride"),
    [((512, 1024), (1024, 1)), ((512, 1024), (1, 512)), ((512, 1000), (1024, 1))],
)
def test_it_is_a_tensor_like_any_other(size, stride):
    value = own_mapping(size, stride, torch.float32)
    like = torch.empty_strided(size, stride)
    assert (value.shape, value.stride(), value.dtype) == (like.shape, like.stride(), like.dtype)
    assert value.untyped_storage().nbytes() == like.untyped_storage().nbytes()
    value.copy_(torch.arange(value.numel()).view(size))
    assert torch.equal(value.flatten().long(), torch.arange(value.numel()))


@pytest.mark.parametrize(("size", "stride"), [((4, 4), (4, 1)), ((0, 2**20), (2**20, 1)), ((), ())])
def test_small_and_empty_results_are_the_allocators(size, stride):
    value = own_mapping(size, stride, torch.float32)
    assert value.shape == size
    assert value.untyped_storage().nbytes() < MIN_OWN_MAPPING_BYTES
    value.resize_(100)  # which a mapping refuses


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_its_memory_is_gone_although_the_heap_has_a_hole_for_it():
    pieces = [torch.zeros(MIB // 4) for _ in range(64)]
    last = torch.zeros(1000)  # above the hole, so that the heap cannot shrink
    del pieces
    before = resident_bytes()
    for _ in range(4):
        value = own_mapping((16 * MIB,), (1,), torch.float32).fill_(1)
        assert resident_bytes() >= before + 60 * MIB
        view = value[:8]
        del value
        assert resident_bytes() >= before + 60 * MIB  # the view still needs it
        del view
        assert resident_bytes() <= before + 4 * MIB
    assert last.sum() == 0


def test_blocks_that_a_plan_takes_for_gone_have_mappings_of_their_own():
    assert MIN_OWN_BLOCK_BYTES >= MIN_OWN_MAPPING_BYTES


IN_FORKS = """
import mmap, os, resource, sys
from pathlib import Path
import torch
from memo_compile.backends.entry import large_blocks_leave_the_heap
for code in sys.argv[1:]:
    sys.stdout.flush()
    if os.fork() == 0:
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0
"""
"""Runs each of its arguments in a copy of the process, whose heap is new but for the imports."""


def outcome(*codes: str, **settings: str) -> list[str]:
    """The lines that ``codes`` print one after the other, in a process of their own."""
    done = subprocess.run(
        [sys.executable, "-c", IN_FORKS, *codes],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


FREE_PLACE = """
num_bytes = {}
large_blocks_leave_the_heap()
pieces = [torch.zeros(2**16) for _ in range(num_bytes // 2**18 + 64)]
places = sorted(piece.data_ptr() for piece in pieces)
held = [piece for piece in pieces if piece.data_ptr() in (places[0], places[-1])]
del pieces
def lies_there():
    return places[0] < torch.empty(num_bytes, dtype=torch.uint8).data_ptr() < places[-1]
print(lies_there())
large_blocks_leave_the_heap()
print(lies_there())
"""
SIZES = (3 * MIB // 2, 8 * MIB, 100 * MIB)

GROWING = """
def mapped_bytes():
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
large_blocks_leave_the_heap()
before = mapped_bytes()
for _ in range(25):
    pieces = [torch.zeros(2**16) for _ in range(400)]
    last = pieces[-1]
    del pieces
    large_blocks_leave_the_heap()
print((mapped_bytes() - before) // 2**20)
"""
"""100 MiB of small blocks come and go between two calls, 25 times."""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_large_blocks_stay_apart_although_the_heap_has_a_free_place():
    """What was freed before a budget came lies between blocks that are held.

    Where the kernel has put a mapping in the heap's way, that has no such place: once in a while.
    """
    codes, places = [FREE_PLACE.format(size) for size in SIZES], set()
    for _ in range(4):
        *found, grown_mib = outcome(*codes, GROWING)
        places |= {(at, *found[2 * at : 2 * at + 2]) for at in range(len(SIZES))}
        assert int(grown_mib) <= 1.5 * MOST_OCCUPIED_BYTES / MIB, "the heap has a bound"
        if all((at, "True", "False") in places for at in range(len(SIZES))):
            break
    else:
        pytest.fail(f"no free place was left: {places}")
    assert places <= {
        (at, first, "False") for at in range(len(SIZES)) for first in ("True", "False")
    }


UNMAPPED = """
pieces = [bytearray(400_000) for _ in range(100)]
del pieces[:-1:2]
resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))
for _ in range(3):
    large_blocks_leave_the_heap()
print(int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() // 2**30)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_it_ends_where_glibc_may_map_no_blocks():
    assert int(*outcome(UNMAPPED, MALLOC_MMAP_MAX_="0")) <= 4
