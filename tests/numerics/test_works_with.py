"""Each row of docs/works-with.md that is a model does what the page says; the page is its rows'.

The rows that are examples are in tests/examples.
"""

import pytest

from tests.numerics.training import in_ci
from tests.works_with import page
from tests.works_with.row import ROWS
from tests.works_with.tried import tried

QUICK = ("DeepSeek-V3", "Whisper", "QLoRA: PEFT on bitsandbytes nf4")
MODELS = [name for name, row in ROWS.items() if row.make is not None]


def test_the_page_is_made_of_what_was_tried():
    for lowering in ("aten", "inductor"):
        assert page.kept(lowering).keys() <= ROWS.keys()
    assert page.written() == page.PAGE.read_text()


@pytest.mark.parametrize("name", in_ci(MODELS, *QUICK))
def test_a_row_does_what_the_page_says(name, request):
    """With its floor in `make numerics-full` only: it takes two more compilations.

    What is not on the page yet must be good.
    """
    row = ROWS[name]
    if row.missing():
        pytest.skip(f"needs {', '.join(row.missing())}")
    is_full = request.node.get_closest_marker("full") is not None
    outcome, expected = tried(row, finds_floor=is_full), page.kept().get(name, {})
    for fact in ("right", "active", *(("bounded",) if is_full else ())):
        assert outcome[fact] == expected.get(fact, True), outcome
