"""What must not be done with memory that other ranks read or write: the checker refuses it."""

import dataclasses

import pytest

from memo_compile.check.check_moves import check_moves
from memo_compile.check.check_plan import check
from memo_compile.check.check_program import foreign_calls
from memo_compile.check.second_gathers import without_second_gathers
from memo_compile.planners.begin_order import gathers_of, in_begin_order
from memo_compile.planners.gather_again import gathered_again
from memo_compile.planners.place_step import place_step
from memo_compile.planners.transfers import late, with_time
from memo_compile.step.problem import CallKind, Into
from memo_compile.step.simulate import peak_live_bytes
from memo_compile.step.tilings import WholeStep
from memo_compile.step.timed import TimedProgram
from tests.steps.among_ranks import (
    BACKWARD,
    FORWARD,
    among_ranks,
    layout,
    sharded,
    sharded_costs,
)
from tests.steps.bugs import dropped, expect, named, replaced, with_calls
from tests.steps.byte_machine import is_right, roomy
from tests.steps.parts import KIB, call


def faults(moved, plan=None):
    """What the checker says; without a plan, on one in which no buffers share bytes."""
    of_plan = check(moved, roomy(moved) if plan is None else plan).problems
    return [*of_plan, *check_moves(among_ranks(), moved).problems]


def works(moved, plan=None):
    """What the machine of cells says of the same."""
    return is_right(among_ranks(), moved, roomy(moved) if plan is None else plan)


def swapped(problem, first, second):
    calls = list(problem.calls)
    here, there = named(problem, first), named(problem, second)
    calls[here], calls[there] = calls[there], calls[here]
    return with_calls(problem, tuple(calls))


@pytest.fixture(params=[lambda problem: problem, late], ids=["at once", "late"])
def problem(request):
    return request.param(among_ranks())


def test_a_right_step_passes(problem):
    assert faults(problem) == []
    assert works(problem)
    plan = place_step(problem, solver="greedy")
    assert faults(problem, plan) == []
    assert works(problem, plan)


def test_a_reader_before_its_wait():
    for moved, words in (
        (swapped(late(among_ranks()), "wait.gather@5", "Ab"), "Ab reads e before it is"),
        (swapped(among_ranks(), "wait.reduce@1", "B"), "B reads z0 before it is made"),
    ):
        expect(faults(moved), words)
        assert not works(moved)


@pytest.mark.parametrize(("reader", "value", "name"), [("W", "c", "gather@5"), ("E", "q0", "")])
def test_a_reader_of_what_is_in_flight(reader, value, name):
    """By the name that the beginning gives: legal after the wait only."""
    moved = late(among_ranks())
    at = named(moved, reader)
    moved = replaced(moved, at, inputs=(value, *moved.calls[at].inputs[1:]))
    found = check(moved, roomy(moved)).problems
    if name:
        expect(found, f"{reader} reads {value} before a wait for {name}")
        assert not works(moved)
    else:
        assert not found


def test_a_reader_of_what_was_overwritten(problem):
    moved = replaced(problem, named(problem, "E"), inputs=("p0",))
    expect(faults(moved), "E reads p0, which reduce@1 overwrites")
    assert not works(moved)


@pytest.mark.parametrize("name", ["wait.reduce@1", "wait.gather@5"])
def test_a_wait_is_missing(problem, name):
    issue = name.removeprefix("wait.")
    expect(faults(dropped(problem, named(problem, name))), f"{issue} is never waited for")
    expect(faults(dropped(problem, named(problem, name))), f"{name} is missing")


def test_a_wait_that_cannot_be(problem):
    """For what was not begun, twice, or without the input that the collective reads."""
    at = named(problem, "wait.gather@5")
    not_begun = dropped(problem, named(problem, "gather@5"))
    expect(faults(not_begun), "wait.gather@5 waits for gather@5, but it was not issued before")
    again = dataclasses.replace(problem.calls[at], name="again", outputs=("e2",))
    twice = with_calls(problem, (*problem.calls[: at + 1], again, *problem.calls[at + 1 :]))
    expect(faults(twice), "again waits for gather@5, but it was waited for before")
    expect(faults(twice), "again is no wait of the step without moves")
    moved = replaced(problem, at, inputs=("c", "x1"))
    expect(faults(moved), "wait.gather@5 waits for gather@5, which holds ('c', 'd'), with")


