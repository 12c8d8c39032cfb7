"""A group's problem: names, halves, memory between them; and what the checker must not accept."""

import dataclasses
from collections.abc import Iterator

import pytest
from memo_runtime import instructions
from memo_runtime.heap import HeapWatch
from memo_runtime.leases import StepCounters

from memo_compile.check.check_plan import check
from memo_compile.check.prove import prove
from memo_compile.driver.bind import bind_group
from memo_compile.driver.joint_knowledge import JointKnowledge
from memo_compile.driver.plan_step import plan_step
from memo_compile.driver.stages import PlannedStep, PlanRequest
from memo_compile.driver.step_planner import StepPlanner
from memo_compile.errors import InputError
from memo_compile.planners.place_step import placed_step
from memo_compile.reporting.html import render_html
from memo_compile.step.halves import half_keys, half_starts, halves_of_calls
from memo_compile.step.interludes import MIN_RANGE_BYTES, PAGE_BYTES, PlacedInterlude, Range
from memo_compile.step.joint_step import JointStep, joint_problem
from memo_compile.step.ordinary import passing_bytes
from memo_compile.step.plans import Plan
from memo_compile.step.problem import (
    CallKind,
    FixedBytes,
    Interlude,
    Phase,
    Problem,
    RegionProfile,
    StepCall,
    arena_buffers,
    call_starts,
)
from memo_compile.step.residency import ordinary_level
from memo_compile.step.simulate import peak_live_bytes
from memo_compile.units import format_bytes
from tests.steps.pictures import layered
from tests.steps.running import SETUPS, Ready

MEMBERS = 3


@pytest.fixture(scope="module")
def ready() -> Iterator[Ready]:
    """A step of two layers, of which groups are made."""
    return SETUPS["offload"].ready()


def of(num_members: int, **more: object) -> PlanRequest:
    graphs = (0,) * num_members
    return PlanRequest(joint=JointStep(graphs=graphs, fixed=FixedBytes(), **more))  # type: ignore[arg-type]


def planner(ready: Ready, request: PlanRequest) -> StepPlanner:
    assembly, joint = ready.assembly, request.joint
    assert joint is not None
    known = JointKnowledge(graphs=[assembly.known], joint=joint)
    return StepPlanner.of(known, assembly.config, request)


def planned(ready: Ready, policy: str, num_members: int = MEMBERS) -> PlannedStep:
    assembly = ready.assembly
    config = dataclasses.replace(assembly.config, policy=policy)
    return plan_step(assembly.lowered, config, of(num_members), assembly.known)


def complaints(ready: Ready, problem: Problem) -> str:
    """What the checker says of a group's step that moves."""
    made = planner(ready, of(MEMBERS))
    proof = prove(made.known.whole, made.problem, problem, made.recomputations(problem))
    return "\n".join(proof.problems)


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
    def problem(**more: object) -> Problem:
        joint = of(MEMBERS, **more).joint
        assert joint is not None
        return joint_problem([ready.lowered.problem], joint)

    kept, count = problem(), 2 * MEMBERS
    sizes = range(len(kept.halves[MEMBERS].results))
    gone = tuple((half, at, half) for half in range(MEMBERS, count - 1) for at in sizes)
    assert peak_live_bytes(problem(gone=gone)) < peak_live_bytes(kept)


MIB = 2**20


@pytest.fixture(scope="module")
def large(ready: Ready) -> Problem:
    """A group's step on a device that takes pages back, its buffers ten thousand times as large."""
    problem = planned(ready, "full-recompute").problem

    def larger(region: RegionProfile) -> RegionProfile:
        buffers = (
            dataclasses.replace(buffer, size_bytes=10_000 * buffer.size_bytes)
            for buffer in region.buffers
        )
        return dataclasses.replace(region, buffers=tuple(buffers))

    regions = {name: larger(region) for name, region in problem.regions.items()}
    return dataclasses.replace(problem, regions=regions, releases_pages=True)


