"""Regions from the cache: gradients equal eager's, and whatever does not fit is lowered anew."""

import copy
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import memo_compile
from memo_compile.backends import capture_memory
from memo_compile.cli.main import main
from memo_compile.config import MemoConfig, user_store
from memo_compile.file_store import FileStore
from memo_compile.lowering import region_cache
from memo_compile.lowering.region_cache import CacheCounts
from memo_compile.reporting import state
from memo_compile.step.plans import Plan
from tests import models
from tests.models import ModelCase
from tests.numerics.caches import emptied, flipped, rewritten, truncated
from tests.numerics.closeness import Reference
from tests.numerics.small import Pair, Stack, rows
from tests.numerics.training import INDUCTOR, assert_planned, sgd, without_dropout

NUM_REGIONS = 6


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileStore:
    """Empty caches of regions, which this test alone uses; compiled kernels are shared."""
    made = FileStore(folder=tmp_path / "memo")
    monkeypatch.setattr(MemoConfig, "store", lambda config: made if config.cache else None)
    entries = staticmethod(lambda: str(tmp_path / "fxgraph"))
    monkeypatch.setattr(torch._inductor.codecache.FxGraphCache, "_get_tmp_dir", entries)
    return made


def step(monkeypatch: pytest.MonkeyPatch, **options: object) -> CacheCounts:
    """Two steps of a model, compiled as if for the first time; what came of its regions."""
    counts = CacheCounts()
    monkeypatch.setattr(region_cache, "counts", counts)
    torch._dynamo.reset()
    torch.manual_seed(0)
    pair = Pair(Stack(hidden=16), **{**INDUCTOR, **options})
    for seed in (1, 2):
        pair.assert_step(rows(seed, hidden=16))
    assert memo_compile.report().active
    return counts


def newest_plan() -> Plan:
    """The newest plan, without what differs from one compilation to the next: times, its number."""
    plan = memo_compile.report().plans[-1]
    return replace(plan, planning_s=0.0, lowering_s=0.0, measured_s=0.0, name="")


def files_of_regions(store: FileStore) -> list[Path]:
    return [entry.path for entry in store.stored() if entry.kind == "region"]


def torchs_files(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "fxgraph").rglob("*") if path.is_file()]


def test_a_second_compilation_finds_every_region(store, monkeypatch):
    first = step(monkeypatch)
    plan = newest_plan()
    assert first == CacheCounts(misses=NUM_REGIONS)
    assert len(files_of_regions(store)) == NUM_REGIONS
    assert step(monkeypatch) == CacheCounts(hits=NUM_REGIONS)
    assert newest_plan() == plan
    step(monkeypatch, cache=False)
    assert newest_plan() == plan


def test_no_code_of_other_options_is_found(store, monkeypatch):
    """Poison changes what code does to its table of views, an option of Inductor's the code."""
    for options in ({}, {"debug": ""}, {"inductor_options": {"max_fusion_size": 1}}):
        assert step(monkeypatch, **options) == CacheCounts(misses=NUM_REGIONS), options
    assert step(monkeypatch) == CacheCounts(hits=NUM_REGIONS)


@pytest.mark.full
def test_nothing_is_cached_where_the_user_does_not_want_it(store, monkeypatch):
    assert step(monkeypatch, cache=False) == CacheCounts(uncached=NUM_REGIONS)
    with torch._inductor.config.patch(fx_graph_cache=False):
        assert step(monkeypatch) == CacheCounts(uncached=NUM_REGIONS)
    assert files_of_regions(store) == []


def exchanged(paths: list[Path]) -> None:
    """Each file holds what another was written for."""
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(content)


