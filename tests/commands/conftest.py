"""What tests of commands share."""

import pytest

from memo_compile import gpus
from memo_compile.file_store import FileStore
from memo_compile.offline import forecast, plan_offline
from tests.commands.tiny import CPU_BUILD


@pytest.fixture
def traces(monkeypatch):
    """How often a model was traced."""
    seen, traced = [], plan_offline.tracing

    def counted(*args, **kwargs):
        seen.append(1)
        return traced(*args, **kwargs)

    monkeypatch.setattr(plan_offline, "tracing", counted)
    return seen


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Where ``forecast`` remembers, empty."""
    made = FileStore(folder=tmp_path / "steps")
    monkeypatch.setattr(forecast, "user_store", lambda: made)
    return made


@pytest.fixture(autouse=True)
def no_gpu_is_lowered_for(monkeypatch):
    """As with a CPU build of torch: ``tests.cuda_emulated`` has what another build plans."""
    version_of = gpus.version_of
    monkeypatch.setattr(
        gpus, "version_of", lambda of: CPU_BUILD if of == "torch" else version_of(of)
    )
