"""Ranks that would wait for each other for ever: an error on each of them instead, in time."""

import pytest

from tests.distributed.disagreeing import TIMEOUT_S
from tests.distributed.ranks import run_ranks
from tests.numerics.training import in_ci

LIMIT_S = 20.0
"""For the comparison and what is compiled before it."""


def both(case, tmp_path):
    found = [
        outcome.found for outcome in run_ranks("tests.distributed.disagreeing", tmp_path, case)
    ]
    return [(rank["error"], rank["took_s"]) for rank in found]


@pytest.mark.parametrize("case", in_ci(["one more", "another"], "one more"))
def test_ranks_that_differ_raise_on_both(case, tmp_path):
    words = {
        "one more": "collective 5 among ranks [0, 1] is none on rank 0 and all_reduce sum",
        "another": "is all_reduce sum float32[4, 8] (",
    }[case]
    (first, _), (second, _) = both({"case": case}, tmp_path)
    assert first.startswith(("RanksDisagree", "BackendCompilerFailed"))
    assert words in first
    assert "on rank 0" in second
    assert "all of them must compile the same model" in second


def test_a_rank_that_does_not_come_is_named(tmp_path):
    (first, took_s), (second, _) = both({"case": "absent"}, tmp_path)
    assert "rank 1 did not say within 5.00 s" in first
    assert "the first is all_reduce sum float32[4, 8] (" in first
    assert TIMEOUT_S <= took_s <= LIMIT_S + 60  # beside whatever else the machine does
    assert second == ""


def test_a_branch_that_one_rank_takes_is_compiled_there_alone(tmp_path):
    """Its collectives are those that all ranks have agreed on before."""
    for outcome in run_ranks("tests.distributed.disagreeing", tmp_path, {"case": "branch"}):
        assert outcome.found["error"] == ""
        first, *others = outcome.found["sums"]
        assert others == pytest.approx([first, first])
