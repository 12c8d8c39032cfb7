"""Tensor and sequence parallel layers: collectives inside a planned step.

What a collective returns belongs to it until it has been waited for. Copied before, it gave
gradients that were wrong by 0.8 of the largest, and NaN.
"""

import math

import pytest

from tests.distributed.ranks import run_ranks
from tests.numerics.training import in_ci

TOLERANCE = 3e-5
"""float32 sums in another order."""


SETTINGS = [
    {"sequence": False, "lowering": "aten"},
    {"sequence": True, "lowering": "aten"},
]
"""Tensor parallel layers; with ``sequence`` the tokens between them are split as well."""

COMPILED = [{**setting, "lowering": "inductor"} for setting in SETTINGS]


@pytest.mark.parametrize(
    "settings", in_ci([SETTINGS, COMPILED], SETTINGS), ids=["aten", "inductor"]
)
def test_gradients_are_those_of_one_process(settings, tmp_path, subtests):
    for outcome in run_ranks("tests.distributed.llama", tmp_path, {"settings": settings}):
        for setting, found in zip(settings, outcome.found, strict=True):
            with subtests.test(**setting):
                assert_right(found)


def assert_right(found):
    assert found["active"]
    assert found["num_unwaited"] == 0
    assert found["unplanned_steps"] == 0
    assert not any("FSDP" in note for note in found["notes"])
    for errors in found["errors"]:
        wrong = {
            name: error for name, error in errors.items() if math.isnan(error) or error > TOLERANCE
        }
        assert not wrong
