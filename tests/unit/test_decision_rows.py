"""The rows of a plan whose tensors move: each says what the plan does with its tensor, and why."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from memo_compile.driver.report_rows import moved_rows
from memo_compile.planners.policy import choose
from memo_compile.step.movable import MovableStep
from memo_compile.step.plans import Decision
from memo_compile.step.problem import Phase, Problem
from memo_compile.step.simulate import peak_live_bytes
from tests.steps.movable import KIB, movable_step, recomputer


def place(problem: Problem) -> Any:
    return SimpleNamespace(peak_bytes=peak_live_bytes(problem))


def rows(step: MovableStep, policy: str, **options: Any) -> tuple[Decision, ...]:
    choice = choose(
        step,
        policy=policy,
        place=place,
        budget_bytes=None,
        host_budget_bytes=None,
        recompute=recomputer(step),
        **options,
    )
    return moved_rows(step, choice, {})


def without_reads_of(step: MovableStep, name: str) -> MovableStep:
    """No backward of a layer reads ``name`` any more."""
    calls = tuple(
        replace(call, inputs=tuple(v for v in call.inputs if not v.startswith(name)))
        if call.phase is Phase.BACKWARD and call.region == "Lb"
        else call
        for call in step.problem.calls
    )
    lowered = step.problem.regions["Lb"]
    ends = lowered.input_ends[: len(lowered.input_ends) - 1]
    regions = {**step.problem.regions, "Lb": replace(lowered, input_ends=ends)}
    return replace(step, problem=replace(step.problem, calls=calls, regions=regions))


def test_a_tensor_that_nothing_reads_has_no_row():
    step = movable_step(3)
    assert [row.decision for row in rows(step, "full-offload")] == ["OFFLOAD"] * 5
    found = rows(without_reads_of(step, "a"), "full-offload")
    assert [row.tensor.partition(" ")[0][0] for row in found] == ["x", "b", "c", "d"]


def test_each_row_has_the_reason_of_its_own_layers():
    found = rows(movable_step(6, bytes_per_s=256 * KIB), "memo", alpha=0.25)
    said = {decision: set() for decision in ("SAVE", "OFFLOAD", "RECOMPUTE")}
    for row in found:
        said[row.decision].add(row.reason)
    assert all(reason.startswith("in 2 of 6 layers: kept") for reason in said["SAVE"])
    assert all(reason.startswith("in 4 of 6 layers: ") for reason in said["RECOMPUTE"])
    assert not said["SAVE"] & (said["OFFLOAD"] | said["RECOMPUTE"])
