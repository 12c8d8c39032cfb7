"""Each example finds memo's losses equal to eager's, memo active, and its budget kept."""

import pytest

from tests.works_with.row import ROWS
from tests.works_with.tried import ROOT, run_example

EXAMPLES = [row for row in ROWS.values() if row.example]


def test_every_example_is_run():
    found = {path.name for path in (ROOT / "examples" / "tools").glob("*.py")}
    assert found == {"beside_eager.py", *(row.example[0] for row in EXAMPLES)}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=pytest.mark.full if row.packages == ("transformers",) else ())
        for row in EXAMPLES
    ],
    ids=lambda row: "".join(row.example),
)
def test_an_example(row):
    """`make examples` has the packages that the development environment lacks."""
    if row.missing():
        pytest.skip(f"needs {', '.join(row.missing())}, which `make examples` installs")
    done = run_example(*row.example)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of eager's" in done.stdout
