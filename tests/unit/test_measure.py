import mmap
import time

import pytest

from memo_compile.costs import measure
from memo_compile.costs.measure import (
    MIN_OWN_BLOCK_BYTES,
    keep_large_blocks_apart,
    resident_bytes,
    watch_memory,
)
from memo_compile.errors import RuntimeMisuse

MIB = 2**20
LAG_BYTES = 2 * MIB
"""The kernel's counters lag by up to 128 KiB per core; the interpreter allocates a little too."""


def touched(num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
    """Anonymous memory with every page written."""
    memory = mmap.mmap(-1, num_bytes, flags=flags)
    for start in range(0, num_bytes, mmap.PAGESIZE):
        memory[start] = 1
    return memory


def test_a_peak_between_entry_and_exit_is_seen():
    with watch_memory() as watch:
        memory = touched(64 * MIB)
        time.sleep(0.02)
        memory.close()
    assert watch.growth_bytes == pytest.approx(64 * MIB, abs=LAG_BYTES)


def test_what_is_held_at_entry_is_baseline():
    memory = touched(32 * MIB)
    with watch_memory() as watch:
        time.sleep(0.01)
    assert watch.growth_bytes < LAG_BYTES
    memory.close()
    with watch_memory() as after:
        pass
    assert watch.baseline_bytes - after.baseline_bytes == pytest.approx(32 * MIB, abs=LAG_BYTES)


def test_memory_that_is_mapped_but_never_touched_does_not_count():
    with watch_memory() as watch, mmap.mmap(-1, 256 * MIB, flags=mmap.MAP_PRIVATE):
        time.sleep(0.01)
    assert watch.growth_bytes < LAG_BYTES


def test_shared_memory_counts_apart_and_whole():
    shared = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
    with touched(32 * MIB, shared), watch_memory() as watch:
        with touched(16 * MIB, shared), touched(8 * MIB):
            time.sleep(0.02)
    assert watch.growth_bytes == pytest.approx(8 * MIB, abs=LAG_BYTES)
    assert watch.growth_with_shared_bytes == pytest.approx(56 * MIB, abs=LAG_BYTES)


def test_an_exception_in_the_block_passes_and_the_sampler_stops():
    with pytest.raises(KeyError), watch_memory() as watch:
        raise KeyError
    seen = watch.peak_bytes
    memory = touched(64 * MIB)
    time.sleep(0.02)
    assert watch.peak_bytes == seen
    memory.close()


def test_a_system_that_does_not_say_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "_STATUS", tmp_path / "absent")
    with pytest.raises(RuntimeMisuse, match="needs Linux's /proc"):
        resident_bytes()
    old = tmp_path / "status"
    old.write_text("VmRSS:\t 12 kB\n")
    monkeypatch.setattr(measure, "_STATUS", old)
    with pytest.raises(RuntimeMisuse, match="has no RssAnon: line"):
        resident_bytes()


def test_large_blocks_stay_apart_after_a_watch(monkeypatch):
    """A budget asked for that; a watch sets the same threshold of the C allocator."""
    keep_large_blocks_apart()
    thresholds = []
    monkeypatch.setattr(measure, "_set_thresholds", thresholds.append)
    with watch_memory():
        pass
    assert thresholds[-1] == MIN_OWN_BLOCK_BYTES > thresholds[0]