@pytest.mark.parametrize("value", ["d", "c"])
def test_a_write_while_it_is_in_flight(value):
    """Into the input, or the output, between the beginning and the wait."""
    moved = late(among_ranks())
    at = named(moved, "gather@5") + 1
    into = (Into(buffer=0, value=value, offset_bytes=0),)
    writer = call("X", "Bb", BACKWARD, ("g",), ("other",), into=into)
    moved = with_calls(moved, (*moved.calls[:at], writer, *moved.calls[at:]))
    expect(
        check(moved, roomy(moved)).problems, f"X writes into {value} while gather@5 is in flight"
    )


@pytest.mark.parametrize("owner", ["Bb/y", "gather@5/e"])
def test_memory_is_used_again_while_it_is_in_flight(owner):
    """A call between beginning and wait makes something where the collective reads or writes."""
    moved = late(among_ranks())
    at = named(moved, "gather@5") + 1
    more = call("X", "Bb", BACKWARD, ("g",), ("other",))
    used = with_calls(moved, (*moved.calls[:at], more, *moved.calls[at:]))
    plan = roomy(used)
    plan = dataclasses.replace(plan, offsets={**plan.offsets, "X/y": plan.offsets[owner]})
    expect(check(used, plan).problems, f"X/y and {owner} share bytes while both are alive")
    assert works(used)
    assert not works(used, plan)


def test_collectives_that_change_places():
    """Other ranks begin them in the other order: nobody would ever hear an answer."""
    problem = among_ranks()
    first = dataclasses.replace(
        problem.calls[named(problem, "gather@5")], name="second@6", inputs=("g",), outputs=("c2",)
    )
    at = named(problem, "gather@5")
    two = with_calls(problem, (*problem.calls[:at], first, *problem.calls[at:]))
    other = swapped(two, "second@6", "gather@5")
    assert is_right(two, two, roomy(two))
    assert not is_right(two, other, roomy(other))
    found = check_moves(two, other).problems
    expect(found, "gather@5 runs where the step without moves runs second@6")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": CallKind.RUN}, "gather@5 is a run of gather in the backward"),
        ({"phase": FORWARD}, "gather@5 is a issue of gather in the forward"),
        ({"region": "Bb"}, "gather@5 is a issue of Bb in the backward"),
    ],
)
def test_a_beginning_is_not_that_of_the_graphs(changes, words):
    problem = among_ranks()
    whole = WholeStep(calls=problem.calls, halves=problem.halves, tilings={})
    assert foreign_calls(whole, problem) == ()
    expect(foreign_calls(whole, replaced(problem, named(problem, "gather@5"), **changes)), words)


def test_a_wait_is_not_that_of_the_graphs():
    problem = among_ranks()
    whole = WholeStep(calls=problem.calls, halves=problem.halves, tilings={})
    moved = replaced(problem, named(problem, "wait.gather@5"), waits_for="reduce@1")
    expect(foreign_calls(whole, moved), "waits for reduce@1, expected gather@5")


def placed_before(problem, name, other):
    calls = list(problem.calls)
    moving = calls.pop(named(problem, name))
    calls.insert([call.name for call in calls].index(other), moving)
    return with_calls(problem, tuple(calls))


@pytest.mark.parametrize(
    ("name", "before", "words"),
    [
        ("gather.u1", "to.u1", "gather.u1 reads u1.s before it is made"),
        ("gather.u2", "L", "L of the forward comes after the backward has begun"),
        ("F2", "wait.gather.v2", "F2 reads v2 before it is made"),
        ("gather.u1", "wait.gather.u1", "gather.u1 begins behind scatter.2, on other ranks"),
        ("gather.u0", "gather.u1", "gather.u0 begins behind gather.u2, on other ranks"),
        ("to.v1", "to.v0", ""),
    ],
)
def test_a_gather_elsewhere(name, before, words):
    """It may begin wherever what it reads is there and all ranks keep their order."""
    problem = sharded(converts=True)
    ordered = with_time(TimedProgram(late(problem), sharded_costs()), 1 << 30).program.problem
    moved = placed_before(ordered, name, before)
    found = [*check_moves(problem, moved).problems, *check(moved, roomy(moved)).problems]
    if not words:
        assert not found
        assert is_right(in_begin_order(problem), moved, roomy(moved))
    elif "ranks" in words:
        assert any("on other ranks before it" in own for own in found), found
        assert not is_right(in_begin_order(problem), moved, roomy(moved))
    else:
        expect(found, words)


