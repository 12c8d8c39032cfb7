"""Weights on the host in a step program: where copies stand, and what the checker refuses."""

import dataclasses

import pytest

from memo_compile.check.check_moves import check_moves
from memo_compile.check.check_plan import check
from memo_compile.planners.host_weights import WeightCopies, all_on_host, weight_of
from memo_compile.planners.transfers import with_time
from memo_compile.step.hand_over import last_uses
from memo_compile.step.movable import StepCosts
from memo_compile.step.problem import (
    CallKind,
    FixedBytes,
    Into,
    Phase,
    Problem,
    RegionProfile,
    StepCall,
)
from memo_compile.step.serialise import from_json, to_json
from memo_compile.step.simulate import simulate
from memo_compile.step.timed import TimedProgram
from tests.steps.byte_machine import roomy
from tests.steps.parts import KIB, arena, buffer, external, region

SIZE = 3 * KIB - 4
"""Of a weight, which does not fill its buffer."""

REGIONS = {
    profile.name: profile
    for profile in (
        region("F", (buffer("y", KIB, 0, 2),), (2, 2), (arena(0),)),
        region("B", (buffer("x", KIB, 0, 2),), (2, 2, 2), (arena(0), external(512))),
    )
}


def call(name: str, phase: Phase, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> StepCall:
    return StepCall(
        name=name,
        region=name[0],
        phase=phase,
        inputs=inputs,
        outputs=outputs,
        layer_class="layer",
        instance=int(name[1:]),
    )


def three_layers() -> Problem:
    forward = [call(f"F{i}", Phase.FORWARD, (f"y{i}", f"w{i}"), (f"y{i + 1}",)) for i in range(3)]
    backward = [
        call(f"B{i}", Phase.BACKWARD, (f"g{i + 1}", f"y{i}", f"w{i}"), (f"g{i}", f"gw{i}"))
        for i in (2, 1, 0)
    ]
    return Problem(
        regions=REGIONS,
        calls=(*forward, *backward),
        inputs=("y0", "g3", "w0", "w1", "w2"),
        fixed=FixedBytes(parameters=10 * KIB),
        layer_weights={f"w{i}": SIZE for i in range(3)},
    )


@pytest.fixture
def original() -> Problem:
    return all_on_host(three_layers())


@pytest.fixture
def brought(original: Problem) -> Problem:
    return WeightCopies().copied_in(original)


def faults(original: Problem, moved: Problem) -> list[str]:
    return [*check(moved, roomy(moved)).problems, *check_moves(original, moved).problems]


def replaced(problem: Problem, name: str, **changes: object) -> Problem:
    calls = [
        dataclasses.replace(each, **changes) if each.name == name else each
        for each in problem.calls
    ]
    return dataclasses.replace(problem, calls=tuple(calls))


def names(problem: Problem) -> list[str]:
    return [each.name for each in problem.calls]


def test_a_weight_is_brought_before_each_pass_of_its_layer(original, brought):
    assert names(brought)[:3] == ["reload.loaded0.w0", "wait.reload.loaded0.w0", "F0"]
    assert names(brought)[-3:] == ["reload.loaded1.w0", "wait.reload.loaded1.w0", "B0"]
    assert len(brought.calls) == 6 + 2 * 5 + 2 - 2 + 2
    assert faults(original, brought) == []
    assert original.fixed.parameters == 10 * KIB - 3 * SIZE
    assert original.fixed.parameters_on_host == 3 * SIZE
    assert from_json(to_json(brought), Problem) == brought
    assert weight_of("loaded1.w0") == "w0"
    assert weight_of("reloaded.w0") == "reloaded.w0"


def test_copies_begin_early_where_memory_allows_it(original, brought):
    costs = StepCosts(
        region_s={"F": 1.0, "B": 2.0}, d2h_bytes_per_s=1.0, h2d_bytes_per_s=2.0 * SIZE
    )
    at_once = TimedProgram(brought, costs)
    assert at_once.timeline.stall_s == pytest.approx(3.0)
    roomy_plan = with_time(at_once, 10**9).program
    assert roomy_plan.timeline.stall_s == pytest.approx(1.0)  # the first weight of each half
    assert faults(original, roomy_plan.problem) == []
    order = names(roomy_plan.problem)
    assert order.index("reload.loaded0.w1") < order.index("F0")
    assert simulate(roomy_plan.problem, costs).step_s == pytest.approx(10.0)
    tight = with_time(at_once, at_once.peak_bytes).program
    assert tight.peak_bytes == at_once.peak_bytes
    assert faults(original, tight.problem) == []


def test_a_weight_is_in_use_until_its_copy_has_ended(brought):
    order, last = names(brought), last_uses(brought)
    assert last["w1"] == order.index("wait.reload.loaded1.w1")


def _without(problem: Problem, name: str) -> Problem:
    left = tuple(each for each in problem.calls if each.name != name)
    return dataclasses.replace(problem, calls=left)


def _behind_its_reader(problem: Problem) -> Problem:
    order = list(problem.calls)
    copy = [each for each in order if "reload.loaded1.w1" in each.name]
    left = [each for each in order if each not in copy]
    at = next(i for i, each in enumerate(left) if each.name == "B1") + 1
    return dataclasses.replace(problem, calls=(*left[:at], *copy, *left[at:]))


def _writing(problem: Problem) -> Problem:
    return replaced(problem, "F1", into=(Into(buffer=0, value="w2", offset_bytes=0),))


def _overwriting(problem: Problem) -> Problem:
    profile: RegionProfile = dataclasses.replace(problem.regions["F"], overwrites=(1,))
    wrong = dataclasses.replace(problem, regions={**problem.regions, "F": profile})
    return replaced(wrong, "F1", inputs=("y1", "w1"))


BUGS = {
    "another weight": (
        lambda p: replaced(p, "reload.loaded0.w1", inputs=("w2",)),
        "F1 reads loaded0.w1, which is w2, where it must read w1",
    ),
    "no wait": (
        lambda p: _without(p, "wait.reload.loaded0.w1"),
        "F1 reads loaded0.w1 before a wait for reload.loaded0.w1",
    ),
    "read over the link": (
        lambda p: replaced(p, "F1", inputs=("y1", "w1")),
        "F1 reads w1 from the wrong side of the link",
    ),
    "what was dropped": (
        lambda p: replaced(p, "B1", inputs=("g2", "y1", "loaded0.w1")),
        None,
    ),
    "too few bytes": (
        lambda p: replaced(
            p,
            "reload.loaded0.w1",
            copy=dataclasses.replace(p.calls[0].copy, end_bytes=SIZE - 1024),
        ),
        "nothing fills bytes",
    ),
    "too many bytes": (
        lambda p: replaced(
            p, "reload.loaded0.w1", copy=dataclasses.replace(p.calls[0].copy, end_bytes=4 * KIB)
        ),
        "uses host bytes",
    ),
    "bytes at another place": (
        lambda p: replaced(
            p,
            "reload.loaded0.w1",
            copy=dataclasses.replace(p.calls[0].copy, start_bytes=512, host_offset=0),
        ),
        "brings byte 0 to byte 512",
    ),
    "behind its reader": (_behind_its_reader, "B1 reads loaded1.w1 before it is made"),
    "an activation as a weight": (
        lambda p: replaced(p, "reload.loaded0.w1", inputs=("y1",)),
        "reload.loaded0.w1 reads y1 from the wrong side of the link",
    ),
    "written": (_writing, "writes into w2, a weight on the host"),
    "overwritten": (_overwriting, "writes over w1, which is not in the arena"),
    "another place": (
        lambda p: dataclasses.replace(p, host_weights=("w0", "w1")),
        "the moved step has other host_weights",
    ),
    "other sizes": (
        lambda p: dataclasses.replace(p, layer_weights={**p.layer_weights, "w1": 2 * SIZE}),
        "the moved step has other layer_weights",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_checker_refuses(bug, original, brought):
    inject, phrase = BUGS[bug]
    found = faults(original, inject(brought))
    if phrase is None:  # right, if its bytes are still there: it costs memory only
        assert found == []
    else:
        assert any(phrase in text for text in found), found


def test_reloads_of_weights_have_a_copy_kind(brought):
    kinds = {each.kind for each in brought.calls if each.name.startswith("reload.")}
    assert kinds == {CallKind.RELOAD}
