"""Ranks that would wait for each other for ever raise in time, and all plan with equal costs."""

import pytest

from tests.distributed.disagreeing import ENDED_S, TIMEOUT_S
from tests.distributed.ranks import outlived, run_ranks
from tests.distributed.timed_links import LAYERS, SECONDS
from tests.numerics.training import in_ci

LIMIT_S = 20.0
"""For the comparison and what is compiled before it."""


def both_found(case, tmp_path):
    outcomes = run_ranks("tests.distributed.disagreeing", tmp_path, case)
    return [outcome.found for outcome in outcomes]


def both(case, tmp_path):
    return [(rank["error"], rank["took_s"]) for rank in both_found(case, tmp_path)]


@pytest.mark.parametrize("case", in_ci(["one more", "another"], "one more"))
def test_ranks_that_differ_raise_on_both(case, tmp_path):
    words = {
        "one more": "collective 5 among ranks [0, 1] is none on rank 0 and all_reduce sum",
        "another": "is all_reduce sum float32[4, 8] (",
    }[case]
    ranks = both({"case": case}, tmp_path)
    for number, (error, _) in enumerate(ranks):
        assert error.startswith(("RanksDisagree", "BackendCompilerFailed"))
        assert f"on rank {number} and " in error
        assert "all of them must compile the same model" in error
    assert any(words in error for error, _ in ranks)
    assert min(took_s for _, took_s in ranks) < LIMIT_S


def test_a_rank_that_does_not_come_is_named(tmp_path):
    (first, took_s), (second, _) = both({"case": "absent"}, tmp_path)
    assert "rank 1 did not say within 5.00 s" in first
    assert "the first is all_reduce sum float32[4, 8] (" in first
    assert TIMEOUT_S <= took_s <= LIMIT_S + 60  # beside whatever else the machine does
    assert second == ""


def test_a_branch_that_one_rank_takes_is_compiled_there_alone(tmp_path):
    """Its collectives are those that all ranks have agreed on before."""
    for found in both_found({"case": "branch"}, tmp_path):
        assert found["error"] == ""
        first, *others = found["sums"]
        assert others == pytest.approx([first, first])


def test_what_one_rank_cannot_have_and_the_program_catches_leaves_nothing_behind(tmp_path):
    """The rank that waits for the first model hears at once, raises, and follows."""
    first, second = both_found({"case": "caught"}, tmp_path)
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
    first, second = both_found({"case": "crossed"}, tmp_path)
    assert first["error"] == second["error"] == ""
    assert first["sums"] == pytest.approx(second["sums"])
    assert first["took_s"] < LIMIT_S


@pytest.mark.full
def test_a_rank_that_raises_is_heard_across_a_mesh(tmp_path):
    """Rank 0 is in no group with rank 3."""
    outcomes = run_ranks("tests.distributed.disagreeing", tmp_path, {"case": "mesh"}, 4)
    first, *neighbours, last = [outcome.found for outcome in outcomes]
    assert "Infeasible" in last["error"]
    for found in neighbours:
        assert "rank 3 raised in place of graph" in found["error"]
    assert "raised in place of graph" in first["error"]
    assert "rank 3 raised" in first["error"]
    assert max(found["took_s"] for found in (first, *neighbours)) < LIMIT_S


def test_where_one_rank_steps_aside_all_do_at_once(tmp_path):
    first, second = both_found({"case": "aside"}, tmp_path)
    assert first["error"] == second["error"] == ""
    assert first["num_plain"] == second["num_plain"] == 1
    assert first["sums"] == pytest.approx(second["sums"])
    assert first["took_s"] < TIMEOUT_S


def test_no_rank_steps_aside_where_others_run_a_plan(tmp_path):
    first, second = both_found({"case": "aside after"}, tmp_path)
    assert "rank 0 runs a plan of a graph for which this rank has none" in second["error"] or (
        "rank 1 runs a plan of a graph for which this rank has none" in second["error"]
    )
    assert "UnsupportedGraph: not here" in second["error"]
    assert first["num_plain"] == second["num_plain"] == 0


def test_all_step_aside_from_a_graph_that_they_had_planned_before(tmp_path):
    """Each waits to see whether the other runs its plan; neither does."""
    first, second = both_found({"case": "aside again"}, tmp_path)
    assert first["error"] == second["error"] == ""
    assert first["num_plain"] == second["num_plain"] == 1
    assert first["sums"] == pytest.approx(second["sums"])
    assert max(first["took_s"], second["took_s"]) < TIMEOUT_S


