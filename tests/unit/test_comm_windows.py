"""Where a step waits for other ranks, what runs before, and what that costs in simulated time."""

from dataclasses import replace

import pytest

from memo_compile.check.check_moves import check_moves
from memo_compile.check.check_plan import check
from memo_compile.planners.begin_order import gathered_bytes, in_begin_order
from memo_compile.planners.least_seconds import least_of
from memo_compile.planners.moves import apply_moves
from memo_compile.planners.place_step import place_step
from memo_compile.planners.recompute_windows import (
    filled,
    measured_collectives,
    num_collectives,
    window_recompute_s,
)
from memo_compile.planners.transfers import at_once, late, with_time
from memo_compile.step.communication import comm_bytes, handed_on, value_sizes
from memo_compile.step.joint_step import joint_costs
from memo_compile.step.movable import Action, Mode, Moves, Schedule
from memo_compile.step.problem import CallKind, Phase, Problem
from memo_compile.step.program_text import program_text
from memo_compile.step.serialise import from_json, to_json
from memo_compile.step.simulate import peak_live_bytes, simulate
from memo_compile.step.timed import TimedProgram
from tests.steps.among_ranks import (
    GATHER,
    REDUCE,
    among_ranks,
    costs,
    issue,
    made,
    sharded,
    sharded_costs,
    wait,
)
from tests.steps.movable import recomputer
from tests.steps.parallel_gpt import ROWS, SLOTS, parallel_step
from tests.steps.parts import KIB, call
from tests.steps.small import two_layers

ROOMY = 1 << 30


def names(problem):
    return [call.name for call in problem.calls]


def test_a_wait_stands_before_the_first_reader():
    assert names(late(among_ranks())) == [
        *("A", "reduce@1", "wait.reduce@1", "B", "E"),
        *("Bb", "gather@5", "W", "wait.gather@5", "Ab"),
    ]


def test_a_recomputation_that_stands_before_the_reader_runs_before_the_wait():
    """The last call that reads the collective's input is W: there the input's memory is free."""
    problem = among_ranks(recomputes=True)
    assert names(late(problem))[5:] == ["Bb", "gather@5", "W", "wait.gather@5", "R", "Ab"]
    better = filled(TimedProgram(late(problem), costs()), limit_bytes=ROOMY).problem
    assert names(better)[5:] == ["Bb", "gather@5", "W", "R", "wait.gather@5", "Ab"]
    assert simulate(better, costs()).step_s == simulate(late(problem), costs()).step_s - 1


@pytest.mark.parametrize("holds_inputs", [False, True])
def test_a_wait_of_the_forward_comes_before_the_copies_of_the_backward(holds_inputs):
    """The forward's result is the sum: nobody waits for it there."""
    step = parallel_step(
        dict.fromkeys(SLOTS, KIB),
        dict.fromkeys(ROWS, 1.0),
        num_rows=2,
        num_layers=2,
        copy_bytes_per_s=KIB,
        comm_bytes_per_s=KIB,
        returns_sum=True,
    )
    copied = Mode(actions=(Action.OFFLOAD,) * len(SLOTS))
    moves = Moves(modes=(copied,) * 2, schedule=Schedule(layers=9))
    moved = late(apply_moves(step, moves, recomputer(step)), holds_inputs=holds_inputs)
    places = names(moved)
    first = next(at for at, own in enumerate(moved.calls) if own.kind is CallKind.RELOAD)
    assert first < moved.calls.index(next(own for own in moved.calls if own.name == "Hb"))
    assert places.index("wait.reduce.y2@1") < first
    assert check(moved, place_step(moved, solver="greedy")).ok


def two_gathers() -> Problem:
    """Two gathers in flight at once; between their waits W runs, and R behind both."""
    problem = among_ranks(recomputes=True)
    second = issue("gather@6", "gather", Phase.BACKWARD, "d2", "c2")
    at = names(problem).index("gather@5")
    calls = (
        *problem.calls[:at],
        replace(problem.calls[at - 1], name="Bb2", outputs=("d2",)),
        GATHER,
        second,
        wait(GATHER, "e"),
        call("W", "W", Phase.BACKWARD, ("e", "x1"), ("w1",)),
        wait(second, "e2"),
        call("R", "R", Phase.BACKWARD, ("in",), ("s",), kind=CallKind.RECOMPUTE),
        call("Ab", "Ab", Phase.BACKWARD, ("e2", "s"), ("w0",)),
    )
    return replace(problem, calls=calls)