@pytest.mark.full
@pytest.mark.parametrize("damage", [truncated, flipped, emptied])
def test_damaged_files_are_not_used_and_made_anew(store, monkeypatch, tmp_path, caplog, damage):
    """Memo's own, then the entries of torch's cache; then what is known of another region."""
    step(monkeypatch)
    for path in files_of_regions(store):
        damage(path)
    counts = step(monkeypatch)
    assert (counts.hits, counts.refused, counts.misses) == (0, NUM_REGIONS, NUM_REGIONS)
    assert caplog.text.count("is not used") == NUM_REGIONS
    assert step(monkeypatch) == CacheCounts(hits=NUM_REGIONS)
    for path in torchs_files(tmp_path):
        damage(path)
    counts = step(monkeypatch)
    assert (counts.hits, counts.misses) == (0, NUM_REGIONS)
    assert step(monkeypatch) == CacheCounts(hits=NUM_REGIONS)
    exchanged(files_of_regions(store))
    assert step(monkeypatch).hits == 0


@pytest.mark.full
def test_code_that_was_changed_on_disk_is_written_anew(store, monkeypatch):
    """Torch runs what the file of an entry's code holds, whatever the entry says."""
    modules = torch._inductor.codecache.PyCodeCache.modules
    num_before = len(modules)
    step(monkeypatch)
    code = {Path(module.__file__): b"" for module in modules[num_before:]}
    code = {path: path.read_bytes() for path in code}
    try:
        for path, text in code.items():
            path.write_bytes(text.replace(b".views[0]", b".views[1]"))
        assert any(path.read_bytes() != text for path, text in code.items())
        assert step(monkeypatch).refused > 0
        for path, text in code.items():  # gone where a remembered graph names its kernels otherwise
            assert not path.exists() or path.read_bytes() == text
    finally:
        for path, text in code.items():
            path.write_bytes(text)
    assert step(monkeypatch) == CacheCounts(hits=NUM_REGIONS)


@pytest.mark.full
def test_code_without_what_memo_knows_of_it_is_made_anew(store, monkeypatch):
    step(monkeypatch)
    store.clear()
    counts = step(monkeypatch)
    assert (counts.hits, counts.refused, counts.misses) == (0, NUM_REGIONS, NUM_REGIONS)
    assert step(monkeypatch) == CacheCounts(hits=NUM_REGIONS)


def views_left_out(record: dict) -> None:
    record["views"] = record["views"][:-1]


def another_code(record: dict) -> None:
    record["code_sha256"] = "0" * 64


def inputs_left_out(record: dict) -> None:
    record["profile"]["input_ends"].pop()


def no_profile(record: dict) -> None:
    record["profile"] = None


@pytest.mark.full
@pytest.mark.parametrize("change", [views_left_out, another_code, inputs_left_out, no_profile])
def test_a_record_that_cannot_be_of_the_code_is_not_used(store, monkeypatch, change):
    step(monkeypatch)
    for path in files_of_regions(store):
        rewritten(store, path, change)
    counts = step(monkeypatch)
    assert counts.refused >= NUM_REGIONS - 1  # one has no views
    assert step(monkeypatch).hits == NUM_REGIONS


class WithBuffer(nn.Module):
    """A layer that writes a buffer, and a constant that is part of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
        return (self.linear(self.norm(x)) * scale).square().mean()


@pytest.mark.full
def test_constants_and_written_buffers(store, monkeypatch):
    def trained() -> CacheCounts:
        monkeypatch.setattr(region_cache, "counts", CacheCounts())
        torch._dynamo.reset()
        torch.manual_seed(0)
        pair = Pair(WithBuffer(), **INDUCTOR)
        for seed in (1, 2):
            pair.assert_step(rows(seed, hidden=8))
        for ours, eager in zip(pair.ours.buffers(), pair.eager.buffers(), strict=True):
            torch.testing.assert_close(ours, eager)
        return copy.copy(region_cache.counts)

    assert trained().misses == 2
    assert trained() == CacheCounts(hits=2)


def use_caches_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    monkeypatch.setattr(MemoConfig, "store", lambda config: user_store())


def test_exported_caches_leave_nothing_to_lower_elsewhere(tmp_path, monkeypatch):
    here, there, warm = tmp_path / "here", tmp_path / "there", tmp_path / "warm"
    use_caches_in(here, monkeypatch)
    assert step(monkeypatch) == CacheCounts(misses=NUM_REGIONS)
    assert memo_compile.metrics()["memo/lowered_regions"] == NUM_REGIONS
    with pytest.raises(SystemExit, match="0"):
        main(["cache", "export", str(warm)])
    shutil.rmtree(here)
    use_caches_in(there, monkeypatch)
    with pytest.raises(SystemExit, match="0"):
        main(["cache", "import", str(warm)])
    capture_memory.counts.recalled = 0
    assert step(monkeypatch) == CacheCounts(hits=NUM_REGIONS)
    assert memo_compile.metrics()["memo/lowered_regions"] == 0
    assert capture_memory.counts.recalled == 1


CHILD = """
import torch, memo_compile
from memo_compile.lowering import region_cache
from memo_compile.step.serialise import to_json
from memo_compile.step.plans import Plan
from tests.numerics.small import Pair, Stack, rows
from tests.numerics.training import INDUCTOR, assert_planned, sgd, without_dropout
torch.set_num_threads(1)
torch.manual_seed(0)
pair = Pair(Stack(hidden=16), **INDUCTOR)
for seed in (1, 2):
    pair.assert_step(rows(seed, hidden=16))
