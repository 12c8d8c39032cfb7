"""Placement: problems small enough to draw, statuses, refusals, and the public hard instances."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from memo_compile.errors import ConfigError, InputError, InvalidPlan
from memo_compile.planners.placement import (
    Buffer,
    PlacementProblem,
    check_placement,
    find_violations,
    greedy,
    kernel,
    place,
    planner,
)
from memo_compile.planners.placement.compiled import has_numba
from memo_compile.planners.placement.effort import Effort
from memo_compile.planners.placement.files import parse_csv, read_problem
from memo_compile.planners.placement.instance import FREE, build_instance
from memo_compile.planners.placement.mip import mip_offsets
from memo_compile.planners.placement.portfolio import Searcher
from memo_compile.planners.solver import Engine, SolveStatus, available_engines

DATA = Path(__file__).parent.parent / "data" / "minimalloc"
# `low` overlaps both others, which do not overlap each other.
#   time 0 1 2 3
#   a    3 3 . .      b  . . 3 3      low . 3 3 .
DRAWN = (
    Buffer(id="a", lower=0, upper=2, size=3),
    Buffer(id="b", lower=2, upper=4, size=3),
    Buffer(id="low", lower=1, upper=3, size=3),
)


def problem(*buffers, **options):
    return PlacementProblem(buffers=buffers, **options)


@pytest.mark.parametrize("solver", ["auto", "greedy", "mip", "search"])
def test_the_drawn_problem_reaches_its_bound(solver):
    found = place(problem(*DRAWN), solver=solver, use_numba=False)
    check_placement(problem(*DRAWN), found)
    assert found.height_bytes == found.lower_bound_bytes == 6
    assert found.status is SolveStatus.OPTIMAL
    assert found.conflict == ()


def test_no_buffers_and_empty_buffers_take_no_room():
    assert place(problem()).status is SolveStatus.OPTIMAL
    found = place(problem(Buffer(id="e", lower=0, upper=1, size=0), DRAWN[0]))
    assert found.height_bytes == 3
    assert set(found.offsets) == {"e", "a"}


# Live bytes 8, but between two multiples of 4 there is one byte left above each `wide`, so: 9.
GAPPED = (
    Buffer(id="wide0", lower=0, upper=2, size=3, alignment=4),
    Buffer(id="wide1", lower=0, upper=2, size=3, alignment=4),
    Buffer(id="thin", lower=1, upper=3, size=2),
)


@pytest.mark.parametrize("solver", ["auto", "search", "mip"])
def test_a_bound_that_is_out_of_reach_is_raised_by_proof(solver):
    assert build_instance(problem(*GAPPED)).lower_bound() == 8
    found = place(problem(*GAPPED), solver=solver, use_numba=False)
    assert found.height_bytes == found.lower_bound_bytes == 9
    assert found.status is SolveStatus.OPTIMAL


def test_a_capacity_refuted_by_search_names_a_conflict_without_bystanders():
    bystanders = [Buffer(id=f"by{i}", lower=i, upper=i + 1, size=1) for i in range(5, 9)]
    found = place(problem(*GAPPED, *bystanders, capacity=8), use_numba=False)
    assert found.status is SolveStatus.INFEASIBLE
    assert found.conflict == ("thin", "wide0", "wide1")
    assert found.lower_bound_bytes == 9


def test_padding_to_the_alignment_is_part_of_the_bound():
    both = problem(
        Buffer(id="a", lower=0, upper=1, size=100),
        Buffer(id="b", lower=0, upper=1, size=300),
        alignment=512,
    )
    found = place(both)
    assert found.height_bytes == found.lower_bound_bytes == 512 + 100
    assert found.status is SolveStatus.OPTIMAL


def test_a_gap_lends_its_bytes_to_another_buffer():
    lender = Buffer(id="lender", lower=0, upper=10, size=8, gaps=((3, 6),))
    guest = Buffer(id="guest", lower=3, upper=6, size=8)
    assert place(problem(lender, guest)).height_bytes == 8


def test_fixed_offsets_stay_and_the_hole_below_is_used():
    fixed = Buffer(id="fixed", lower=0, upper=4, size=2, offset=4)
    free = Buffer(id="free", lower=1, upper=2, size=4)
    found = place(problem(fixed, free))
    assert found.offsets == {"fixed": 4, "free": 0}


def test_a_capacity_below_the_live_bytes_names_the_fewest_buffers():
    big = [Buffer(id=f"big{i}", lower=0, upper=2, size=6) for i in range(2)]
    small = [Buffer(id=f"small{i}", lower=0, upper=2, size=1) for i in range(5)]
    found = place(problem(*big, *small, capacity=11))
    assert found.status is SolveStatus.INFEASIBLE
    assert found.conflict == ("big0", "big1")
    assert found.lower_bound_bytes == 17
    assert found.offsets == {}


def test_a_fixed_offset_beyond_the_capacity_is_the_conflict():
    found = place(problem(Buffer(id="far", lower=0, upper=1, size=1, offset=9), capacity=5))
    assert found.status is SolveStatus.INFEASIBLE
    assert found.conflict == ("far",)


def test_out_of_time_keeps_the_greedy_placement():
    hard = read_problem(DATA / "I.1048576.csv", capacity=1048576)
    found = place(hard, time_limit_s=0.0)
    assert found.status is SolveStatus.TIME_LIMIT
    assert found.height_bytes > 1048576
    check_placement(hard, found, capacity=False)
    with pytest.raises(InvalidPlan, match="beyond the capacity 1048576"):
        check_placement(hard, found)


@pytest.mark.skipif(not has_numba(), reason="numba is an optional extra")
def test_a_small_buffer_that_stands_out_is_searched_with_the_large_ones(monkeypatch):
    """Where d stands over a, no place is left for the small one that lives beside both."""
    spans = {"a": (0, 2), "b": (0, 1), "d": (2, 4), "e": (3, 4)}
    large = [Buffer(id=name, lower=low, upper=up, size=400) for name, (low, up) in spans.items()]
    small = (
        Buffer(id="small", lower=1, upper=3, size=8),
        Buffer(id="alone", lower=4, upper=5, size=8),
    )
    instance = build_instance(PlacementProblem(buffers=(*large, *small)))
    parts, of_part = [], planner._of_part

    def first_in_the_way(answer, part, *effort):
        parts.append(part.tolist())
        found = of_part(answer, part, *effort)
        in_the_way = np.array([0, 400, 400, 0])
        return found if len(parts) > 1 else dataclasses.replace(found, offsets=in_the_way)

    monkeypatch.setattr(planner, "_of_part", first_in_the_way)
    stacked = np.array([0, 400, 800, 1200, 1600, 0])
    answer = planner._Answer(
        instance=instance, target=800, enough=800, offsets=stacked, bound=800, solver="greedy"
    )
    found = planner._large_first(answer, Effort(1.0), None)
    assert parts == [[True] * 4 + [False] * 2, [True] * 5 + [False]]
    assert found.height == 800


@pytest.mark.parametrize("seed", range(6))
def test_large_first_is_never_higher_and_leaves_fixed_ones_alone(seed):
    """Small ones among large ones, with and without a capacity, and one that is fixed."""
    rng = np.random.default_rng(seed)
    sizes = rng.choice([1, 2, 64, 128, 256, 512], size=150)
    starts = rng.integers(0, 60, size=150)
    ends = starts + rng.integers(1, 12, size=150)
    buffers = tuple(
        Buffer(id=str(at), lower=int(low), upper=int(up), size=int(size))
        for at, (low, up, size) in enumerate(zip(starts, ends, sizes, strict=True))
    )
    drawn = PlacementProblem(buffers=buffers)
    quick = place(drawn, solver="greedy")
    found = place(drawn, time_limit_s=1.0)
    check_placement(drawn, found)
    assert found.height_bytes <= quick.height_bytes
    within = dataclasses.replace(drawn, capacity=found.height_bytes)
    check_placement(within, place(within, time_limit_s=1.0))
    fixed = dataclasses.replace(buffers[0], offset=64)
    held = dataclasses.replace(drawn, buffers=(fixed, *buffers[1:]))
    assert place(held, time_limit_s=1.0).offsets[fixed.id] == 64


@pytest.mark.skipif(not has_numba(), reason="numba is an optional extra")
@pytest.mark.parametrize("name", ["B", "C", "F", "H", "I"])
def test_public_hard_instances_fit_their_capacity(name):
    hard = read_problem(DATA / f"{name}.1048576.csv", capacity=1048576)
    found = place(hard, time_limit_s=60)
    check_placement(hard, found)
    assert found.height_bytes <= 1048576
    assert found.solver == "search"


@pytest.mark.skipif(not has_numba(), reason="numba is an optional extra")
@pytest.mark.parametrize("best_fit", [False, True])
@pytest.mark.parametrize("name", ["B", "F", "I"])
def test_compiled_greedy_places_as_the_plain_one_does(monkeypatch, name, best_fit):
    instance = build_instance(read_problem(DATA / f"{name}.1048576.csv"))
    rng = np.random.default_rng(0)
    fixed = np.where(rng.random(instance.num_buffers) < 0.1, 64 * rng.integers(100), FREE)
    align = rng.choice((1, 3, 64), instance.num_buffers)
    for case in (instance, dataclasses.replace(instance, fixed=fixed, align=align)):
        sequence = rng.permutation(case.num_buffers)
        found = []
        for is_loaded in (False, True):
            with monkeypatch.context() as patched:
                patched.setattr(greedy, "numba_is_loaded", lambda: is_loaded)  # noqa: B023
                found.append(greedy.place_in_order(case, sequence, best_fit=best_fit).tolist())
        assert found[0] == found[1]


def deep_step(seed, num_layers=150, num_buffers=14, lines=12):
    """One layer's buffers again and again, and of each layer a copy that ends within the next."""
    rng = np.random.default_rng(seed)
    lower = rng.integers(0, lines - 1, num_buffers)
    upper, size = rng.integers(lower + 1, lines + 1), rng.integers(1, 9, num_buffers)
    buffers = []
    for layer in range(num_layers):
        at = layer * lines
        for number, (low, high, bytes_) in enumerate(zip(lower, upper, size, strict=True)):
            name = f"{layer}.{number}"
            buffers.append(Buffer(id=name, lower=at + low, upper=at + high, size=int(bytes_)))
        middle = at + lines // 2
        copied = int(rng.integers(1, 4))
        buffers.append(Buffer(id=f"{layer}", lower=middle, upper=middle + lines, size=copied))
    return problem(*buffers)


