"""Torch's probe of vector instructions is made once for several processes."""

import errno
from collections.abc import Callable, Iterator
from unittest.mock import Mock

import pytest
from torch._inductor import cpu_vec_isa

from memo_compile.file_store import FileStore
from memo_compile.lowering import vector_probe
from memo_compile.torch_private import compile_caches, inductor_api

pytestmark = pytest.mark.skipif(
    not cpu_vec_isa.x86_isa_checker(), reason="torch probes nothing on this processor"
)

_CACHED = (cpu_vec_isa.valid_vec_isa_list, vector_probe.probe_once)


def _forget() -> None:
    for cached in _CACHED:
        cached.cache_clear()
    classes = (cpu_vec_isa.VecISA, *{type(known) for known in cpu_vec_isa.supported_vec_isa_list})
    for owner in classes:
        for own in vars(owner).values():
            getattr(own, "cache_clear", lambda: None)()


@pytest.fixture
def next_process(monkeypatch, tmp_path) -> Iterator[Callable[[], list[str]]]:
    """What a process with the cache of the test finds; ``tried`` are the programs that it ran."""

    def probe() -> list[str]:
        _forget()
        vector_probe.probe_once(FileStore(folder=tmp_path))
        return [str(found) for found in cpu_vec_isa.valid_vec_isa_list()]

    yield probe
    monkeypatch.undo()
    _forget()


def _programs(monkeypatch, works: Callable[[str], bool]) -> list[str]:
    """The basic test programs that run from now on, by their instruction sets."""
    tried: list[str] = []

    def check(self, code: str) -> bool:
        if code == cpu_vec_isa.VecISA._avx_code:
            tried.append(str(self))
        return works(str(self))

    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", check)
    return tried


def test_what_worked_is_not_tried_again(monkeypatch, next_process) -> None:
    tried = _programs(monkeypatch, lambda _: True)
    first = next_process()
    assert "avx2" in first
    assert tried == first[:1]  # the widest, of which the others are parts
    tried.clear()
    assert next_process() == first
    assert tried == []


def test_what_did_not_work_is_tried_in_every_process(monkeypatch, next_process) -> None:
    tried = _programs(monkeypatch, lambda name: name == "avx2")
    assert next_process() == ["avx2"]
    tried.clear()
    assert next_process() == ["avx2"]
    assert "avx2" in tried


def test_another_compiler_is_tried(monkeypatch, next_process) -> None:
    tried = _programs(monkeypatch, lambda _: True)
    first = next_process()
    plain, said = compile_caches.vector_probe, ["another"]
    monkeypatch.setattr(compile_caches, "vector_probe", lambda: [*(plain() or ()), *said])
    tried.clear()
    assert next_process() == first
    assert tried == first[:1]


def test_what_the_user_believes_is_not_remembered() -> None:
    with inductor_api.inductor_patch({"cpp.vec_isa_ok": True}):
        assert compile_caches.vector_probe() is None


def test_what_lies_on_a_disk_that_is_only_read_is_used(monkeypatch, tmp_path) -> None:
    store = FileStore(folder=tmp_path)
    store.write({"kind": "any"}, ["body"])
    monkeypatch.setattr("os.utime", Mock(side_effect=OSError(errno.EROFS, "read-only")))
    assert list(store.read({"kind": "any"})) == [["body"]]