@pytest.mark.parametrize(
    ("seconds", "room", "end", "step_s"),
    [
        (1.0, ROOMY, ["W", "R", "wait.gather@6", "Ab"], 12.0),
        (3.0, ROOMY, ["R", "wait.gather@5", "W", "wait.gather@6", "Ab"], 12.0),
        (3.0, 0, ["W", "R", "wait.gather@6", "Ab"], 14.0),
    ],
)
def test_a_recomputation_hides_behind_as_many_waits_as_it_is_long(seconds, room, end, step_s):
    """The first gather stalls for two seconds, the other for one more; room: as little as works."""
    problem, known = two_gathers(), costs()
    known = replace(known, region_s={**known.region_s, "R": seconds})
    limit_bytes = room or peak_live_bytes(at_last_wait(problem))
    better = filled(TimedProgram(problem, known), limit_bytes=limit_bytes).problem
    assert names(better)[-len(end) :] == end
    assert simulate(better, known).step_s == step_s
    assert peak_live_bytes(better) <= limit_bytes
    assert check(better, place_step(better, solver="greedy")).ok


def test_a_recomputation_does_not_pass_the_beginning_of_what_hides_it():
    """The first gather stalls for a second, beside X; the second, which begins later, for two."""
    problem = two_gathers()
    by_name = {call.name: call for call in problem.calls}
    aside = call("X", "Bb", Phase.BACKWARD, ("g",), ("other",))
    order = ("Bb2", "gather@5", "X", "wait.gather@5", "W", "gather@6", "wait.gather@6", "R", "Ab")
    calls = problem.calls[: names(problem).index("Bb2")]
    calls = (*calls, *(aside if name == "X" else by_name[name] for name in order))
    problem, known = replace(problem, calls=calls), costs()
    known = replace(known, region_s={**known.region_s, "R": 3.0})
    better = filled(TimedProgram(problem, known), limit_bytes=ROOMY).problem
    assert names(better)[-4:] == ["gather@6", "R", "wait.gather@6", "Ab"]
    assert simulate(better, known).step_s == simulate(problem, known).step_s - 2


def at_last_wait(problem: Problem) -> Problem:
    """R before the wait that it stands behind."""
    calls = list(problem.calls)
    at = names(problem).index("R")
    calls[at - 1 : at + 1] = calls[at], calls[at - 1]
    return replace(problem, calls=tuple(calls))


def test_nothing_is_moved_where_more_would_be_alive():
    problem = late(among_ranks(recomputes=True))
    peak = peak_live_bytes(problem)
    assert filled(TimedProgram(problem, costs()), limit_bytes=peak - 1).problem == problem


def test_nothing_is_moved_where_it_gains_nothing():
    """The collective ends while W runs."""
    problem = late(among_ranks(recomputes=True))
    assert (
        filled(TimedProgram(problem, costs(comm_bytes_per_s=4 * KIB)), limit_bytes=ROOMY).problem
        == problem
    )


def test_waiting_at_once_is_what_the_step_was():
    problem = among_ranks(recomputes=True)
    assert at_once(late(problem)) == problem
    assert at_once(problem) == problem


def test_a_step_of_one_device_is_left_alone():
    problem = two_layers()
    assert late(problem) is problem
    assert at_once(problem) == problem
    assert num_collectives(problem) == 0


def test_the_lanes_of_a_step_among_ranks():
    problem, seconds = among_ranks(recomputes=True), costs()
    waiting = simulate(problem, seconds)
    assert (waiting.step_s, waiting.hidden_comm_s, waiting.exposed_comm_s) == (11.0, 0.0, 4.0)
    assert waiting.stall_s == 0.0
    hidden = simulate(
        filled(TimedProgram(late(problem), seconds), limit_bytes=ROOMY).problem, seconds
    )
    assert (hidden.step_s, hidden.hidden_comm_s, hidden.exposed_comm_s) == (9.0, 2.0, 2.0)
    lanes = [span.name for span in hidden.spans if span.lane == "communication"]
    assert lanes == ["reduce@1", "gather@5"]


