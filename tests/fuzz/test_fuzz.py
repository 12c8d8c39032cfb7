"""Models of fixed seeds, and what once failed, train under memo as they do eagerly.

``make fuzz`` runs on from there. What it finds and is mended goes to ``corpus``, made small.
"""

import json
from pathlib import Path

import pytest

from tests.fuzz.case import draw_case, from_dict
from tests.fuzz.oracle import run_case

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.json"))
ATEN_SEEDS = (2, 7, 14)
"""Of models that are quick to try; `make fuzz` begins with all of them."""
INDUCTOR_SEEDS = (4,)


def assert_right(case):
    outcome = run_case(case)
    assert not outcome.invalid, outcome.invalid
    found = [
        f"{finding.signature}\n{finding.detail}\n{dict(finding.options)}"
        for finding in outcome.findings
    ]
    assert not found, "\n\n".join(found)


@pytest.mark.parametrize("seed", ATEN_SEEDS)
def test_op_by_op(seed):
    assert_right(draw_case(seed, "aten"))


@pytest.mark.full
@pytest.mark.parametrize("seed", INDUCTOR_SEEDS)
def test_inductor(seed):
    assert_right(draw_case(seed, "inductor"))


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_what_once_failed(path):
    assert_right(from_dict(json.loads(path.read_text())["case"]))
