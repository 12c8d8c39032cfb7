"""Seconds of collectives in the user's cache: read where machine and group are the same."""

import json
import os

import pytest
import torch
from memo_runtime.collectives import Collective, CollectiveKind, TimedCollective

from memo_compile.costs.links import add_seconds, group_fingerprint, label, read_seconds

SECONDS = {"all_reduce sum float32 4096 B": 1e-3}


def fingerprint(**changed):
    given = {"backend": "gloo", "places": [[0, 0], [0, 1]], "num_ranks": 2}
    given |= {"link_bytes_per_s": None, **changed}
    return group_fingerprint(torch.device("cpu"), **given)


def files(folder):
    return [path.name for path in folder.iterdir()]


def test_the_second_process_reads_what_the_first_measured(tmp_path):
    folder = tmp_path / "a" / "memo"
    assert read_seconds(folder, fingerprint()) == {}
    add_seconds(folder, fingerprint(), SECONDS)
    assert read_seconds(folder, fingerprint()) == SECONDS


def test_other_collectives_of_a_group_are_added(tmp_path):
    add_seconds(tmp_path, fingerprint(), {"a": 1.0, "b": 2.0})
    add_seconds(tmp_path, fingerprint(), {"b": 3.0, "c": 4.0})
    assert read_seconds(tmp_path, fingerprint()) == {"a": 1.0, "b": 3.0, "c": 4.0}
    assert len(files(tmp_path)) == 1


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
def test_another_group_has_a_file_of_its_own(tmp_path, changed):
    add_seconds(tmp_path, fingerprint(), SECONDS)
    assert read_seconds(tmp_path, fingerprint(**changed)) == {}
    add_seconds(tmp_path, fingerprint(**changed), {"a": 1.0})
    assert read_seconds(tmp_path, fingerprint()) == SECONDS


@pytest.mark.parametrize("field", ["torch", "device", "driver", "host", "num_cpus", "num_threads"])
def test_what_another_machine_or_version_wrote_does_not_count(tmp_path, field):
    add_seconds(tmp_path, fingerprint(), SECONDS)
    (path,) = tmp_path.iterdir()
    content = json.loads(path.read_text())
    content["fingerprint"][field] = "another"
    path.write_text(json.dumps(content))
    assert read_seconds(tmp_path, fingerprint()) == {}


@pytest.mark.parametrize(
    "entries", [[], None, {"a": -1.0}, {"a": "soon"}, {"a": True}, {"a": None}]
)
def test_numbers_that_cannot_be_do_not_count(tmp_path, entries):
    add_seconds(tmp_path, fingerprint(), SECONDS)
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), "collectives": entries}))
    assert read_seconds(tmp_path, fingerprint()) == {}
    add_seconds(tmp_path, fingerprint(), SECONDS)
    assert read_seconds(tmp_path, fingerprint()) == SECONDS


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"fingerprint": 1}', "\0", '{"a": NaN}'])
def test_a_file_that_is_not_ours_is_replaced(tmp_path, text):
    add_seconds(tmp_path, fingerprint(), SECONDS)
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    assert read_seconds(tmp_path, fingerprint()) == {}
    add_seconds(tmp_path, fingerprint(), SECONDS)
    assert read_seconds(tmp_path, fingerprint()) == SECONDS


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    add_seconds(blocked, fingerprint(), SECONDS)
    assert read_seconds(blocked, fingerprint()) == {}

    def fail(source, target):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    add_seconds(tmp_path / "full", fingerprint(), SECONDS)
    assert files(tmp_path / "full") == []


def test_a_label_says_what_takes_the_time():
    reduce = Collective(kind=CollectiveKind.ALL_REDUCE, group_name="7", reduce_op="sum")
    assert label(TimedCollective(reduce, "float32", 4096)) == "all_reduce sum float32 4096 B"
    exchange = Collective(
        kind=CollectiveKind.ALL_TO_ALL, group_name="7", input_splits=(1, 2), output_splits=(2, 1)
    )
    expected = "all_to_all_single (1, 2) (2, 1) bfloat16 96 B"
    assert label(TimedCollective(exchange, "bfloat16", 96)) == expected
