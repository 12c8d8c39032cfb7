"""``memo cache export`` and ``import``: what is carried, and what is refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from memo_compile.cli import exported_cache
from memo_compile.cli.exported_cache import Caches, export_caches, import_caches
from memo_compile.errors import InputError
from memo_compile.file_store import FileStore, digest_of

KEY = {"kind": "step"}


def caches_in(folder: Path) -> Caches:
    return {"memo": folder / "memo", "torch": folder / "torch"}


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A folder with a record, a graph, and a library under two names."""
    caches, folder = caches_in(tmp_path / "here"), tmp_path / "warm"
    FileStore(folder=caches["memo"]).write(KEY, [1, 2])
    library = b"\x7fELF" * 100
    contents = {"ab/kab.so": library, "cd/kcd.so": library, "fxgraph/ef/fef/g": b"graph"}
    left_out = {"locks/a.lock": b"", "triton/0/X/__grp__k.json": b"/paths", "ab/.9.tmp": b"half"}
    for name, content in (contents | left_out).items():
        path = caches["torch"] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    manifest = export_caches(folder, caches, "none")
    assert {name for name in manifest.files if name.startswith("torch/")} == {
        f"torch/{name}" for name in contents
    }
    assert len(list((folder / "files").iterdir())) == 3
    return folder


def test_what_was_exported_lies_where_it_lay(exported, tmp_path):
    here, there = caches_in(tmp_path / "here"), caches_in(tmp_path / "there")
    damaged = there["torch"] / "ab" / "kab.so"
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"cut off")
    manifest = import_caches(exported, there, "none")
    assert list(FileStore(folder=there["memo"]).read(KEY)) == [[1, 2]]
    paths = sorted(path for path in (tmp_path / "there").rglob("*") if path.is_file())
    assert len(paths) == len(manifest.files) == 4
    for path in paths:
        assert (
            path.read_bytes()
            == (tmp_path / "here" / path.relative_to(tmp_path / "there")).read_bytes()
        )
    assert import_caches(exported, here, "none") == manifest


def test_an_existing_folder_is_not_written_into(exported, tmp_path):
    with pytest.raises(InputError, match="warm: cannot be made: File exists"):
        export_caches(exported, caches_in(tmp_path / "here"), "none")


def changed(edit: Callable[[dict], None], *, signed: bool = True) -> Callable[[Path], None]:
    """Edits the manifest; ``signed``: its digest fits again."""

    def change(folder: Path) -> None:
        path = folder / "manifest.json"
        body = json.loads(path.read_text())
        edit(body)
        if signed:
            body["sha256"] = digest_of(body["content"])
        path.write_text(json.dumps(body))

    return change


def emptied_file(folder: Path) -> None:
    max((folder / "files").iterdir(), key=lambda path: path.stat().st_size).write_bytes(b"")


def lost_file(folder: Path) -> None:
    next((folder / "files").iterdir()).unlink()


def lost_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def made_with(**values: str) -> Callable[[Path], None]:
    return changed(lambda body: body["content"]["made_with"].update(values))


REFUSED: list[tuple[Callable[[Path], None], str]] = [
    (emptied_file, "it is damaged; export or copy the folder again"),
    (lost_file, "cannot be copied: No such file"),
    (lost_manifest, "no whole export of memo's"),
    (changed(lambda body: body["content"]["files"].clear(), signed=False), "it is damaged"),
    (changed(lambda body: body.update(format=2)), "is of format 2; this memo reads 1"),
    (changed(lambda body: body.pop("format")), "damaged, or none of memo's"),
    (changed(lambda body: body["content"]["files"].update({"torch/../../x": "0"})), "no file of"),
    (changed(lambda body: body["content"]["files"].update({"other/x": "0"})), "no file of"),
    (changed(lambda body: body["content"].pop("files")), "files"),
    (made_with(torch="2.9.1"), "was made with torch 2.9.1, and here it is 2"),
    (made_with(GPU="NVIDIA H100"), "was made with GPU NVIDIA H100, and here it is none"),
    (made_with(**{"memo's sources": "0"}), "was made with memo's sources 0, and here it is"),
    (changed(lambda body: body["content"]["instructions"].append("avx99")), "not have: avx99$"),
]


@pytest.mark.parametrize(
    ("damage", "said"), REFUSED, ids=lambda value: getattr(value, "said", None)
)
def test_what_does_not_fit_is_refused_in_a_line_and_nothing_is_written(
    exported, tmp_path, damage, said
):
    damage(exported)
    with pytest.raises(InputError, match=said) as refused:
        import_caches(exported, caches_in(tmp_path / "there"), "none")
    assert "\n" not in str(refused.value)
    assert not [path for path in (tmp_path / "there").rglob("*") if path.is_file()]


def test_a_disk_that_fills_up_leaves_the_caches_as_they_were(exported, tmp_path, monkeypatch):
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    there = caches_in(tmp_path / "there")
    kept = FileStore(folder=there["memo"])
    kept.write({"kind": "mine"}, 1)
    monkeypatch.setattr(exported_cache.Path, "write_bytes", full)
    with pytest.raises(InputError, match="No space left on device"):
        import_caches(exported, there, "none")
    assert list(kept.read({"kind": "mine"})) == [1]
    assert len([path for path in (tmp_path / "there").rglob("*") if path.is_file()]) == 1
