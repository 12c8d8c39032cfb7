"""How long tests take: ``python -m pytest -p tests.cpu_seconds -m "not full" tests/numerics``.

A plugin that ends the run with the processor seconds of each directory and of its slowest tests,
child processes counted. Run it in one process (no ``-n``), on a machine that does little else.
"""

import resource
from collections import Counter
from collections.abc import Iterator

import pytest

NUM_SLOWEST = 20

_seconds: Counter[str] = Counter()


def _used_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = _used_s()
    try:
        return (yield)
    finally:
        _seconds[item.nodeid] += _used_s() - before


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    folders: Counter[str] = Counter()
    for name, seconds in _seconds.items():
        folders[name.partition("::")[0].rpartition("/")[0]] += seconds
    terminalreporter.section("processor seconds")
    for name, seconds in (*folders.most_common(), *_seconds.most_common(NUM_SLOWEST)):
        terminalreporter.write_line(f"{seconds:8.1f} {name}")
