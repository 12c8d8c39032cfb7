"""Steps under a bound in bytes: small models, what a case asks for, and runs that cases share."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

import memo_compile
from memo_compile.config import resolve
from memo_compile.driver.plan_step import plan_step
from memo_compile.driver.stages import PlanRequest
from memo_compile.errors import Infeasible
from memo_compile.reporting import state
from memo_compile.step.plans import Plan
from tests import models
from tests.models import ModelCase
from tests.numerics.closeness import Reference
from tests.numerics.traced import TracedStep
from tests.numerics.training import (
    ATEN,
    Run,
    adamw,
    assert_planned,
    without_dropout,
)

STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a step is given, and in how many tiles of tokens its wide chains run."""

    batch: int = 1
    tokens: int = 32
    tiles: int = 1
    granule: int = 4
    """Of 32 tokens: eight groups, so that every alpha of MEMO's splits them in another place."""


SHAPES = {
    "sequence": Shape(),
    "odd-batch": Shape(batch=2, tokens=15, tiles=4, granule=1),
    "tiled-batch": Shape(batch=2, tiles=4, granule=1),
}
"""A batch's rows are sequences, one of which can be copied while the other is recomputed."""

MODELS: Mapping[str, Callable[..., ModelCase]] = {
    "llama": functools.partial(models.llama, num_layers=3),
    "gpt2": functools.partial(models.gpt2, num_layers=3, dropout=0.0),
    "gemma": functools.partial(models.gemma2, num_layers=4),
    "mixtral": functools.partial(models.mixtral, num_layers=3),
    "t5": functools.partial(models.t5, num_layers=2, dropout=0.0),
}

DECISIONS = (
    "save",
    "full-recompute",
    "full-offload",
    "greedy",
    "auto",
    "memo",
    "memo-0",
    "memo-0.125",
    "memo-0.25",
    "memo-0.5",
    "memo-1",
)
"""Policies; behind ``memo-`` stands the part of the tokens that is offloaded."""

BUDGETS = ("floor", "half", "none")
"""The least that the decision can do with, half-way from there to keeping all, no bound."""

SCHEDULES = ("poison", "poison,copies-early", "poison,copies-late", "copies-late")

MOVES_ONLY = ("full-offload", "memo-1")
"""What they compute is what policy ``save`` computes, bit for bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training run under memo."""

    model: str
    decision: str
    budget: str = "none"
    schedule: str = "poison"
    shape: str = "sequence"
    lowering: str = "aten"

    @property
    def policy(self) -> str:
        return "memo" if self.decision.startswith("memo") else self.decision

    def options(self) -> dict[str, object]:
        """Without the budget."""
        alpha = self.decision.removeprefix("memo-")
        return {
            **ATEN,
            "lowering": self.lowering,
            "policy": self.policy,
            "alpha": None if alpha == self.decision else float(alpha),
            "debug": self.schedule,
            "costs": "roofline",
            "token_granule": SHAPES[self.shape].granule,
            "token_tiles": SHAPES[self.shape].tiles,
        }

    def __str__(self) -> str:
        schedule = self.schedule.replace(",", "+")
        return f"{self.model}-{self.decision}-{self.budget}-{schedule}-{self.shape}"


