"""Every way to break a small valid plan is caught by the checker, and named."""

import dataclasses
import time

import pytest

from memo_compile.check.check_plan import check, require_valid
from memo_compile.errors import InvalidPlan
from memo_compile.step.plans import CheckVerdict, Plan
from memo_compile.step.problem import (
    COPY_REGION,
    CallKind,
    Copy,
    OutsideBuffer,
    Phase,
    Problem,
    RegionBuffer,
    RegionOutput,
    RegionProfile,
    StepCall,
    Storage,
    copy_regions,
    reload_region,
)
from memo_compile.step.residency import ordinary_bytes
from tests.steps.byte_machine import roomy
from tests.steps.small import KIB, LAYER, LAYER_BACKWARD, call, moved, planned, two_layers


@pytest.fixture
def problem() -> Problem:
    return two_layers()


@pytest.fixture
def plan(problem) -> Plan:
    return planned(problem)


def complaints(problem: Problem, plan: Plan) -> str:
    verdict = check(problem, plan)
    assert not verdict.ok
    return "; ".join(verdict.problems)


def test_a_valid_plan_passes(problem, plan):
    verdict = check(problem, plan)
    assert verdict.ok, verdict
    assert verdict.num_buffers == 9
    assert verdict.num_reads == 7
    assert require_valid(problem, plan).check == verdict


def test_every_buffer_is_needed(problem, plan):
    for missing in plan.offsets:
        offsets = {key: value for key, value in plan.offsets.items() if key != missing}
        found = complaints(problem, dataclasses.replace(plan, offsets=offsets))
        assert f"{missing} has no offset" in found


def test_each_pair_of_live_buffers_must_be_apart(problem, plan):
    """Put each buffer on every other: caught exactly when both are alive at one time."""
    from memo_compile.step.problem import arena_buffers

    lives = {buffer.id: (buffer.start, buffer.end) for buffer in arena_buffers(problem)}
    num_caught = 0
    for name, (start, end) in lives.items():
        for other, (other_start, other_end) in lives.items():
            if name == other:
                continue
            broken = dataclasses.replace(
                plan, offsets={**plan.offsets, name: plan.offsets[other]}, arena_bytes=64 * KIB
            )
            text = "; ".join(check(problem, broken).problems)
            named = f"{name} and {other} share" in text or f"{other} and {name} share" in text
            assert named == (start < other_end and other_start < end), (name, other, text)
            num_caught += named
    assert num_caught > 10


@pytest.mark.parametrize("shift", [1, 256, -1])
def test_misaligned_offset(problem, plan, shift):
    offset = plan.offsets["L@1/y"] + shift
    assert f"L@1/y at {offset} is not aligned" in complaints(problem, moved(plan, L_1__y=offset))


def test_outside_the_arena(problem, plan):
    beyond = plan.arena_bytes - KIB
    assert "L@0/y at" in complaints(problem, moved(plan, L_0__y=beyond))
    assert "outside the arena" in complaints(problem, moved(plan, L_0__y=-512))


def test_lower_bound_above_the_arena(problem, plan):
    broken = dataclasses.replace(plan, lower_bound_bytes=plan.arena_bytes + 1)
    assert "lower bound" in complaints(problem, broken)


def test_peak_above_the_budget(problem, plan):
    assert check(problem, dataclasses.replace(plan, budget_bytes=plan.peak_bytes)).ok
    broken = dataclasses.replace(plan, budget_bytes=plan.peak_bytes - 1)
    assert "budget" in complaints(problem, broken)


def test_peak_that_hides_memory(problem, plan):
    broken = dataclasses.replace(plan, peak_bytes=plan.peak_bytes - 1)
    assert "the peak says" in complaints(problem, broken)


def test_resident_bytes_below_what_is_used(problem, plan):
    resident = (plan.arena_bytes, 0, *plan.resident_bytes[2:])
    broken = dataclasses.replace(plan, resident_bytes=resident)
    assert "uses the arena up to" in complaints(problem, broken)
    broken = dataclasses.replace(plan, resident_bytes=plan.resident_bytes[:-1])
    assert "one number per call" in complaints(problem, broken)


