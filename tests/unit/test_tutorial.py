"""docs/tutorial.md shows what examples/follow_a_step.py prints; --update-golden writes it anew."""

import re
from pathlib import Path

import pytest
import torch

from examples import follow_a_step

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
BLOCK = re.compile(r"(<!-- follow: ([\w ]+) -->\n```\w+\n)(.*?)(```\n)", re.DOTALL)
SHOWN_TORCH = (2, 13)
"""Other versions name a graph's nodes otherwise."""


def test_the_tutorial_shows_what_the_example_prints(fresh_report, request):
    ours = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if ours != SHOWN_TORCH:
        pytest.skip(f"docs/tutorial.md was written with torch {SHOWN_TORCH}")
    printed = follow_a_step.follow()
    torch._dynamo.reset()
    assert printed["report"].endswith("gradients equal eager's: True")
    text = TUTORIAL.read_text()
    if request.config.getoption("--update-golden"):
        filled = BLOCK.sub(lambda at: f"{at[1]}{printed[at[2]].rstrip()}\n{at[4]}", text)
        TUTORIAL.write_text(filled)
        text = filled
    shown = {title: body for _, title, body, _ in BLOCK.findall(text)}
    assert list(shown) == list(printed)
    for title, body in printed.items():
        assert shown[title] == f"{body.rstrip()}\n", f"{title}: run pytest with --update-golden"