def test_a_gathered_weight_is_overwritten_before_its_last_reader():
    problem = sharded()
    moved = with_time(TimedProgram(late(problem), sharded_costs()), 1 << 30).program.problem
    plan = roomy(moved)
    plan = dataclasses.replace(
        plan, offsets={**plan.offsets, "gather.u0/v": plan.offsets["gather.u1/v"]}
    )
    expect(check(moved, plan).problems, "share bytes while both are alive")
    assert not is_right(in_begin_order(problem), moved, plan)


def test_what_is_gathered_again_is_the_same():
    """Of all layers but the last, whose weight the backward reads first."""
    kept = sharded(converts=True, again=False)
    problem = gathered_again(kept)
    assert begun_again(problem) == ["again.gather.v1", "again.gather.v0"]
    whole = WholeStep(calls=kept.calls, halves=kept.halves, tilings={})
    assert graph_faults(whole, problem) == []
    moved = with_time(TimedProgram(late(problem), sharded_costs()), 1 << 30).program.problem
    assert check_moves(problem, moved).ok
    assert is_right(in_begin_order(problem), moved, roomy(moved))
    assert peak_live_bytes(late(problem)) < peak_live_bytes(late(kept))
    for name, changes, words in (
        ("again.to.v0", {"inputs": ("s1",)}, "B0 reads ('g1', 'x0', 'v1'), expected ('g1'"),
        ("again.to.v0", {"region": "F"}, "again.to.v0 is no call of the step's graphs, nor one"),
        ("B1", {"inputs": ("g2", "s0", "again.v1")}, "B1 computes with {'s0'}, which is gathered"),
        ("B1", {"inputs": ("g2", "x1", "again.v0")}, "B1 reads ('g2', 'x1', 'again.v0'), expected"),
    ):
        expect(graph_faults(whole, replaced(problem, named(problem, name), **changes)), words)


def test_what_the_backward_computes_with_is_not_gathered_again():
    """It might be written there. The others are gathered again all the same."""
    kept = sharded(converts=True, again=False)
    reader = call("X", "convert", BACKWARD, ("s0",), ("x.s0",))
    kept = dataclasses.replace(kept, calls=(*kept.calls, reader))
    problem = gathered_again(kept)
    assert begun_again(problem) == ["again.gather.v1"]
    whole = WholeStep(calls=kept.calls, halves=kept.halves, tilings={})
    assert graph_faults(whole, problem) == []
    moved = late(problem)
    assert check_moves(problem, moved).ok
    assert is_right(in_begin_order(problem), moved, roomy(moved))


@pytest.mark.parametrize("size_bytes", [512, KIB])
def test_what_comes_before_a_sum_is_no_conversion(size_bytes):
    """An embedding's parts are scattered, or summed: that gathers nothing, and stays in place."""
    problem = sharded(converts=True, again=False)
    brought = dataclasses.replace(problem.regions["shard"], output_layouts=(layout(size_bytes),))
    problem = dataclasses.replace(problem, regions={**problem.regions, "shard": brought})
    assert gathers_of(problem) == {}
    assert gathered_again(problem) is problem
    assert in_begin_order(problem) is problem
    moved = late(problem)
    assert check_moves(problem, moved).ok, check_moves(problem, moved)


def begun_again(problem):
    return [own.name for own in problem.calls if own.name.startswith("again.gather")]


def graph_faults(whole, problem):
    kept, faults = without_second_gathers(whole, problem)
    return [*faults, *foreign_calls(whole, kept)]