def test_a_life_that_is_longer_than_planned(problem, plan):
    """The plan was made for a transient that died earlier."""
    long = dataclasses.replace(LAYER.buffers[0], end=4)
    region = dataclasses.replace(LAYER, buffers=(long, LAYER.buffers[1]))
    tight = dataclasses.replace(LAYER, buffers=(dataclasses.replace(long, end=1), LAYER.buffers[1]))
    easy = dataclasses.replace(problem, regions={**problem.regions, "L": tight})
    short_plan = moved(planned(easy), L_0__t=0, L_0__y=0, L_1__y=4 * KIB, L_1__t=4 * KIB)
    hard = dataclasses.replace(problem, regions={**problem.regions, "L": region})
    assert "L@0/y and L@0/t share bytes" in complaints(hard, short_plan)


def test_a_reader_that_was_forgotten(problem, plan):
    """One more call reads x0 after the planner let it die."""
    late = dataclasses.replace(problem.calls[4], name="Lb@5", inputs=("x0", "g1"))
    late = dataclasses.replace(late, outputs=("g2", "w2"))
    longer = dataclasses.replace(problem, calls=(*problem.calls, late))
    good = planned(longer)
    assert good.check.ok
    # with the short problem's lives, the last layer's gradient may take the place of x0
    broken = moved(good, Lb_4__g=good.offsets["L@0/y"])
    assert "share bytes" in complaints(longer, broken)


def test_an_alias_keeps_its_storage(problem, plan):
    """A region that returns its input makes the input's bytes live as long as the output."""
    alias = dataclasses.replace(
        LAYER,
        name="A",
        buffers=(LAYER.buffers[0],),
        outputs=(dataclasses.replace(LAYER.outputs[0], storage=Storage.INPUT, index=0),),
    )
    calls = list(problem.calls)
    calls[1] = dataclasses.replace(calls[1], region="A")
    calls[4] = dataclasses.replace(calls[4], inputs=("x1", "g1"))
    aliased = dataclasses.replace(
        problem, regions={**problem.regions, "A": alias}, calls=tuple(calls)
    )
    good = planned(aliased)
    assert good.check.ok
    broken = moved(good, Lb_3__g=good.offsets["L@0/y"])
    assert "share bytes" in complaints(aliased, broken)


def test_an_invalid_plan_is_refused_with_its_name(problem, plan):
    broken = dataclasses.replace(moved(plan, L_1__y=1), name="graph7")
    with pytest.raises(InvalidPlan, match=r"plan graph7: .*L@1/y at 1 is not aligned"):
        require_valid(problem, broken)


def test_an_error_names_one_of_each_sort_of_faults():
    late = [f"L@{at} reads x{at} before it is made" for at in range(12)]
    verdict = CheckVerdict(problems=(*late, "peak 3 > budget 2"))
    assert str(verdict) == (
        "L@0 reads x0 before it is made (and 11 more such faults); peak 3 > budget 2"
    )


def test_memory_outside_the_arena_is_summed_line_by_line(problem):
    """Two kernels' own memory at one time, beside a value that a kernel left outside."""
    outside = tuple(
        OutsideBuffer(kind="aten.convolution", size_bytes=8 * KIB, start=start, end=start + 2)
        for start in (0, 1, 3)
    )
    layer = dataclasses.replace(
        LAYER,
        outside=outside,
        outputs=(RegionOutput(storage=Storage.OUTSIDE, size_bytes=4 * KIB),),
    )
    heavy = dataclasses.replace(problem, regions={**problem.regions, "L": layer})
    plan = planned(heavy)
    at_once = 2 * 8 * KIB + 2 * 4 * KIB
    assert plan.peak_bytes == plan.arena_bytes + at_once + KIB
    for less in (1, 4 * KIB, 8 * KIB):
        broken = dataclasses.replace(plan, peak_bytes=plan.peak_bytes - less)
        assert "L@1 needs" in complaints(heavy, broken)


