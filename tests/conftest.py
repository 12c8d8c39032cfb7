"""Text goldens, and the option that writes them anew."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_TORCH = (2, 13)
"""Other versions number a graph's nodes otherwise."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden/*.txt instead of comparing"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare with tests/golden/NAME.txt; a missing file fails. Other versions of torch warn."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert path.exists(), f"{path.name} is missing; run pytest with --update-golden"
        expected = path.read_text()
        ours = tuple(int(part) for part in torch.__version__.split(".")[:2])
        if text != expected and ours != GOLDEN_TORCH:
            warnings.warn(f"{path.name} is not what torch {torch.__version__} gives", stacklevel=2)
        else:
            assert text == expected

    return compare
