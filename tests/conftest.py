"""Text goldens, the option that writes them anew, and what makes torch trace faster in tests."""

import gc
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from memo_compile.planners.placement.compiled import compiled_greedy, has_numba
from memo_compile.planners.placement.effort import Effort
from memo_compile.planners.placement.greedy import greedy_offsets
from memo_compile.planners.placement.instance import build_instance
from memo_compile.planners.placement.placement_problem import Buffer, PlacementProblem
from memo_compile.planners.placement.portfolio import Searcher
from tests.child import OBJECTS_BETWEEN_COLLECTIONS
from tests.steps.compact import compact

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_TORCH = (2, 13)
"""Other versions number a graph's nodes otherwise."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden/*.txt instead of comparing"
    )


gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)


TRACE = logging.getLogger("torch.__trace")
"""Where torch writes down every graph and guard, if anyone listens."""


def pytest_collection_finish() -> None:
    """What imports made lives for ever: the collector need not walk it again and again.

    pytest listens to loggers that do not propagate. Torch's trace took a tenth of all time so.
    """
    TRACE.propagate = True
    TRACE.handlers.clear()
    gc.collect()
    gc.freeze()
    if os.environ.get("PYTEST_XDIST_WORKER") and has_numba():
        _compile_placement()


def _compile_placement() -> None:
    """Where many tests run: greedy, of which each of them asks some, is four times as fast.

    The search is compiled in a fresh clone, by one worker for all.
    """
    buffer = Buffer(id="any", lower=0, upper=1, size=1)
    instance = build_instance(PlacementProblem(buffers=(buffer,)))
    compiled_greedy()
    greedy_offsets(instance, 0, Effort(0.0))
    if os.environ["PYTEST_XDIST_WORKER"] == "gw0":
        Searcher(instance, use_numba=True)


@pytest.fixture(autouse=True)
def _nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans do not depend on what the user's cache holds; a test that wants a store sets one."""
    monkeypatch.setattr("memo_compile.offline.forecast.user_store", lambda: None)
    monkeypatch.setattr("memo_compile.config.MemoConfig.store", lambda _: None)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare, made compact, with tests/golden/NAME.txt; a missing file fails.

    Where another version of torch gives another text, the test is skipped.
    """

    def compare(name: str, text: str) -> None:
        path, text = GOLDEN / f"{name}.txt", compact(text)
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert path.exists(), f"{path.name} is missing; run pytest with --update-golden"
        expected = path.read_text()
        ours = tuple(int(part) for part in torch.__version__.split(".")[:2])
        if text != expected and ours != GOLDEN_TORCH:
            pytest.skip(f"{path.name} is not what torch {torch.__version__} gives")
        assert text == expected

    return compare
