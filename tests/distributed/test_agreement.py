"""Ranks that would wait for each other for ever raise in time, and all run one plan.

What they tell each other is tested in ``tests/unit/test_job_ranks.py``, without processes, and
that one plans for all in ``tests/numerics/test_told_plans.py``.
"""

import pytest

from tests.distributed.disagreeing import TIMEOUT_S
from tests.distributed.ranks import run_ranks
from tests.distributed.timed_links import LAYERS, SECONDS


def both(module, tmp_path, **given):
    """What ``module`` finds on each of two ranks."""
    return [each.found for each in run_ranks(f"tests.distributed.{module}", tmp_path, given)]


def test_ranks_that_differ_raise_on_both(tmp_path):
    errors = [rank["error"] for rank in both("disagreeing", tmp_path, case="one more")]
    for number, error in enumerate(errors):
        assert error.startswith(("RanksDisagree", "BackendCompilerFailed"))
        assert f"on rank {number} and " in error
        assert "all of them must compile the same model" in error
    words = "collective 5 among ranks [0, 1] is none on rank 0 and all_reduce sum"
    assert any(words in error for error in errors)


def test_a_branch_that_one_rank_takes_is_compiled_there_alone(tmp_path):
    """Its collectives are those that all ranks have agreed on before."""
    for found in both("disagreeing", tmp_path, case="branch"):
        assert found["error"] == ""
        first, *others = found["sums"]
        assert others == pytest.approx([first, first])


def test_what_one_rank_cannot_have_and_the_program_catches_leaves_nothing_behind(tmp_path):
    """The rank that waits for the first model hears at once, raises, and follows."""
    first, second = both("disagreeing", tmp_path, case="caught")
    assert "rank 1 raised in place of graph" in first["error"]
    assert "the first is all_reduce sum float32[4, 8] (" in first["error"]
    assert "Infeasible: " in first["error"]
    assert first["took_s"] < TIMEOUT_S
    assert "Infeasible" in second["error"]
    assert first["sums"] == pytest.approx(second["sums"])
    assert len(first["sums"]) == 1


@pytest.mark.full
def test_ranks_that_wait_in_different_groups_are_not_measured_for_ever(tmp_path):
    """Each group has one order, and between two groups ranks differ: right, if nobody waits."""
    first, second = both("disagreeing", tmp_path, case="crossed")
    assert first["error"] == second["error"] == ""
    assert first["sums"] == pytest.approx(second["sums"])
    assert first["took_s"] < TIMEOUT_S


def test_where_one_rank_steps_aside_all_do_at_once(tmp_path):
    first, second = both("disagreeing", tmp_path, case="aside")
    assert first["error"] == second["error"] == ""
    assert first["num_plain"] == second["num_plain"] == 1
    assert first["sums"] == pytest.approx(second["sums"])
    assert first["took_s"] < TIMEOUT_S


def timed(cache, tmp_path, **given):
    """What each rank plans and finds in each step; the ranks plan alike, and right."""
    ranks = both("timed_links", tmp_path, folder=str(cache), **given)
    for first, second in zip(*ranks, strict=True):
        assert first["spans"] == second["spans"]
        for found in (first, second):
            assert found["error"] < 1e-5
            assert not any("planned otherwise" in note for note in found["notes"])
    return ranks


def assert_measured(step):
    assert step["num_measured"] == step["num_collectives"] == 2 * LAYERS
    assert step["comm_s"] > 1.5 * LAYERS * SECONDS


def test_the_second_step_and_the_next_process_know_a_slow_link(tmp_path):
    cache = tmp_path / "cache"
    (before, *later), _ = timed(cache, tmp_path)
    assert before["num_measured"] == 0
    assert before["comm_s"] < SECONDS
    assert "collectives declared" in before["text"]
    assert "collectives measured" in later[0]["text"]
    again, _ = timed(cache, tmp_path)
    for step in (*later, *again):
        assert_measured(step)
        assert step["comm_s"] == later[0]["comm_s"]


@pytest.mark.full
def test_blocks_of_a_group_know_a_slow_link(tmp_path):
    (*_, last), _ = timed(tmp_path / "cache", tmp_path, grouped=True)
    assert_measured(last)
