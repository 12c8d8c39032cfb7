"""What tests of commands share."""

import pytest

from memo_compile.offline import plan_offline


@pytest.fixture
def traces(monkeypatch):
    """How often a model was traced."""
    seen, traced = [], plan_offline.tracing

    def counted(*args, **kwargs):
        seen.append(1)
        return traced(*args, **kwargs)

    monkeypatch.setattr(plan_offline, "tracing", counted)
    return seen
