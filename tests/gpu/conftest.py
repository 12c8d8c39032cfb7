"""A machine with a GPU may have no network, and a checkout that is not installed."""

from benchmarks import harness


def pytest_configure() -> None:
    harness.register_memo()