def between(large: Problem, *interludes: Interlude) -> tuple[Problem, Plan]:
    """The step with code between its halves, placed."""
    problem = dataclasses.replace(large, interludes=interludes)
    return problem, placed_step(problem, solver="greedy")


def test_what_runs_between_the_halves_is_in_the_peak(large: Problem) -> None:
    most = 2**34
    problem, plan = between(large, Interlude(half=MEMBERS, most_bytes=most, left_bytes=MIB))
    assert plan.peak_bytes > most
    assert check(problem, plan).ok
    without = dataclasses.replace(problem, interludes=())
    ignored = dataclasses.replace(
        plan, peak_bytes=placed_step(without, solver="greedy").peak_bytes, dropped=()
    )
    assert any("the peak says" in text for text in check(problem, ignored).problems)


def test_dead_pages_of_the_arena_make_room_for_what_runs_between_the_halves(large: Problem) -> None:
    _, before = between(large)
    most = before.arena_bytes // 4
    problem, plan = between(large, Interlude(half=MEMBERS, most_bytes=most, left_bytes=0))
    (dropped,) = plan.dropped
    assert dropped, "the turn's interlude lies beside the last layer's transients"
    assert check(problem, plan).ok
    assert plan.peak_bytes == before.peak_bytes, "there was room for all of it"
    assert peak_live_bytes(problem) == peak_live_bytes(dataclasses.replace(problem, interludes=()))
    kept = dataclasses.replace(plan, dropped=((),))
    assert any("interlude before half 3 needs" in text for text in check(problem, kept).problems)


def test_pages_that_no_call_needs_any_more_go_for_good(large: Problem) -> None:
    late = Interlude(half=2 * MEMBERS - 1, most_bytes=1000 * MIB, left_bytes=0)
    problem, plan = between(large, late)
    assert plan.dropped == ((),)
    assert plan.resident_bytes[-1] < between(large)[1].resident_bytes[-1]
    assert check(problem, plan).ok


def test_pages_with_something_alive_must_not_go(large: Problem) -> None:
    problem, plan = between(large, Interlude(half=1, most_bytes=MIB, left_bytes=0))
    starts = call_starts(problem)
    line = starts[half_starts(problem)[1]] - 1
    alive = next(b for b in arena_buffers(problem) if b.start <= line < b.end)
    offset = plan.offsets[alive.id]
    wrong = dataclasses.replace(plan, dropped=(((offset, offset + 512),),))
    assert any(f"with {alive.id} at {offset}" in text for text in check(problem, wrong).problems)
    twice = dataclasses.replace(plan, dropped=(((0, 512), (0, 512)),))
    assert any("drops [0, 512)" in text for text in check(problem, twice).problems)
    many = dataclasses.replace(plan, dropped=((), ()))
    assert any("expected 1 interludes, got 2" in text for text in check(problem, many).problems)


def test_what_is_left_at_the_end_counts_there(large: Problem) -> None:
    _, before = between(large)
    for most, grows in ((MIB, False), (before.peak_bytes, True)):
        at_end = Interlude(half=2 * MEMBERS, most_bytes=most, left_bytes=most)
        problem, plan = between(large, at_end)
        assert check(problem, plan).ok
        assert (plan.peak_bytes > before.peak_bytes) == grows


