"""Lynx's programs on instances with known optima, and what they refuse."""

import json
from pathlib import Path

import pytest

from memo_compile.errors import InputError, InvalidPlan
from memo_compile.papers.lynx.heu import solve_heu
from memo_compile.papers.lynx.lynx_instance import HeuInstance, OptInstance, StageTimes
from memo_compile.papers.lynx.lynx_replay import replay_heu, replay_opt
from memo_compile.papers.lynx.opt import solve_opt
from memo_compile.papers.lynx.partition import split_exact, split_paper
from memo_compile.papers.lynx.solution import Part
from memo_compile.planners.solver import SolveStatus

DATA = Path(__file__).parents[1] / "data"
KNOWN = json.loads((DATA / "lynx_instances.json").read_text())
CHAIN = {
    "C": [4, 3, 5],
    "M": [2, 6, 1],
    "deps": [[], [0], [1]],
    "comm": [1],
    "need": [1, 1, 1],
    "ctime": [4, 0, 4, 0],
    "nl": 2,
    "nb": 3,
    "static": 10,
    "budget": 40,
    "fwd_phases": True,
}


def heu(**changes: object) -> HeuInstance:
    return HeuInstance.from_json({**CHAIN, **changes})


@pytest.mark.parametrize("entry", KNOWN["heu"])
def test_heu_reaches_the_known_optimum(entry):
    instance = HeuInstance.from_json(entry)
    solution = solve_heu(instance)
    assert solution.status is SolveStatus.OPTIMAL
    assert solution.critical_time == entry["optimum"]
    assert solution.peak <= instance.budget
    split = solve_heu(instance, token_split=True)
    assert split.critical_time <= solution.critical_time + 1e-9


@pytest.mark.parametrize("entry", KNOWN["opt"])
def test_opt_reaches_the_known_optimum(entry):
    instance = OptInstance.from_json(entry)
    solution = solve_opt(instance)
    assert solution.status is SolveStatus.OPTIMAL
    assert solution.critical_time == entry["optimum"]
    assert solution.peak <= instance.budget
    silent = OptInstance.from_json({**entry["instance"], "comm": []})
    assert solve_opt(silent).critical_time == entry["optimum_without_overlap"]
    assert solve_opt(instance, token_split=True).critical_time <= entry["optimum"] + 1e-9


@pytest.mark.parametrize("entry", KNOWN["partition"])
def test_partition_reaches_the_known_optimum(entry):
    table = StageTimes.from_json(entry)
    split = split_exact(table)
    assert [split.slowest, list(split.layers)] == entry["optimum"]
    greedy = split_paper(table)
    assert sum(greedy.layers) == entry["num_layers"]
    assert greedy.slowest >= split.slowest


def test_token_split_fits_a_window_that_no_operator_fits():
    base = {**CHAIN, "ctime": [0, 0, 2, 1], "M": [6, 2, 1], "budget": 36}
    whole = solve_heu(HeuInstance.from_json(base))
    split = solve_heu(HeuInstance.from_json(base), token_split=True)
    assert (whole.critical_time, split.critical_time) == (4, pytest.approx(1))
    mixing = solve_heu(HeuInstance.from_json({**base, "whole": [0]}), token_split=True)
    assert mixing.critical_time == 4


def test_token_split_cuts_into_whole_slices():
    base = {**CHAIN, "ctime": [0, 0, 2.1, 0.7], "M": [6, 2, 1], "budget": 36, "tokens": 512}
    solution = solve_heu(HeuInstance.from_json(base), token_split=True)
    fractions = [part.fraction for window in solution.windows for part in window]
    assert all((4 * fraction) % 1 == 0 for fraction in fractions)
    # Windows of 2.1 and 0.7 take two slices of 1 and none: half of operator 0 is left.
    assert solution.critical_time == pytest.approx(2)
    free = solve_heu(HeuInstance.from_json({**base, "tokens": 128 * 40}), token_split=True)
    assert free.critical_time == pytest.approx(4 - 2.1 - 0.7)
    entry = {**KNOWN["opt"][0]["instance"], "tokens": 512}
    schedule = solve_opt(OptInstance.from_json(entry), token_split=True)
    assert 18 <= schedule.critical_time <= 21
    cuts = [x for row in (*schedule.critical, *schedule.overlapped) for x in row]
    assert all((4 * x) % 1 == 0 for x in cuts)


