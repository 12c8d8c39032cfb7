"""Cuts from the cache: torch's partitioner is asked once, and no cut changes a gradient."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import memo_compile
from memo_compile.config import MemoConfig
from memo_compile.file_store import FileStore
from memo_compile.torch_private import compile_caches, partitioner
from tests.numerics.small import Pair, Stack, rows
from tests.numerics.training import in_ci


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileStore:
    made = FileStore(folder=tmp_path)
    monkeypatch.setattr(compile_caches, "remembers_autograd", lambda: False)  # it would not be cut
    monkeypatch.setattr(MemoConfig, "store", lambda config: made if config.cache else None)
    return made


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one with each question that torch's partitioner answers."""
    questions, answered = [], partitioner.min_cut_saved_names

    def counted(joint: Any, *args: Any, **kwargs: Any) -> list[str]:
        questions.append(str(joint.graph))
        return answered(joint, *args, **kwargs)

    monkeypatch.setattr(partitioner, "min_cut_saved_names", counted)
    return questions


def saved_of_a_step(num_rows: int = 8, **options: object) -> int:
    """A step equals eager's; bytes of what its forward keeps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    pair = Pair(Stack(hidden=16), **options)
    pair.assert_step(rows(1, num_rows, hidden=16))
    return memo_compile.report().plans[-1].peak_bytes


def files_of_cuts(store: FileStore) -> list[Path]:
    return [entry.path for entry in store.stored() if entry.kind == "cut"]


def rewrite(path: Path, store: FileStore, body: object) -> None:
    """The file says that ``body`` is what was remembered, with the right digest."""
    head = json.loads(path.read_bytes().partition(b"\n")[0])
    store.write({"kind": "cut"}, body, "x")
    (made,) = store.folder.glob("*.x.json")
    new_head, _, data = made.read_bytes().partition(b"\n")
    said = {**json.loads(new_head), "key": head["key"]}
    path.write_bytes(json.dumps(said).encode() + b"\n" + data)
    made.unlink()


def test_torch_is_asked_once_for_a_graph(store, asked):
    first = saved_of_a_step()
    assert saved_of_a_step() == first
    assert len(asked) == 1
    saved_of_a_step(num_rows=12)
    assert len(asked) == 2
    saved_of_a_step(cache=False)
    assert len(asked) == 3


@pytest.mark.full
def test_another_setting_of_torch_is_another_question(store, asked):
    saved_of_a_step()
    with torch._functorch.config.patch(aggressive_recomputation=True):
        saved_of_a_step()
    assert len(asked) == 2


@pytest.mark.full
def test_ranks_that_decide_together_ask_each_time(store, asked, monkeypatch):
    monkeypatch.setattr(partitioner, "ranks_cut_together", lambda: True)
    saved_of_a_step()
    saved_of_a_step()
    assert len(asked) == 2
    assert files_of_cuts(store) == []


@pytest.mark.parametrize("body", in_ci([{"names": []}, ["no_such_node"], [1], None], [1]))
def test_what_is_no_cut_of_the_graph_is_not_used(store, asked, caplog, body):
    first = saved_of_a_step()
    (path,) = files_of_cuts(store)
    rewrite(path, store, body)
    assert saved_of_a_step() == first
    assert len(asked) == 2
    assert "is of another graph" in caplog.text
    saved_of_a_step()
    assert len(asked) == 2


def test_a_cut_that_saves_nothing_or_everything_changes_no_gradient(store, asked):
    saved_of_a_step()
    (path,) = files_of_cuts(store)
    rewrite(path, store, [])
    saved_of_a_step()
    names = [line.split(" ")[0].lstrip("%") for line in asked[0].splitlines() if " : " in line]
    rewrite(path, store, names[:40])
    saved_of_a_step()