print(region_cache.counts)
"""


@pytest.mark.full
def test_processes_that_start_at_once_and_one_after_them(tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "XDG_CACHE_HOME": str(tmp_path),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }

    def begun() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", CHILD], env=environment, stdout=subprocess.PIPE, text=True
        )

    for _, found in [(child, child.communicate()[0]) for child in (begun(), begun())]:
        assert "CacheCounts(" in found
    after = begun()
    assert after.communicate()[0].strip() == repr(CacheCounts(hits=NUM_REGIONS))


MODELS: Mapping[str, Callable[..., ModelCase]] = {
    "llama": functools.partial(models.llama, num_layers=3),
    "gpt2": functools.partial(models.gpt2, num_layers=3, dropout=0.0),
    "mixtral": functools.partial(models.mixtral, num_layers=3),
    "unet": models.unet,
}

CASES = (
    ("llama", {}),
    ("llama", {"policy": "full-recompute"}),
    ("llama", {"policy": "full-offload", "debug": "poison,copies-late"}),
    ("llama", {"policy": "memo", "alpha": 0.5, "token_granule": 4, "debug": "poison,copies-early"}),
    ("llama", {"token_tiles": 4, "token_granule": 1}),
    ("gpt2", {"memory_budget": 0.95}),
    ("mixtral", {"policy": "full-offload", "debug": "poison,copies-early"}),
    ("unet", {}),
)
"""``memory_budget`` is here of the step's peak without one."""


def planned_run(
    reference: Reference, monkeypatch: pytest.MonkeyPatch, options: Mapping[str, object]
) -> CacheCounts:
    """Two steps equal eager's; what came of the regions."""
    monkeypatch.setattr(region_cache, "counts", CacheCounts())
    torch._dynamo.reset()
    state.reset()
    compiled = functools.partial(
        torch.compile, backend="memo", options={**INDUCTOR, "costs": "roofline", **options}
    )
    reference.assert_close(reference.train(compiled))
    assert_planned()
    return region_cache.counts


@pytest.mark.full
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_second_compilations_equal_eager(store, monkeypatch, name, options):
    torch.manual_seed(0)
    model, inputs, loss = MODELS[name]()
    reference = Reference((without_dropout(model), inputs, loss), [sgd], steps=2)
    if "memory_budget" in options:
        planned_run(reference, monkeypatch, {"cache": False})
        peak = memo_compile.report().plans[-1].peak_bytes
        options = {**options, "memory_budget": int(options["memory_budget"] * peak)}
    first = planned_run(reference, monkeypatch, options)
    plan = memo_compile.report().plans[-1]
    second = planned_run(reference, monkeypatch, options)
    again = memo_compile.report().plans[-1]
    assert first.misses > 0
    assert (second.misses, second.refused) == (0, 0)
    assert second.hits == first.misses + first.hits
    assert (again.peak_bytes, again.offsets) == (plan.peak_bytes, plan.offsets)
    other = {**options, "debug": "" if "debug" not in options else "poison"}
    planned_run(reference, monkeypatch, other)