def test_sizes_in_bytes_and_times_in_seconds():
    entry = KNOWN["heu"][4]["instance"]
    scaled = {
        **entry,
        "C": [c * 1.7e-4 for c in entry["C"]],
        "ctime": [c * 1.7e-4 for c in entry["ctime"]],
        "M": [m * 104857601 for m in entry["M"]],
        "budget": entry["budget"] * 104857601,
    }
    solution = solve_heu(HeuInstance.from_json(scaled))
    assert solution.critical_time == pytest.approx(KNOWN["heu"][4]["optimum"] * 1.7e-4)
    assert solution.peak <= scaled["budget"]


@pytest.mark.parametrize(
    ("budget", "constraint"), [(9, "static"), (15, "layer_outputs"), (20, "layer_rebuild")]
)
def test_heu_names_the_smallest_conflict(budget, constraint):
    conflict = solve_heu(heu(budget=budget)).conflict
    assert conflict is not None
    assert conflict.constraint == constraint
    assert conflict.floor > budget


def test_opt_names_the_operator_that_does_not_fit():
    entry = KNOWN["opt"][5]["instance"]
    conflict = solve_opt(OptInstance.from_json({**entry, "budget": 9})).conflict
    assert conflict is not None
    assert (conflict.constraint, conflict.floor) == ("operator_4", 10)


def test_opt_names_the_first_operator_that_cannot_be_reached():
    # 3 reads 0 and 2, each of which fits alone; holding 0 while 1 and 2 are made does not.
    data = {
        "C": [1, 1, 1, 1],
        "M": [5, 4, 1, 1],
        "deps": [[], [], [1], [0, 2]],
        "comm": [],
        "keep": [0, 0, 0, 1],
        "budget": 7,
    }
    solution = solve_opt(OptInstance.from_json(data))
    assert solution.status is SolveStatus.OPTIMAL  # 0 is dropped and computed again
    assert solution.critical_time == 5
    # 4 reads 1 and 3; to make 3 after 1, or 1 after 3, one more output must be held.
    tight = {
        "C": [1, 1, 1, 1, 1],
        "M": [5, 3, 5, 5, 4],
        "deps": [[], [0], [1], [2], [1, 3]],
        "comm": [],
        "budget": 12,
    }
    conflict = solve_opt(OptInstance.from_json(tight)).conflict
    assert conflict is not None
    assert (conflict.constraint, conflict.floor) == ("reach_operator_4", 13)
    enough = OptInstance.from_json({**tight, "budget": 13})
    assert solve_opt(enough).status is SolveStatus.OPTIMAL


def test_time_limit_is_no_answer():
    entry = KNOWN["opt"][0]["instance"]
    solution = solve_opt(OptInstance.from_json(entry), time_limit_s=0)
    assert solution.status is SolveStatus.TIME_LIMIT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"deps": [[2], [0], [1]]}, r"deps: cyclic: 0 -> 2 -> 1 -> 0"),
        ({"deps": [[1], [], [1]]}, r"deps\[0\]: operator 0 reads operator 1.*execution order"),
        ({"deps": [[], [0], [7]]}, r"deps\[2\]: expected an operator in 0\.\.2, got 7"),
        ({"deps": [[], [0]]}, r"deps: expected 3 entries, got 2"),
        ({"C": [4, -3, 5]}, r"C\[1\]: expected a finite number >= 0, got -3"),
        ({"C": []}, r"C: expected at least one operator"),
        ({"M": [2, 6]}, r"M: expected 3 entries, got 2"),
        ({"M": [2, "6", 1]}, r"M\[1\]: expected a number, got '6'"),
        ({"need": [1, 2, 1]}, r"need\[1\]: expected 0 or 1, got 2"),
        ({"comm": [3]}, r"comm: expected an operator in 0\.\.2, got 3"),
        ({"ctime": [1, 2, 3]}, r"ctime: expected 4 entries, got 3"),
        ({"tokens": 200}, r"tokens: expected a multiple of 128, got 200"),
        ({"nl": 0}, r"nl: expected a whole number >= 1, got 0"),
        ({"nb": 1.5}, r"nb: expected a whole number >= 1, got 1.5"),
        ({"budget": float("nan")}, r"budget: expected a finite number >= 0"),
        ({"fwd_phases": "yes"}, r"fwd_phases: expected true or false, got 'yes'"),
    ],
)
def test_bad_instances_name_the_field(changes, message):
    with pytest.raises(InputError, match=message):
        heu(**changes)


