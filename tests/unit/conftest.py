"""Fixtures of the unit tests."""

import pytest

from memo_compile.reporting import state


@pytest.fixture
def fresh_report():
    """No plan, note or failure of another test is in the report."""
    state.reset()
    yield
    state.reset()