@pytest.mark.skipif(not has_numba(), reason="numba is an optional extra")
@pytest.mark.parametrize("seed", [23, 35])
def test_what_greedy_leaves_above_the_bound_is_placed_earlier(seed):
    step = deep_step(seed)
    quick, repaired = place(step, solver="greedy"), place(step)
    assert quick.height_bytes > quick.lower_bound_bytes
    assert repaired.height_bytes == repaired.lower_bound_bytes
    assert repaired.solver == "greedy"
    check_placement(step, repaired)
    assert place(step).offsets == repaired.offsets


@pytest.mark.skipif(not has_numba(), reason="numba is an optional extra")
@pytest.mark.parametrize("effort_s", [0.0, 0.01, 1.0])
def test_a_repair_is_never_higher_and_keeps_what_is_fixed(effort_s):
    step = deep_step(47)  # greedy misses its bound by a byte, and so does its repair
    kept = dataclasses.replace(step.buffers[700], offset=5)
    step = problem(*step.buffers[:700], kept, *step.buffers[701:])
    quick = place(step, solver="greedy", time_limit_s=effort_s)
    repaired = place(step, time_limit_s=effort_s)
    assert repaired.height_bytes <= quick.height_bytes
    assert repaired.offsets[kept.id] == 5
    check_placement(step, repaired)


