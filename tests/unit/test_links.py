"""Seconds of collectives in the user's cache: read where machine and group are the same."""

import math

import pytest
import torch
from memo_runtime.collectives import Collective, CollectiveKind, TimedCollective

from memo_compile.costs.links import add_seconds, group_fingerprint, label, read_seconds
from memo_compile.file_store import FileStore

SECONDS = {"all_reduce sum float32 4096 B": 1e-3}


def fingerprint(**changed):
    given = {"backend": "gloo", "places": [[0, 0], [0, 1]], "num_ranks": 2}
    given |= {"link_bytes_per_s": None, **changed}
    return group_fingerprint(torch.device("cpu"), **given)


@pytest.fixture
def store(tmp_path):
    return FileStore(folder=tmp_path / "a" / "memo")


def test_the_second_process_reads_what_the_first_measured(store):
    assert read_seconds(store, fingerprint()) == {}
    add_seconds(store, fingerprint(), SECONDS)
    assert read_seconds(store, fingerprint()) == SECONDS
    assert [entry.kind for entry in store.stored()] == ["collectives"]


def test_other_collectives_of_a_group_are_added(store):
    add_seconds(store, fingerprint(), {"a": 1.0, "b": 2.0})
    add_seconds(store, fingerprint(), {"b": 3.0, "c": 4.0})
    assert read_seconds(store, fingerprint()) == {"a": 1.0, "b": 3.0, "c": 4.0}
    assert len(store.stored()) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"backend": "nccl"},
        {"places": [[0, 0], [1, 1]]},
        {"num_ranks": 4},
        {"link_bytes_per_s": 1e6},
    ],
    ids=str,
)
def test_another_group_has_a_file_of_its_own(store, changed):
    add_seconds(store, fingerprint(), SECONDS)
    assert read_seconds(store, fingerprint(**changed)) == {}
    add_seconds(store, fingerprint(**changed), {"a": 1.0})
    assert read_seconds(store, fingerprint()) == SECONDS


@pytest.mark.parametrize("field", ["torch", "device", "driver", "host", "num_cpus", "num_threads"])
def test_what_another_machine_or_version_wrote_does_not_count(store, field):
    add_seconds(store, fingerprint(), SECONDS)
    assert read_seconds(store, {**fingerprint(), field: "another"}) == {}


@pytest.mark.parametrize(
    "entries", [[], None, {"a": -1.0}, {"a": "soon"}, {"a": True}, {"a": None}, {"a": math.nan}]
)
def test_numbers_that_cannot_be_do_not_count(store, entries):
    store.write({"kind": "collectives", **fingerprint()}, entries)
    assert read_seconds(store, fingerprint()) == {}
    add_seconds(store, fingerprint(), SECONDS)
    assert read_seconds(store, fingerprint()) == SECONDS


def test_a_label_says_what_takes_the_time():
    reduce = Collective(kind=CollectiveKind.ALL_REDUCE, group_name="7", reduce_op="sum")
    assert label(TimedCollective(reduce, "float32", 4096)) == "all_reduce sum float32 4096 B"
    exchange = Collective(
        kind=CollectiveKind.ALL_TO_ALL, group_name="7", input_splits=(1, 2), output_splits=(2, 1)
    )
    expected = "all_to_all_single (1, 2) (2, 1) bfloat16 96 B"
    assert label(TimedCollective(exchange, "bfloat16", 96)) == expected
