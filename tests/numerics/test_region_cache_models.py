"""Models whose regions all come from the cache train as eager does, however they are planned."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import memo_compile
from memo_compile.config import MemoConfig
from memo_compile.file_store import FileStore
from memo_compile.lowering import region_cache
from memo_compile.lowering.region_cache import CacheCounts
from memo_compile.reporting import state
from tests import models
from tests.models import ModelCase
from tests.numerics.closeness import Reference
from tests.numerics.training import INDUCTOR, assert_planned, sgd, without_dropout

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
    ("gpt2", {"memory_budget": 0.9}),
    ("mixtral", {"policy": "full-offload", "debug": "poison,copies-early"}),
    ("unet", {}),
)
"""``memory_budget`` is here of the step's peak without one."""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileStore:
    made = FileStore(folder=tmp_path / "memo")
    monkeypatch.setattr(MemoConfig, "store", lambda config: made if config.cache else None)
    entries = staticmethod(lambda: str(tmp_path / "fxgraph"))
    monkeypatch.setattr(torch._inductor.codecache.FxGraphCache, "_get_tmp_dir", entries)
    return made


def trained(
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
        trained(reference, monkeypatch, {"cache": False})
        peak = memo_compile.report().plans[-1].peak_bytes
        options = {**options, "memory_budget": int(options["memory_budget"] * peak)}
    first = trained(reference, monkeypatch, options)
    plan = memo_compile.report().plans[-1]
    second = trained(reference, monkeypatch, options)
    again = memo_compile.report().plans[-1]
    assert first.misses > 0
    assert (second.misses, second.refused) == (0, 0)
    assert second.hits == first.misses + first.hits
    assert (again.peak_bytes, again.offsets) == (plan.peak_bytes, plan.offsets)
    other = {**options, "debug": "" if "debug" not in options else "poison"}
    trained(reference, monkeypatch, other)
