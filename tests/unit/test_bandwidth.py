"""The speed of copies: measured once, remembered while machine and software stay the same."""

import math

import pytest
import torch
from memo_runtime.host_store import HostStoreError

from memo_compile.config import cache_folder
from memo_compile.costs import bandwidth
from memo_compile.costs.bandwidth import CopyBandwidth, copy_bandwidth, measure_copies
from memo_compile.file_store import FileStore

CPU = torch.device("cpu")
KNOWN = CopyBandwidth(
    d2h_bytes_per_s=2e9, h2d_bytes_per_s=3e9, latency_s=1e-5, source="measured: by hand"
)


@pytest.fixture
def measured(monkeypatch):
    """How often copies were timed; each time they give KNOWN."""
    calls = []

    def measure(device, kind):
        calls.append(device)
        return KNOWN

    monkeypatch.setattr(bandwidth, "measure_copies", measure)
    return calls


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    made = FileStore(folder=tmp_path / "a" / "memo")
    monkeypatch.setattr(bandwidth, "user_store", lambda: made)
    return made


def test_the_second_process_reads_what_the_first_measured(measured, store):
    assert copy_bandwidth(CPU, "shm") == KNOWN
    assert copy_bandwidth(CPU, "shm") == KNOWN
    assert measured == [CPU]
    assert [entry.kind for entry in store.stored()] == ["copies"]


@pytest.mark.parametrize("field", ["torch", "device", "driver", "host", "num_cpus"])
def test_another_machine_or_version_measures_again(measured, monkeypatch, field):
    copy_bandwidth(CPU, "shm")
    before = bandwidth.machine(CPU)
    monkeypatch.setattr(bandwidth, "machine", lambda device: {**before, field: "another"})
    copy_bandwidth(CPU, "shm")
    copy_bandwidth(CPU, "shm")
    assert len(measured) == 2


def broken_contents():
    good = {"d2h_bytes_per_s": 1e9, "h2d_bytes_per_s": 1e9, "latency_s": 0.0, "source": "x"}
    for name, value in (
        ("d2h_bytes_per_s", 0),
        ("h2d_bytes_per_s", -1.0),
        ("d2h_bytes_per_s", math.inf),
        ("latency_s", math.nan),
        ("latency_s", "soon"),
        ("source", None),
    ):
        yield {**good, name: value}
    yield {key: value for key, value in good.items() if key != "source"}
    yield {**good, "more": 1}
    yield []


@pytest.mark.parametrize("copies", [*broken_contents()], ids=str)
def test_numbers_that_cannot_be_are_measured_again(measured, store, copies):
    store.write(bandwidth._store_key(CPU, "shm"), copies)
    assert copy_bandwidth(CPU, "shm") == copy_bandwidth(CPU, "shm") == KNOWN
    assert len(measured) == 1


def test_without_a_home_nothing_is_remembered(measured, monkeypatch):
    monkeypatch.setattr(bandwidth, "user_store", lambda: None)
    assert copy_bandwidth(CPU, "shm") == copy_bandwidth(CPU, "shm") == KNOWN
    assert len(measured) == 2


def test_the_cache_is_where_the_user_wants_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "memo"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "memo"


def test_copies_of_this_machine(monkeypatch):
    monkeypatch.setattr(bandwidth, "COPY_BYTES", 4 * 2**20)
    found = measure_copies(CPU, "shm")
    assert 1e7 < found.d2h_bytes_per_s < 1e13
    assert 1e7 < found.h2d_bytes_per_s < 1e13
    assert 0 < found.latency_s < 1
    assert found.source.startswith("measured: 4.00 MiB between ")
    assert found.source.endswith("shm")


def test_pageable_memory_is_timed_where_pinning_is_refused(monkeypatch, store):
    """And is not remembered as the speed of pinned memory."""
    kinds = []

    def measure(device, kind):
        kinds.append(kind)
        if kind == "pinned":
            raise HostStoreError("locked memory is limited")
        return KNOWN

    monkeypatch.setattr(bandwidth, "measure_copies", measure)
    assert copy_bandwidth(CPU, "pinned") == KNOWN
    assert kinds == ["pinned", "shm"]
    assert len(store.stored()) == 1
    copy_bandwidth(CPU, "pinned")
    assert kinds == ["pinned", "shm", "pinned"]


def test_each_kind_of_host_memory_is_timed_by_itself(measured, store):
    for kind in ("shm", "pinned", "file:/a", "file:/b", "shm"):
        copy_bandwidth(CPU, kind)
    assert len(measured) == 4
    assert len(store.stored()) == 4


def test_copies_to_files_are_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(bandwidth, "COPY_BYTES", 2**20)
    found = measure_copies(CPU, f"file:{tmp_path}")
    assert found.source.endswith(f"file:{tmp_path}")
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(HostStoreError):
        measure_copies(CPU, f"file:{tmp_path}/missing")


def test_copies_to_a_disk_that_is_nearly_full_are_timed_with_less(tmp_path, monkeypatch):
    monkeypatch.setattr(bandwidth, "free_disk_bytes", lambda folder: 200_000)
    assert measure_copies(CPU, f"file:{tmp_path}").source.startswith("measured: 97.66 KiB between")