@pytest.mark.parametrize("name", ["B", "C", "H"])
def test_public_hard_instances_in_plain_python(name):
    hard = read_problem(DATA / f"{name}.1048576.csv", capacity=1048576)
    found = place(hard, solver="search", time_limit_s=60, use_numba=False)
    check_placement(hard, found)
    assert found.height_bytes <= 1048576


def test_time_without_a_limit_is_a_limit():
    hard = read_problem(DATA / "B.1048576.csv", capacity=1048576)
    found = place(hard, solver="search", time_limit_s=float("inf"), use_numba=False)
    check_placement(hard, found)


def test_a_run_ends_with_its_effort_however_many_nodes_it_may_try():
    instance = build_instance(read_problem(DATA / "I.1048576.csv"))
    searcher = Searcher(instance, use_numba=False)
    rank = next(searcher.ranks())
    outcome, _ = searcher.run(instance.lower_bound(), rank, 10**9, jump=False, max_s=0.01)
    assert outcome == kernel.LIMIT
    assert 0.01 <= searcher.seconds < 0.1  # as the work is counted, whatever the clock says


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks of a machine that has hours of other work between any two looks at them."""
    hours = itertools.count(step=3600)
    monkeypatch.setattr("time.perf_counter", lambda: float(next(hours)))
    monkeypatch.setattr("time.monotonic", lambda: float(next(hours)))


def test_a_busy_machine_places_as_a_quiet_one(request):
    hard = read_problem(DATA / "I.1048576.csv")
    quiet = place(hard, solver="search", time_limit_s=0.02, use_numba=False)
    assert quiet.height_bytes > quiet.lower_bound_bytes  # the limit ended it
    request.getfixturevalue("hurried")
    busy = place(hard, solver="search", time_limit_s=0.02, use_numba=False)
    assert busy.offsets == quiet.offsets
    assert busy.height_bytes < place(hard, solver="greedy", time_limit_s=0.0).height_bytes


def test_a_search_that_the_clock_ends_says_so(monkeypatch, caplog):
    hard = read_problem(DATA / "I.1048576.csv")
    hours = itertools.count(step=3600)
    monkeypatch.setattr("time.thread_time", lambda: float(next(hours)))
    check_placement(hard, place(hard, solver="search", use_numba=False))
    assert "ended by the clock" in caplog.text


def test_what_compiling_takes_is_not_searched_less(monkeypatch, caplog):
    hard = read_problem(DATA / "B.1048576.csv")
    clock, made = [0.0], planner.Searcher

    def compiled_for_an_hour(*args):
        clock[0] += 3600.0
        return made(*args)

    monkeypatch.setattr("time.thread_time", lambda: clock[0])
    monkeypatch.setattr(planner, "Searcher", compiled_for_an_hour)
    found = place(hard, solver="search", time_limit_s=2.0, use_numba=False)
    assert found.height_bytes == found.lower_bound_bytes
    assert "clock" not in caplog.text


@pytest.mark.parametrize("engine", available_engines())
def test_mip_proves_the_optimum_with_each_engine(engine: Engine):
    twins = [Buffer(id=f"t{i}", lower=0, upper=3, size=2) for i in range(3)]
    instance = build_instance(problem(*DRAWN, *twins))
    start = place(problem(*DRAWN, *twins), solver="greedy").offsets
    result = mip_offsets(
        instance,
        np.array([start[buffer.id] for buffer in instance.buffers]),
        instance.lower_bound(),
        Effort(float("inf")),
        engine=engine,
    )
    assert result.status is SolveStatus.OPTIMAL
    assert instance.height(result.offsets) == 12
    assert not find_violations(instance.problem, instance.offsets(result.offsets))


class TestChecker:
    def test_it_names_every_kind_of_defect(self):
        asked = problem(
            Buffer(id="a", lower=0, upper=2, size=4, alignment=4, offset=8),
            Buffer(id="b", lower=1, upper=3, size=4),
            Buffer(id="c", lower=2, upper=3, size=1),
            capacity=10,
        )
        found = " | ".join(find_violations(asked, {"a": 6, "b": 8, "x": 0}))
        for part in (
            "x: offset for an unknown buffer",
            "c: has no offset",
            "a: offset 6 is not a multiple of 4",
            "a: offset 6, but 8 is fixed",
            "b: ends at 12, beyond the capacity 10",
            "a [6, 10) and b [8, 12) overlap at time 1",
        ):
            assert part in found

    def test_it_sees_overlaps_only_while_both_live(self):
        gap = problem(
            Buffer(id="a", lower=0, upper=9, size=4, gaps=((3, 6),)),
            Buffer(id="b", lower=3, upper=6, size=4),
        )
        assert find_violations(gap, {"a": 0, "b": 0}) == ()
        later = problem(gap.buffers[0], Buffer(id="b", lower=3, upper=7, size=4))
        assert "overlap at time 6" in find_violations(later, {"a": 0, "b": 0})[0]

    def test_it_refuses_a_negative_offset_and_a_wrong_height(self):
        with pytest.raises(InvalidPlan, match="offset -1 is negative"):
            check_placement(problem(DRAWN[0]), {"a": -1})


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"lower": 2, "upper": 2}, "'a': lower: expected lower < upper, got 2 >= 2"),
            ({"size": -1}, "'a': size: expected at least 0 bytes, got -1"),
            ({"alignment": 0}, "'a': alignment: expected at least 1 byte, got 0"),
            ({"offset": -4}, "'a': offset: expected at least 0 bytes, got -4"),
            ({"offset": 3, "alignment": 2}, "'a': offset: 3 is not a multiple of 2"),
            ({"gaps": ((1, 1),)}, "'a': gaps: expected lower < upper, got 1-1"),
            ({"gaps": ((1, 9),)}, "'a': gaps: expected ascending spans inside"),
            ({"gaps": ((0, 4),)}, "'a': gaps: they leave no time"),
        ],
    )
    def test_buffers(self, fields, message):
        with pytest.raises(InputError, match=message.replace("(", r"\(")):
            Buffer(**{"id": "a", "lower": 0, "upper": 4, "size": 1, **fields})

    def test_problems(self):
        with pytest.raises(InputError, match="buffer 'a': id: used twice"):
            problem(DRAWN[0], DRAWN[0])
        with pytest.raises(InputError, match="'a' and 'b': offset: their fixed offsets overlap"):
            problem(
                Buffer(id="a", lower=0, upper=2, size=4, offset=0),
                Buffer(id="b", lower=1, upper=2, size=4, offset=3),
            )
        with pytest.raises(InputError, match="offset: 4 is not a multiple of the alignment 512"):
            problem(Buffer(id="a", lower=0, upper=2, size=4, offset=4), alignment=512)

    def test_options(self):
        with pytest.raises(ConfigError, match="solver: expected one of auto, greedy, mip, search"):
            place(problem(), solver="cplex")
        with pytest.raises(ConfigError, match="time_limit_s: expected at least 0"):
            place(problem(), time_limit_s=-1)


class TestFiles:
    def test_all_columns(self, caplog):
        text = (
            "buffer,start,end,size,alignment,gaps,hint,offset\n"
            "a,0,9,4,2,3-5 6-7@0:2,,4\n\n"
            "b, 1 ,2,4,,,8,\n"
        )
        first, second = parse_csv(text).buffers
        # `end` is the last time of the life; a gap with a window keeps the buffer's bytes.
        assert (first.upper, first.gaps, first.alignment) == (10, ((3, 5),), 2)
        assert (first.offset, second.offset, second.hint) == (4, None, 8)
        assert "gaps: 1 with a window are not used" in caplog.text

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "f:1: empty"),
            ("id,lower,size\n", "f:1: column 'upper' is missing"),
            ("id,lower,upper,size,ofset\n", "f:1: unknown column 'ofset'"),
            ("id,lower,upper,size,size\n", "f:1: column 'size' occurs twice"),
            ("id,lower,upper,size\na,0,1\n", "f:2: expected 4 cells, got 3"),
            ("id,lower,upper,size\na,0,1,x\n", "f:2: size: expected an integer, got 'x'"),
            ("id,lower,upper,size\na,0,1,1.5\n", "f:2: size: expected an integer, got '1.5'"),
            ("id,lower,upper,size\na,0,1,-5\n", "f:2: buffer 'a': size: expected at least 0"),
            ("id,lower,upper,size\na,3,3,5\n", "f:2: buffer 'a': lower: expected lower < upper"),
            ("id,lower,upper,size\na,0,1,5\na,0,1,5\n", "f:3: id: 'a' was used on line 2 already"),
            ("id,lower,upper,size\n,0,1,5\n", "f:2: id: empty"),
            ("id,lower,upper,size,gaps\na,0,9,5,2_3\n", "f:2: gaps: expected spans such as 7-8"),
            (
                "id,lower,upper,size,offset\na,0,2,5,0\nb,1,2,5,4\n",
                r"f:3: offset: 'b' at 4 overlaps 'a' at 0 \(line 2\)",
            ),
        ],
    )
    def test_refusals_name_the_line(self, text, message):
        with pytest.raises(InputError, match=message):
            parse_csv(text, "f")

    def test_unreadable_files(self, tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            read_problem(tmp_path / "none.csv")
        (tmp_path / "bytes.csv").write_bytes(b"id\xff\xfe")
        with pytest.raises(InputError, match="not UTF-8"):
            read_problem(tmp_path / "bytes.csv")

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ("{", "p.json:1: not JSON"),
            ([], "problem: expected an object, got list"),
            ({"buffers": 3}, "buffers: expected a list, got int"),
            ({"buffers": [{"id": "a"}]}, r"buffers\[0\].lower: is missing"),
            (
                {"buffers": [{"id": "a", "lower": 0, "upper": 1, "size": "4"}]},
                r"buffers\[0\].size: expected an integer, got '4'",
            ),
            ({"buffers": [], "arena": 1}, "problem.arena: unknown field"),
        ],
    )
    def test_json_refusals_name_the_field(self, tmp_path, data, message):
        path = tmp_path / "p.json"
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        with pytest.raises(InputError, match=message):
            read_problem(path)