def test_a_refusal_of_the_try_before_is_no_answer(tmp_path):
    """The first rank has planned the step while the other still refuses it under the budget."""
    for found in both_found({"case": "again"}, tmp_path):
        assert found["error"] == ""
        assert "floor" in found["refused"]


@pytest.mark.full
def test_a_rank_whose_process_has_ended_is_named_at_once(tmp_path):
    outcome = outlived("tests.distributed.disagreeing", tmp_path, {"case": "ended"})
    assert "the process of rank 1 has ended" in outcome.found["error"]
    assert outcome.found["took_s"] < ENDED_S / 4


def measured(tmp_path, **given):
    outcomes = run_ranks("tests.distributed.measuring", tmp_path, given)
    return [outcome.found for outcome in outcomes]


@pytest.mark.parametrize("cheaper", in_ci([0, 1], 1))
def test_ranks_of_other_costs_plan_the_same(cheaper, tmp_path):
    """Each region counts as one rank has measured it."""
    first, second = measured(tmp_path, is_shared=True, strict=True, cheaper=cheaper)
    assert first["error"] == second["error"] == ""
    assert first["planned"] == second["planned"]
    assert first["gradient"] == pytest.approx(second["gradient"])
    assert sum(first["planned"][:2]) > 0


def test_other_plans_are_named_in_time(tmp_path):
    """Each rank plans with its own costs; under ``strict`` that is an error on both, at once."""
    for number, found in enumerate(measured(tmp_path, is_shared=False, strict=True, cheaper=1)):
        assert "RanksDisagree" in found["error"] or "BackendCompilerFailed" in found["error"]
        assert f"on rank {number} and " in found["error"]
        assert (
            f"on rank {1 - number}, of ranks [0, 1]: they have planned with other" in found["error"]
        )
        assert "call " in found["error"]
        assert found["took_s"] < LIMIT_S


@pytest.mark.full
def test_other_plans_are_a_note_and_right(tmp_path):
    first, second = measured(tmp_path, is_shared=False, strict=False, cheaper=0)
    assert first["error"] == second["error"] == ""
    assert first["planned"] != second["planned"]
    assert first["gradient"] == pytest.approx(second["gradient"])
    for found in (first, second):
        assert any("Their numbers are right" in note for note in found["notes"])


def timed(cache, tmp_path, **given):
    """What each rank plans and finds in each step; the ranks plan alike, and right."""
    given = {"folder": str(cache), **given}
    outcomes = run_ranks("tests.distributed.timed_links", tmp_path, given)
    ranks = [outcome.found for outcome in outcomes]
    for first, second in zip(*ranks, strict=True):
        assert first["spans"] == second["spans"]
        for found in (first, second):
            assert found["error"] < 1e-5
            assert not any("planned with other" in note for note in found["notes"])
    return ranks


def assert_measured(step):
    assert step["num_measured"] == step["num_collectives"] == 2 * LAYERS
    assert step["comm_s"] == pytest.approx(2 * LAYERS * SECONDS, rel=0.5)


def test_the_second_step_and_the_next_process_know_a_slow_link(tmp_path):
    cache = tmp_path / "cache"
    (before, *later), _ = timed(cache, tmp_path)
    assert before["num_measured"] == 0
    assert before["comm_s"] < SECONDS
    assert "collectives declared" in before["text"]
    assert "collectives measured" in later[0]["text"]
    assert len(list((cache / "memo").glob("collectives-*.json"))) == 1
    again, _ = timed(cache, tmp_path)
    for step in (*later, *again):
        assert_measured(step)
        assert step["comm_s"] == later[0]["comm_s"]


@pytest.mark.full
def test_layers_in_different_groups_know_a_slow_link(tmp_path):
    (*_, last), _ = timed(tmp_path / "cache", tmp_path, crossing=True)
    assert_measured(last)


@pytest.mark.full
def test_what_only_one_rank_remembers_counts_for_both_or_neither(tmp_path):
    cache = tmp_path / "cache"
    timed(cache, tmp_path)
    for found in timed(cache, tmp_path, forgetful=True):
        assert_measured(found[-1])


@pytest.mark.full
def test_blocks_of_a_group_know_a_slow_link(tmp_path):
    (*_, last), _ = timed(tmp_path / "cache", tmp_path, grouped=True)
    assert_measured(last)