def test_missing_field_is_named():
    data = {k: v for k, v in CHAIN.items() if k != "budget"}
    with pytest.raises(InputError, match="budget: missing"):
        HeuInstance.from_json(data)


@pytest.mark.parametrize(
    ("keep", "windows", "message"),
    [
        ((1, 1, 0), [[]] * 5, "output is not kept"),
        ((1, 0, 1), [[]] * 5, "backward reads operator 1"),
        ((1, 0, 1), [[1], [], [], [], []], "communication 1 inside a window"),
        ((0, 0, 1), [[], [], [], [], [1]], "operator 1 reads operator 0, which is absent"),
        ((1, 0, 1), [[], [], [], [], [0, 1]], "operator 0 is kept or recomputed already"),
        ((0, 1, 1), [[], [0], [], [], []], "4 of work in a window of 0"),
        ((1, 1, 1), [[]] * 5, "peak 64 exceeds the budget 40"),
    ],
)
def test_replay_refuses_wrong_layer_plans(keep, windows, message):
    parts = [[Part(op=i) for i in row] for row in windows]
    with pytest.raises(InvalidPlan, match=message):
        replay_heu(heu(), [bool(k) for k in keep], parts)


def test_replay_refuses_wrong_schedules():
    instance = OptInstance.from_json(KNOWN["opt"][5])
    good = solve_opt(instance)
    assert replay_opt(instance, good.resident, good.critical, good.overlapped).peak == good.peak
    early = [list(row) for row in good.resident]
    early[1][3] = 1
    with pytest.raises(InvalidPlan, match="phase 1 starts with 3, never made"):
        replay_opt(instance, early, good.critical, good.overlapped)
    hidden = [list(row) for row in good.overlapped]
    hidden[4][1] = 1.0
    with pytest.raises(InvalidPlan, match="phase 4"):
        replay_opt(instance, good.resident, good.critical, hidden)
    idle = [[0.0] * 8 for _ in range(8)]
    with pytest.raises(InvalidPlan, match="phase 0: does not compute its own operator"):
        replay_opt(instance, good.resident, idle, good.overlapped)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"num_layers": 0, "stage_times": [[None, 1]]}, "num_layers: expected a whole number"),
        ({"num_layers": 2, "stage_times": []}, "stage_times: expected a list"),
        ({"num_layers": 2, "stage_times": [[None, -1]]}, r"stage_times\[0\]\[1\]"),
    ],
)
def test_bad_stage_tables_name_the_field(data, message):
    with pytest.raises(InputError, match=message):
        StageTimes.from_json(data)


@pytest.mark.parametrize(
    ("rows", "num_layers", "message"),
    [
        (((None, 1, 2), (None, None)), 3, r"stage_times\[1\]: stage 1 runs out of memory"),
        (((None, 1, 2), (None, 1, 2)), 5, "5 layers, but all stages together hold 4"),
        (((None, 1, 2), (None, 1, 2)), 1, "1 layers, but the stages need at least 2"),
        (((None, 1, None, 3), (None, 1, None, 3)), 3, "no combination"),
    ],
)
def test_infeasible_partition_says_why(rows, num_layers, message):
    table = StageTimes(rows=rows, num_layers=num_layers)
    for split in (split_exact(table), split_paper(table)):
        assert split.status is SolveStatus.INFEASIBLE
        assert message.replace("\\", "") in split.conflict