@pytest.mark.parametrize("given_bytes", [8 * KIB, 2048 * KIB])
def test_a_gradient_that_came_in_counts_beside_what_its_last_reader_makes(problem, given_bytes):
    """The heap may keep the hole of what was freed inside a call, until that call has ended."""
    late = RegionOutput(storage=Storage.EXTERNAL, size_bytes=KIB, start=3)
    reader = dataclasses.replace(
        LAYER_BACKWARD, input_ends=(2, 2), outputs=(LAYER_BACKWARD.outputs[0], late)
    )
    problem = dataclasses.replace(
        problem, regions={**problem.regions, "Lb": reader}, tangents={"g": given_bytes}
    )
    plan = planned(problem)
    made, loss = KIB, 512
    assert ordinary_bytes(problem).most[3] == loss * problem.keeps_outputs + given_bytes + made
    assert ordinary_bytes(problem).after[3] == loss * problem.keeps_outputs + made
    assert check(problem, plan).ok
    broken = dataclasses.replace(plan, peak_bytes=plan.peak_bytes - 1)
    assert "Lb@3 needs" in complaints(problem, broken)


def test_eighty_layers_with_forty_copies_each_are_checked_within_its_time():
    names = [f"{letter}{i}" for i in range(80) for letter in "abcdefghij"]
    data = {name: RegionBuffer(name=name, size_bytes=512, start=0, end=1) for name in names}
    regions = dict(copy_regions([512]))
    calls: list[StepCall] = []
    back: list[StepCall] = []
    for i in range(80):
        mine = tuple(name for name in names if name[1:] == str(i))
        regions[f"F{i}"] = RegionProfile(
            name=f"F{i}",
            num_lines=1,
            buffers=tuple(data[name] for name in mine),
            input_ends=(),
            outputs=tuple(RegionOutput(storage=Storage.ARENA, index=at) for at in range(10)),
        )
        regions[f"B{i}"] = RegionProfile(
            name=f"B{i}", num_lines=1, buffers=(), input_ends=(1,) * 10, outputs=()
        )
        calls.append(call(f"F{i}", f"F{i}", Phase.FORWARD, (), mine))
        calls += [made for name in mine for made in _out(name, names.index(name))]
        back += [
            *(made for name in mine for made in _back(name, names.index(name))),
            call(f"B{i}", f"B{i}", Phase.BACKWARD, tuple(f"new.{name}" for name in mine), ()),
        ]
    large = Problem(regions=regions, calls=(*calls, *back), host_bytes=512 * len(names))
    plan = roomy(large)
    start = time.process_time()
    assert check(large, plan).ok
    assert time.process_time() - start < 1.5


def _out(name: str, at: int) -> tuple[StepCall, StepCall]:
    copy = Copy(start_bytes=0, end_bytes=512, host_offset=512 * at)
    copied = call(f"out.{name}", COPY_REGION, Phase.FORWARD, (name,), ())
    copied = dataclasses.replace(copied, kind=CallKind.OFFLOAD, copy=copy)
    end = call(f"wait.{copied.name}", COPY_REGION, Phase.FORWARD, (name,), ())
    return copied, dataclasses.replace(end, kind=CallKind.WAIT, waits_for=copied.name)


def _back(name: str, at: int) -> tuple[StepCall, StepCall]:
    copy = Copy(start_bytes=0, end_bytes=512, host_offset=512 * at)
    copied = call(f"back.{name}", reload_region(512), Phase.BACKWARD, (), (f"new.{name}",))
    copied = dataclasses.replace(copied, kind=CallKind.RELOAD, copy=copy)
    end = call(f"wait.{copied.name}", COPY_REGION, Phase.BACKWARD, (f"new.{name}",), ())
    return copied, dataclasses.replace(end, kind=CallKind.WAIT, waits_for=copied.name)


@pytest.mark.parametrize("releases", [False, True])
def test_an_update_that_borrows_more_than_the_peak_says_is_found(problem, releases):
    """State on the host: what its update borrows lies beside all gradients, and beside an arena
    whose pages stay."""
    fixed = dataclasses.replace(problem.fixed, update=2**20)
    updated = dataclasses.replace(problem, fixed=fixed, releases_pages=releases)
    right = planned(updated)
    assert check(updated, right).ok
    assert right.peak_bytes >= 2**20 + (0 if releases else right.arena_bytes)
    low = dataclasses.replace(right, peak_bytes=(2**20 if releases else right.peak_bytes) - 1)
    assert any("the update needs" in each for each in check(updated, low).problems)
