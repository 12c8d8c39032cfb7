"""What tests of commands share."""

import pytest

from memo_compile.offline import plan_offline, preparing


@pytest.fixture
def traces(monkeypatch):
    """How often a model was traced."""
    seen, traced = [], plan_offline.tracing

    def counted(*args, **kwargs):
        seen.append(1)
        return traced(*args, **kwargs)

    monkeypatch.setattr(plan_offline, "tracing", counted)
    return seen


@pytest.fixture(autouse=True)
def nothing_is_prepared(monkeypatch):
    """For other budgets: that takes a part of each answer."""
    monkeypatch.setattr(preparing, "BRIEFLY", 0.0)