def test_free_heap_goes_back_before_code_that_was_measured(
    ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small blocks that were freed would else lie beside what that code takes."""
    pause = Interlude(half=2, most_bytes=MIB, left_bytes=0)
    config, count = ready.assembly.config, MEMBERS
    found = plan_step(ready.lowered, config, of(count, interludes=(pause,)), ready.assembly.known)
    bound = bind_group(found, [ready.lowered.cut] * count, config)
    halves = [
        bound.members[member].backward if is_backward else bound.members[member].forward
        for member, is_backward in bound.order
    ]
    assert [half.is_paused for half in halves] == [False, True, False, False, False, False]
    trims: list[int] = []
    monkeypatch.setattr(instructions, "trim_heap", lambda: trims.append(1))
    step = bound.begin()
    running = instructions.Running(
        lease=step.frame,
        env=[],
        tables=[],
        resident_bytes=bound.members[0].arena_bytes,
        poison=False,
        counted=StepCounters(),
        heap=HeapWatch(allowed_bytes=0),
    )
    for half in halves:
        running.leave(half)
    assert len(trims) == 1
    step.frame.release()


def test_what_is_freed_again_counts_until_the_pause_that_frees_it(large: Problem) -> None:
    taken = Interlude(half=1, most_bytes=MIB, left_bytes=MIB)
    freed = Interlude(half=MEMBERS, most_bytes=0, left_bytes=-MIB)
    problem, plan = between(large, taken, freed)
    assert check(problem, plan).ok
    more = ordinary_level(problem) - ordinary_level(large)
    starts, halves = call_starts(problem), half_starts(problem)
    begin, end = starts[halves[1]] - 1, starts[halves[MEMBERS]]
    assert set(more[begin:end]) == {MIB}
    assert not more[:begin].any()
    assert not more[end:].any()
    assert dict(passing_bytes(problem)) == {halves[1] - 1: 0, halves[MEMBERS] - 1: 0}
    problem, plan = between(large, freed)
    assert any(f"frees {MIB} B more than" in text for text in check(problem, plan).problems)


@pytest.mark.parametrize(
    ("half", "most", "left"), [(0, 1, 0), (1, 1, 2), (1, -1, -2)], ids=["first", "left", "negative"]
)
def test_an_interlude_that_cannot_be_is_refused(half: int, most: int, left: int) -> None:
    with pytest.raises(InputError, match="interlude: expected a half before it"):
        Interlude(half=half, most_bytes=most, left_bytes=left)


@pytest.mark.parametrize(
    ("alive", "dead"),
    [
        ((), ((0, 10 * MIB),)),
        (((0, MIB),), ((MIB + PAGE_BYTES, 10 * MIB),)),
        (((2 * MIB, 10 * MIB),), ((0, 2 * MIB - PAGE_BYTES),)),
        (((MIB, 2 * MIB), (2 * MIB + 9, 9 * MIB + MIB // 2)), ((0, MIB - PAGE_BYTES),)),
        (((0, 10 * MIB), (MIB, 2 * MIB)), ()),
    ],
)
def test_what_is_dead_of_the_arena_goes_in_whole_pages(
    alive: tuple[Range, ...], dead: tuple[Range, ...]
) -> None:
    pause = PlacedInterlude(call=0, ordinary_bytes=0, alive=alive)
    assert tuple(pause.dead(10 * MIB)) == dead
    assert pause.stays_bytes(10 * MIB) == 10 * MIB - sum(end - start for start, end in dead)
    assert pause.dropped(10 * MIB, 10 * MIB) == ()
    for first, end in pause.dropped(10 * MIB, 10 * MIB - 1):
        assert (first, end) == (dead[-1][1] - MIN_RANGE_BYTES, dead[-1][1])


def test_the_report_has_a_lane_for_each_instance(ready: Ready) -> None:
    found = planned(ready, "full-offload")
    page = render_html(found.problem, found.plan)
    for member in range(MEMBERS):
        own = [call for call in found.problem.calls if call.member == member]
        copied = sum(call.copy.num_bytes for call in own if call.copy is not None) // 2
        assert f'<div class="name">instance {member} <span>' in page
        assert f"copies {format_bytes(copied)}" in page
    assert f"instance {MEMBERS}" not in page
    assert f"instance {MEMBERS - 1}: backward" in page
    assert "copied back from the host" in page
    assert "Instances of the group" not in render_html(*layered())


def test_no_step_is_no_group() -> None:
    with pytest.raises(InputError, match="at least 1 member, got 0"):
        JointStep(graphs=(), fixed=FixedBytes())
