"""``memo cache``: what is shown and cleared; and the bar that tells how far a plan is."""

import json

import pytest

from memo_compile.cli.main import main
from memo_compile.cli.progress import saying, working
from memo_compile.file_store import UNKNOWN, FileStore


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return FileStore(folder=tmp_path / "memo" / "steps")


def run(capsys, *argv):
    with pytest.raises(SystemExit) as left:
        main([*argv])
    out, err = capsys.readouterr()
    return left.value.code, out, err


def test_what_is_remembered_is_shown_by_kind(store, capsys):
    store.write({"kind": "step", "number": 1}, "x" * 2000)
    store.write({"kind": "step", "number": 2}, "y" * 2000)
    store.write({"kind": "sizes"}, [1, 2])
    code, out, err = run(capsys, "cache", "show", "--json")
    body = json.loads(out)
    assert (code, err, body["folder"], body["num_files"]) == (0, "", str(store.folder), 3)
    assert {kind: row["num_files"] for kind, row in body["kinds"].items()} == {
        "sizes": 1,
        "step": 2,
    }
    files = store.folder.glob("*.json")
    assert body["num_bytes"] == sum(path.stat().st_size for path in files)
    assert body["num_bytes"] > 4000
    assert (body["max_bytes"], body["not_used"]) == (store.max_bytes, {})
    _, out, _ = run(capsys, "cache", "show")
    assert "at most 256.00 MiB" in " ".join(out.split())
    assert "step" in out


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        (lambda data: data[:-5], "it is damaged"),
        (lambda data: b"{}\n" + data, "it is no file of memo's"),
        (lambda data: b"\x80\x81", "decode"),
    ],
)
def test_a_file_that_is_not_used_is_named_with_the_reason(store, capsys, damaged, said):
    store.write({"kind": "step"}, "x" * 2000)
    (path,) = store.folder.glob("*.json")
    path.write_bytes(damaged(path.read_bytes()))
    _, out, _ = run(capsys, "cache", "show", "--json")
    body = json.loads(out)
    assert said in body["not_used"][path.name]
    assert body["kinds"] == {UNKNOWN: {"num_files": 1, "num_bytes": path.stat().st_size}}
    _, out, _ = run(capsys, "cache", "show")
    assert path.name in out.replace("\n", "")


def test_clear_removes_all_of_it_and_nothing_else(store, capsys):
    assert "0 files removed" in run(capsys, "cache", "clear")[1]
    store.write({"kind": "step"}, 1)
    store.write({"kind": "facts"}, 2)
    other = store.folder / "notes.txt"
    other.write_text("mine")
    code, out, _ = run(capsys, "cache", "clear")
    assert code == 0
    assert "2 files removed" in out
    assert [*store.folder.iterdir()] == [other]
    assert not [*store.read({"kind": "step"})]


def test_without_a_home_there_is_nothing_to_show(monkeypatch, capsys):
    monkeypatch.setattr("memo_compile.cli.cache_command.user_store", lambda: None)
    code, _, err = run(capsys, "cache", "show")
    assert code == 2
    assert "has no home" in err


@pytest.mark.parametrize(("is_terminal", "said"), [("1", True), ("0", False)])
def test_work_of_unknown_length_is_said_on_a_terminal(is_terminal, said, capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", is_terminal)
    with working("placing buffers") as progress:
        saying(progress)("lowering")
        progress.refresh()
    out, err = capsys.readouterr()
    assert ("lowering" in err) == said
    assert out == ""
