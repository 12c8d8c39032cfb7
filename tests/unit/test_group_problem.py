"""A group's problem: names, halves, memory between them; and what the checker must not accept."""

import dataclasses
from collections.abc import Iterator

import pytest

from memo_compile.check.check_plan import check
from memo_compile.check.prove import prove
from memo_compile.driver.knowledge import requested_problem
from memo_compile.driver.plan_step import plan_step
from memo_compile.driver.stages import PlannedStep, PlanRequest
from memo_compile.errors import InputError
from memo_compile.step.group import Group, grouped_whole
from memo_compile.step.halves import half_keys, half_starts, halves_of_calls
from memo_compile.step.problem import CallKind, FixedBytes, Interlude, Phase, Problem, StepCall
from memo_compile.step.residency import residency
from memo_compile.step.simulate import peak_live_bytes
from tests.steps.running import SETUPS, Ready

MEMBERS = 3


@pytest.fixture(scope="module")
def ready() -> Iterator[Ready]:
    """A step of two layers, of which groups are made."""
    return SETUPS["offload"].ready()


def of(num_members: int, **more: object) -> PlanRequest:
    return PlanRequest(group=Group(num_members=num_members, fixed=FixedBytes(), **more))  # type: ignore[arg-type]


def planned(ready: Ready, policy: str, num_members: int = MEMBERS) -> PlannedStep:
    assembly = ready.assembly
    config = dataclasses.replace(assembly.config, policy=policy)
    return plan_step(assembly.lowered, config, of(num_members), assembly.known)


def complaints(ready: Ready, problem: Problem) -> str:
    """What the checker says of a group's step that moves."""
    unmoved = requested_problem(ready.lowered, of(MEMBERS))
    known = ready.assembly.known.recomputations(problem, unmoved, MEMBERS)
    whole = grouped_whole(ready.lowered.whole, MEMBERS)
    return "\n".join(prove(whole, unmoved, problem, known).problems)


@pytest.mark.parametrize("policy", ["save", "full-offload", "full-recompute", "memo"])
def test_every_policy_makes_a_plan_that_the_checker_proves(ready: Ready, policy: str) -> None:
    found = planned(ready, policy)
    assert found.plan.check.ok
    assert complaints(ready, found.problem) == ""
    keys = half_keys(found.problem)
    assert keys == (
        *((Phase.FORWARD, member) for member in range(MEMBERS)),
        *((Phase.BACKWARD, member) for member in reversed(range(MEMBERS))),
    )
    of_calls = halves_of_calls(found.problem)
    assert list(of_calls) == sorted(of_calls)
    for call, half in zip(found.problem.calls, of_calls, strict=True):
        if call.kind in (CallKind.RUN, CallKind.RECOMPUTE):
            assert keys[half] == (call.phase, call.member)
        else:
            assert keys[half][0] is call.phase
    assert half_starts(found.problem)[-1] == len(of_calls)


def test_offloading_frees_the_frame_between_the_halves(ready: Ready) -> None:
    grown = {}
    for policy in ("save", "full-offload"):
        few, many = (planned(ready, policy, count).plan for count in (3, 6))
        grown[policy] = many.arena_bytes - few.arena_bytes
    # Three more members leave what is too small to move, and what no policy may move.
    assert grown["full-offload"] < 0.5 * grown["save"]


def test_a_prefetch_begins_in_the_half_before_its_reader(ready: Ready) -> None:
    problem = planned(ready, "full-offload").problem
    keys, of_calls = half_keys(problem), halves_of_calls(problem)
    early = [
        call.name
        for call, half in zip(problem.calls, of_calls, strict=True)
        if call.kind is CallKind.RELOAD and keys[half][1] != call.member
    ]
    assert early, "no copy runs beside the user's code"


def test_a_region_in_another_half_is_refused(ready: Ready) -> None:
    problem = planned(ready, "save").problem
    starts = half_starts(problem)
    calls = list(problem.calls)
    calls[starts[1] - 1], calls[starts[1]] = calls[starts[1]], calls[starts[1] - 1]
    assert "runs where the step without moves runs" in complaints(
        ready, dataclasses.replace(problem, calls=tuple(calls))
    )


def test_a_recomputation_in_another_half_is_refused(ready: Ready) -> None:
    problem = planned(ready, "full-recompute").problem
    at = next(
        at
        for at, call in enumerate(problem.calls)
        if call.kind is CallKind.RECOMPUTE and call.member == 0
    )
    moved = list(problem.calls)
    moved.insert(half_starts(problem)[MEMBERS] + 1, moved.pop(at))
    assert complaints(ready, dataclasses.replace(problem, calls=tuple(moved)))


def test_a_value_of_another_member_is_refused(ready: Ready) -> None:
    problem = planned(ready, "save").problem

    def swapped(call: StepCall) -> StepCall:
        inputs = tuple(
            f"2:{value.removeprefix('1:')}" if value.startswith("1:") else value
            for value in call.inputs
        )
        return dataclasses.replace(call, inputs=inputs)

    calls = tuple(
        swapped(call) if call.member == 1 and call.phase is Phase.BACKWARD else call
        for call in problem.calls
    )
    assert "must read" in complaints(ready, dataclasses.replace(problem, calls=calls))


def test_another_member_number_is_refused(ready: Ready) -> None:
    problem = planned(ready, "save").problem
    calls = (dataclasses.replace(problem.calls[0], member=7), *problem.calls[1:])
    said = complaints(ready, dataclasses.replace(problem, calls=calls))
    assert "of member 7, which the step has not got" in said


def test_results_that_are_gone_free_their_bytes(ready: Ready) -> None:
    kept = requested_problem(ready.lowered, of(MEMBERS))
    count = 2 * MEMBERS
    sizes = range(len(kept.halves[MEMBERS].results))
    gone = tuple((half, at, half) for half in range(MEMBERS, count - 1) for at in sizes)
    less = requested_problem(ready.lowered, of(MEMBERS, gone=gone))
    assert peak_live_bytes(less) < peak_live_bytes(kept)


def test_what_runs_between_the_halves_is_in_the_peak(ready: Ready) -> None:
    most = 2**24
    found = planned(ready, "full-offload")
    between = Interlude(half=MEMBERS, most_bytes=most, left_bytes=2**20)
    problem = dataclasses.replace(found.problem, interludes=(between,))
    plan = found.plan
    needs = residency(problem, plan.offsets, plan.arena_bytes)
    assert needs.peak_bytes > most
    ignored = check(problem, plan)
    assert any("the peak says" in text for text in ignored.problems)
    counted = dataclasses.replace(
        plan, resident_bytes=needs.resident_bytes, peak_bytes=needs.peak_bytes
    )
    assert check(problem, counted).ok


def test_one_step_is_no_group() -> None:
    with pytest.raises(InputError, match="at least 2 members, got 1"):
        Group(num_members=1, fixed=FixedBytes())
