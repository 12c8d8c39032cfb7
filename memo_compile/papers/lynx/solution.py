"""What both programs share: what they return, budgets kept after rounding, cut operators."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from memo_compile.papers.lynx.fields import Number
from memo_compile.planners.solver import Linear, LinearProgram, SolveStatus

SUM_TOLERANCE = 1e-12
"""A sum of floats may exceed a bound by this share: 0.1 + 0.2 fits a bound of 0.3."""

FRACTION_TOLERANCE = 1e-7
"""Smaller parts of an operator are the engine's rounding and not a decision."""

TIE_SLACK = 1e-8
"""A solve that breaks ties may worsen the first goal by this, in units of the longest operator."""

MAX_TIGHTENINGS = 8
"""Most re-solves with a tighter budget, each of which cuts off the violating solution."""

GAIN = 1e-6
"""Operators are cut only if that saves this share of the time: a cut makes a plan complicated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """An operator, or the given fraction of its tokens, recomputed in one window."""

    op: int
    fraction: float = 1.0

    def __post_init__(self) -> None:
        assert 0 < self.fraction <= 1, f"operator {self.op}: fraction {self.fraction}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """The smallest constraint that cannot be met: ``floor`` is the least that it needs."""

    constraint: str
    message: str
    floor: Number
    budget: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class HeuSolution:
    """What one layer keeps, and which operators it recomputes in which phase."""

    status: SolveStatus
    keep: tuple[bool, ...] = ()
    windows: tuple[tuple[Part, ...], ...] = ()
    """Phases 1..5; the fifth is on the critical path."""
    critical_time: Number = 0
    """The objective: time recomputed on demand, per layer and micro-batch."""
    recompute_time: Number = 0
    """Time recomputed in all five phases."""
    peak: Number = 0
    conflict: Conflict | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptSolution:
    """A schedule over phases; row t of each matrix is the phase that first computes operator t."""

    status: SolveStatus
    resident: tuple[tuple[int, ...], ...] = ()
    """S: outputs resident when the phase starts."""
    critical: tuple[tuple[float, ...], ...] = ()
    """Rc: operators (or their fractions) computed before the phase's own, which is always 1."""
    overlapped: tuple[tuple[float, ...], ...] = ()
    """Ro: operators (or their fractions) recomputed behind the phase's own communication."""
    critical_time: Number = 0
    """The objective: time of everything on the critical path, first computations included."""
    peak: Number = 0
    conflict: Conflict | None = None

    @property
    def windows(self) -> tuple[tuple[Part, ...], ...]:
        """For each phase what its communication hides."""
        return tuple(
            tuple(Part(op=i, fraction=x) for i, x in enumerate(row) if x > 0)
            for row in self.overlapped
        )


PlanT = TypeVar("PlanT", HeuSolution, OptSolution)


def within_budget(
    budget: Number, attempt: Callable[[Number], PlanT], explain: Callable[[], Conflict | None]
) -> PlanT:
    """Calls ``attempt`` with tighter and tighter budgets until the replayed peak obeys ``budget``.

    A solver's rounding may break it. Where ``attempt`` proves that there is no plan, ``explain``
    says why.
    """
    tried_budget = budget
    for _ in range(MAX_TIGHTENINGS):
        plan = attempt(tried_budget)
        if plan.status is SolveStatus.INFEASIBLE:
            return replace(plan, conflict=explain())
        if not plan.status.has_solution or not exceeds(plan.peak, budget):
            return plan
        tried_budget = budget - 2 * (plan.peak - budget)
    return type(plan)(status=SolveStatus.ERROR)


def better_plan(whole: PlanT, split: PlanT) -> PlanT:
    """Returns ``split`` where it saves time beyond the engine's rounding, else ``whole``."""
    if not split.status.has_solution:
        return whole
    if not whole.status.has_solution or exceeds(whole.critical_time, split.critical_time, GAIN):
        return split
    return whole


def add_share(program: LinearProgram, num_slices: int) -> Linear:
    """Adds a variable in [0, 1]; with ``num_slices`` > 0 it is a multiple of 1 / num_slices."""
    share = program.variable(high=1.0)
    if num_slices:
        slices = program.variable(high=float(num_slices), is_integer=True)
        program.require((num_slices * share).equals(slices))
    return share


def fraction_value(program: LinearProgram, variable: Linear | int, num_slices: int = 0) -> float:
    """Returns the solved variable, in [0, 1], as 0, 1 or whole slices if near; an int as it is."""
    value = program.value(variable)
    if isinstance(variable, int):
        return value
    if num_slices:
        return round(value * num_slices) / num_slices
    if value < FRACTION_TOLERANCE:
        return 0.0
    return 1.0 if value > 1 - FRACTION_TOLERANCE else value


def exceeds(value: Number, bound: Number, tolerance: float = SUM_TOLERANCE) -> bool:
    """True when ``value`` is above ``bound`` by more than rounding; exact for integers."""
    if isinstance(value, int) and isinstance(bound, int):
        return value > bound
    return value > bound and not math.isclose(value, bound, rel_tol=tolerance, abs_tol=1e-300)
