"""A machine with a GPU may have no network, and a checkout that is not installed."""

import pytest
import torch

from benchmarks import harness


def pytest_configure() -> None:
    harness.register_memo()


@pytest.fixture(autouse=True)
def nothing_compiled():
    """One test's compilations do not count to the limit of another's."""
    torch._dynamo.reset()