def test_measured_seconds_count_and_the_others_are_declared():
    """The gather takes three seconds, whatever its bytes; the reduction two, as they say."""
    problem, measured = among_ranks(), replace(costs(), collective_s={"gather": 3.0})
    found = simulate(problem, measured)
    assert found.step_s == simulate(problem, costs()).step_s + 1.0
    lengths = {own.name: own.end_s - own.start_s for own in found.spans if "@" in own.name}
    assert lengths["gather@5"] == 3.0
    assert lengths["reduce@1"] == 2.0
    assert measured_collectives(problem, measured) == 1
    assert measured_collectives(problem, costs()) == 0
    assert from_json(to_json(measured), type(measured)) == measured


@pytest.mark.parametrize(
    ("slowdown", "work_s", "step_s"),
    [(1.0, 1.0, 9.0), (1.5, 1.0, 9.0), (1.5, 3.0, 10.0 + 2 / 3)],
)
def test_ranks_that_talk_slow_computation_down(slowdown, work_s, step_s):
    """W runs beside the gather of two seconds, whole or until that has ended; all else alone."""
    slowed = replace(costs(), comm_slowdown=slowdown)
    slowed = replace(slowed, region_s={**slowed.region_s, "W": work_s})
    problem = late(among_ranks())
    assert simulate(problem, slowed).step_s == pytest.approx(step_s)
    least = least_of(problem, slowed).step_s
    assert least_of(problem, replace(slowed, comm_slowdown=1.0)).step_s <= least
    assert least <= simulate(problem, slowed).step_s * (1 + 1e-12)
    assert from_json(to_json(slowed), type(slowed)) == slowed


def test_graphs_of_one_step_keep_their_own_seconds():
    """Also where only the second one talks to other ranks."""
    alone, talks = replace(costs(), comm_bytes_per_s=None), costs(7.0)
    joined = joint_costs([alone, replace(talks, collective_s={"gather": 3.0})])
    (name,) = joined.collective_s
    assert name in joined.region_s
    assert joined.comm_s(name, 70) == 3.0
    assert joined.comm_s("another", 70) == 10.0
    assert joint_costs([alone, alone]).collective_s is None


def gathered_twice() -> Problem:
    """``in`` is gathered for E twice, and A runs before it."""
    first, second = (issue(f"gather.{n}", "gather", Phase.FORWARD, "in", f"{n}.c") for n in "ab")
    problem = among_ranks()
    calls = (
        *(first, wait(first, "a"), second, wait(second, "b")),
        call("A", "A", Phase.FORWARD, ("x",), ("x1",)),
        call("F", "F", Phase.FORWARD, ("x1", "a", "b"), ("z",)),
        call("E", "E", Phase.FORWARD, ("z",), ("loss",)),
        call("Bb", "Bb", Phase.BACKWARD, ("g",), ("d",)),
    )
    regions = {**problem.regions, "F": made("F", KIB, 3)}
    return replace(problem, regions=regions, calls=calls, inputs=("in", "x", "g"))


def test_what_is_gathered_twice_is_waited_for_by_its_reader():
    """A runs before both waits, though the second gather reads what the first one does."""
    problem = gathered_twice()
    slowed = replace(costs(), comm_slowdown=2.0, collective_s={"gather": 1.0})
    slowed = replace(slowed, region_s={**slowed.region_s, "F": 1.0})
    at = {call.name: call for call in problem.calls}
    order = ("gather.a", "gather.b", "A", "wait.gather.a", "wait.gather.b", "F", "E", "Bb")
    found = simulate(replace(problem, calls=tuple(map(at.__getitem__, order))), slowed)
    assert least_of(problem, slowed).step_s == pytest.approx(found.step_s)


def test_no_order_of_the_step_is_faster_than_its_least_seconds():
    keeps_all = among_ranks()
    least = least_of(keeps_all, costs()).step_s
    orders = keeps_all, late(keeps_all), at_once(keeps_all), late(keeps_all, holds_inputs=True)
    assert least == min(simulate(order, costs()).step_s for order in orders)
    recomputes = filled(
        TimedProgram(late(among_ranks(recomputes=True)), costs()), limit_bytes=ROOMY
    ).problem
    assert least <= simulate(recomputes, costs()).step_s


def test_what_is_recomputed_in_windows_is_counted():
    problem = among_ranks(recomputes=True)
    better = filled(TimedProgram(late(problem), costs()), limit_bytes=ROOMY).problem
    assert window_recompute_s(problem, costs()) == 0.0
    assert window_recompute_s(better, costs()) == 1.0
    assert num_collectives(better) == 2


