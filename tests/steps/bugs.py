"""What the tests of injected bugs share: the steps, mutations, and what a complaint must say."""

import dataclasses
from functools import cache

import pytest

from memo_compile.check.check_moves import check_moves
from memo_compile.check.check_plan import check
from memo_compile.planners.place_step import place_step
from memo_compile.step.plans import Plan
from memo_compile.step.problem import CallKind, Phase, Problem, StepCall
from tests.steps.byte_machine import is_right, roomy
from tests.steps.moved import SHAPES, Shape

OFFLOAD, RELOAD, WAIT = CallKind.OFFLOAD, CallKind.RELOAD, CallKind.WAIT
RECOMPUTE, RUN = CallKind.RECOMPUTE, CallKind.RUN


@cache
def shape_of(name: str) -> Shape:
    return SHAPES[name]()


@cache
def plan_of(name: str) -> Plan:
    return place_step(
        dataclasses.replace(shape_of(name).moved, releases_pages=True), solver="greedy"
    )


def faults(shape: Shape, moved: Problem, plan: Plan | None = None) -> list[str]:
    """What the checker says; without a plan, on one in which no buffers share bytes."""
    of_plan = check(moved, roomy(moved) if plan is None else plan).problems
    return [*of_plan, *check_moves(shape.original, moved, shape.recomputations).problems]


def works(shape: Shape, moved: Problem, plan: Plan | None = None) -> bool:
    plan = roomy(moved) if plan is None else plan
    return is_right(
        shape.original,
        moved,
        plan,
        recomputations=shape.recomputations,
        used_bytes=shape.used_bytes,
    )


def is_ordered(moved: Problem) -> bool:
    """The forward is one call of autograd and the backward another."""
    phases = [call.phase for call in moved.calls]
    return phases == sorted(phases, key=lambda phase: phase is Phase.BACKWARD)


def with_calls(moved: Problem, calls: tuple[StepCall, ...]) -> Problem:
    return dataclasses.replace(moved, calls=calls)


def replaced(moved: Problem, index: int, **changes) -> Problem:
    call = dataclasses.replace(moved.calls[index], **changes)
    return with_calls(moved, (*moved.calls[:index], call, *moved.calls[index + 1 :]))


def dropped(moved: Problem, index: int) -> Problem:
    return with_calls(moved, moved.calls[:index] + moved.calls[index + 1 :])


def named(problem: Problem, name: str) -> int:
    return next(i for i, call in enumerate(problem.calls) if call.name == name)


def calls_of(*kinds: CallKind, shapes=tuple(SHAPES)) -> list:
    """(shape, index of a call of these kinds), each with a readable test id."""
    return [
        pytest.param(shape, index, id=f"{shape}: {call.name}")
        for shape in shapes
        for index, call in enumerate(shape_of(shape).moved.calls)
        if call.kind in kinds
    ]


def expect(found: list[str], *phrases: str) -> None:
    """Some complaint has one of the phrases in it."""
    assert any(phrase in text for phrase in phrases for text in found), found
