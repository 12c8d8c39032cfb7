"""What looks at the memory of a first step."""

import gc
import threading
import time

import pytest

from memo_compile.driver import between
from memo_compile.driver.between import MemorySampler


def _wait_until(happened) -> None:
    for _ in range(4000):
        if happened():
            return
        time.sleep(0.005)
    pytest.fail("it did not happen in twenty seconds")


def test_nobody_looks_once_nobody_wants_to_know():
    """A forward without a backward, in an evaluation, leaves no thread that runs for ever."""
    before = threading.active_count()
    sampler = MemorySampler()
    sampler.begin()
    assert threading.active_count() == before + 1
    del sampler
    gc.collect()
    _wait_until(lambda: threading.active_count() == before)


def test_what_takes_long_is_looked_at_less_often(monkeypatch):
    """Every look takes the interpreter from the user's code."""
    monkeypatch.setattr(between, "anonymous_bytes", iter(range(10**9)).__next__)
    sampler = MemorySampler()
    sampler.begin()
    _wait_until(lambda: sampler.most_bytes >= 8)
    assert sampler.end() >= 8
    pauses = [between.pause_s(elapsed_s) for elapsed_s in (0.0, 0.02, 2.0, 1000.0)]
    assert pauses == [between.SAMPLE_S, between.SAMPLE_S, 0.01, between.MAX_SAMPLE_S]