def covering(factors: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Few combinations in which every pair of values of two factors occurs; always the same ones.

    Each combination takes the first pair still missing and fills up with what adds most pairs.
    """
    names = list(factors)
    missing = {
        ((first_name, first), (second_name, second))
        for first_name, second_name in itertools.combinations(names, 2)
        for first in factors[first_name]
        for second in factors[second_name]
    }
    ordered = sorted(missing)
    found = []
    while missing:
        row = dict(next(pair for pair in ordered if pair in missing))
        for name in names:
            if name not in row:
                row[name] = max(factors[name], key=functools.partial(_gain, row, name, missing))
        found.append({name: row[name] for name in names})
        missing -= _pairs(found[-1])
    return found


def _gain(row: Mapping[str, str], name: str, missing: set[object], value: str) -> int:
    return sum(pair in missing for pair in _pairs({**row, name: value}))


def _pairs(row: Mapping[str, str]) -> set[object]:
    """All pairs of ``row``, both ways round."""
    return set(itertools.permutations(row.items(), 2))


@functools.cache
def model_case(name: str, shape: str = "sequence") -> ModelCase:
    torch.manual_seed(0)
    model, inputs, loss = MODELS[name](seq=SHAPES[shape].tokens)
    rows = {key: value[: SHAPES[shape].batch] for key, value in inputs.items()}
    return without_dropout(model), rows, loss


@functools.cache
def reference(name: str, shape: str) -> Reference:
    return Reference(model_case(name, shape), [adamw], STEPS)


_first: dict[tuple[str, str, str], TracedStep] = {}
"""Steps by model, shape and lowering; their first runs keep everything."""


def traced(case: Case) -> TracedStep:
    """The case's step for the runs of one test."""
    options = replace(case, decision="save", budget="none", schedule="poison").options()
    step = TracedStep(functools.partial(_train, case), options)
    _first.setdefault((case.model, case.shape, case.lowering), step)
    return step


def _first_of(case: Case) -> TracedStep:
    key = (case.model, case.shape, case.lowering)
    return _first[key] if key in _first else traced(case)


def save_run(case: Case) -> tuple[Run, Plan]:
    """The case's run that keeps everything, and its plan."""
    return _first_of(case).first


def replanned(case: Case, memory_budget: int | None) -> Plan:
    """The case's plan for another budget; its step was traced and lowered once, for all."""
    saved = _first_of(case).assembly
    config = resolve({**case.options(), "memory_budget": memory_budget}, None)
    return plan_step(saved.lowered, config, PlanRequest(), saved.known).plan


def floor_bytes(case: Case) -> int:
    """What the error of a budget of one byte names."""
    return _floor_bytes(replace(case, budget="none", schedule="poison"))


@functools.cache
def _floor_bytes(case: Case) -> int:
    with pytest.raises(Infeasible) as raised:
        replanned(case, 1)
    assert raised.value.floor_bytes is not None
    return raised.value.floor_bytes


def budget_of(case: Case) -> int | None:
    if case.budget == "none":
        return None
    floor = floor_bytes(case)
    top = save_run(case)[1].peak_bytes
    return floor if case.budget == "floor" else (floor + max(floor, top)) // 2


def run(case: Case, **more: object) -> tuple[Run, Plan]:
    """The case's training run and its plan, which nothing is said against."""
    torch._dynamo.reset()
    state.reset()
    done = _train(case, {**case.options(), **more})
    assert_planned(1)
    return done, memo_compile.report().plans[-1]


def _train(case: Case, options: Mapping[str, object]) -> Run:
    compiled = functools.partial(torch.compile, backend="memo", options=options)
    return reference(case.model, case.shape).train(compiled)


def run_schedules(case: Case, memory_budget: int | None) -> Iterator[tuple[Case, Run, Plan]]:
    """The case's run under every copy schedule in turn."""
    step = traced(case)
    for schedule in SCHEDULES:
        under = replace(case, schedule=schedule)
        yield under, *step.run({**under.options(), "memory_budget": memory_budget})


def assert_close(ours: Run, case: Case) -> None:
    """Losses and gradients are eager's."""
    reference(case.model, case.shape).assert_close(ours)


def assert_bitwise(ours: Run, theirs: Run) -> None:
    for mine, other in zip(ours.losses, theirs.losses, strict=True):
        assert torch.equal(mine, other)
    for mine, other in zip(ours.gradients, theirs.gradients, strict=True):
        assert mine.keys() == other.keys()
        assert [name for name in other if not torch.equal(mine[name], other[name])] == []


def assert_moved(case: Case, plan: Plan, budget_bytes: int | None) -> None:
    """Bytes moved and were made again as the policy says, counted while the last step ran."""
    offloads, again = plan.offloaded_bytes > 0, plan.recomputed_bytes > 0
    if case.decision == "save":
        assert (offloads, again) == (False, False)
    elif case.decision == "full-recompute":
        assert (offloads, again) == (False, True)
    elif case.decision in MOVES_ONLY:
        assert (offloads, again) == (True, False)
    elif case.decision == "memo":  # alpha is the program's, or what the budget leaves
        assert offloads
    elif case.policy == "memo":
        assert (offloads, again) == (True, True)
    else:
        kept_bytes = floor_bytes(replace(case, decision="save"))
        must = budget_bytes is not None and budget_bytes < kept_bytes
        assert (offloads or again) == must
    assert plan.policy in (case.policy, "save" if not (offloads or again) else case.policy)