@pytest.mark.parametrize("order", [late, at_once, lambda problem: problem])
def test_each_order_is_proved_and_fits(order):
    problem = among_ranks()
    ordered = order(problem)
    assert check_moves(problem, ordered).ok
    plan = place_step(ordered, solver="greedy")
    assert check(ordered, plan).ok, check(ordered, plan)


def test_a_collective_holds_its_input_and_output():
    problem = among_ranks()
    assert comm_bytes(problem, GATHER) == 4 * KIB
    assert comm_bytes(problem, REDUCE) == 4 * KIB
    sizes = value_sizes(problem)
    assert sizes["z0"] == sizes["q0"] == sizes["p0"] == 4 * KIB
    assert sizes["e"] == 4 * KIB
    assert handed_on(problem) == {"p0", "q0", "c"}


def test_the_program_shows_beginnings_and_waits():
    text = program_text(late(among_ranks()))
    assert "issue                gather@5  gather  d -> c\n" in text
    assert "issue                reduce@1  reduce  p0 -> q0, in place\n" in text
    assert "comm_wait            gather@5 -> e\n" in text
    (beside,) = (line for line in text.splitlines() if "|" in line)
    assert beside.startswith("  W ")
    assert beside.endswith("| among ranks d")


def test_a_file_holds_it_all():
    problem = late(among_ranks(recomputes=True))
    assert from_json(to_json(problem), Problem) == problem
    assert from_json(to_json(costs()), type(costs())) == costs()


def test_a_file_of_one_device_says_nothing_of_ranks():
    assert "comm" not in to_json(replace(costs(), comm_bytes_per_s=None))
    assert "comm" not in to_json(place_step(two_layers(), solver="greedy"))


def begun(problem):
    return [call.name for call in problem.calls if call.kind is CallKind.ISSUE]


@pytest.mark.parametrize("converts", [False, True])
def test_gathers_begin_in_one_order(converts):
    """Before the scatter of the layer before, whatever bytes and seconds there are."""
    problem = sharded(converts=converts)
    order = ["gather.v0", "gather.v1", "gather.v2", "gather.u2", "gather.u1", "scatter.2"]
    order += ["gather.u0", "scatter.1", "scatter.0"]
    some = [in_begin_order, late, at_once, lambda own: in_begin_order(late(own))]
    some += [
        lambda own, limit=limit: (
            with_time(TimedProgram(late(own), sharded_costs()), limit).program.problem
        )
        for limit in (0, ROOMY)
    ]
    for ordered in some:
        moved = ordered(problem)
        assert begun(moved) == order
        assert check_moves(problem, moved).ok, check_moves(problem, moved)
        assert check(moved, place_step(moved, solver="greedy")).ok
    names_of = names(late(problem))
    assert names_of.index("F0") < names_of.index("gather.v1") < names_of.index("F1")


def test_what_is_gathered_runs_ahead_of_its_layer():
    """The first gather of each half is seen, and the last scatter: the rest is hidden."""
    problem, known = late(sharded()), sharded_costs()
    assert simulate(problem, known).exposed_comm_s == 9
    better = with_time(TimedProgram(problem, known), ROOMY).program.problem
    assert simulate(better, known).exposed_comm_s == 3
    assert least_of(problem, known).step_s == simulate(better, known).step_s
    assert peak_live_bytes(better) > peak_live_bytes(problem)


def test_gathers_run_no_further_ahead_than_bytes_allow():
    """Two layers' weights, though a third would hide more; and no more than there is room for."""
    problem, known = late(sharded(6, again=False)), sharded_costs(3.0)
    better = with_time(TimedProgram(problem, known), ROOMY).program.problem
    places = names(better)
    for at in range(2, 6):
        assert places.index(f"gather.v{at}") > places.index(f"wait.gather.v{at - 2}")
    assert gathered_bytes(problem) == 4 * KIB
    peak = peak_live_bytes(problem)
    small = with_time(TimedProgram(problem, known), peak).program.problem
    assert peak_live_bytes(small) == peak
    assert simulate(small, known).step_s < simulate(problem, known).step_s


def test_a_scattered_gradient_is_held_where_there_is_room():
    problem, known = late(sharded(again=False)), sharded_costs()
    better = with_time(TimedProgram(problem, known), ROOMY).program.problem
    assert names(problem).index("wait.scatter.2") < names(problem).index("B1")
    assert names(better).index("wait.scatter.2") == names(better).index("B1") + 1
    small = with_time(TimedProgram(problem, known), 0).program.problem
    assert peak_live_bytes(small) == peak_live_bytes(problem)
