"""A step program whose seconds and memory are asked for more than once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from memo_compile.step.communication import value_sizes
from memo_compile.step.lives import CallTables
from memo_compile.step.movable import StepCosts
from memo_compile.step.plans import Timeline
from memo_compile.step.problem import Problem, StepCall
from memo_compile.step.residency import step_constant_bytes
from memo_compile.step.simulate import most_per_call, simulate


@dataclass(frozen=True)
class TimedProgram:
    """A program, its seconds, and what of it is alive: each is found once, when it is asked for."""

    problem: Problem
    costs: StepCosts
    tables: CallTables | None = None
    """Of programs that share calls with this one."""
    known: Any = None
    """Its ``most_per_call``, where that was found before."""

    @cached_property
    def timeline(self) -> Timeline:
        """As ``simulate`` finds it, without spans. Raises InputError: a region has no seconds."""
        return simulate(self.problem, self.costs, spans=False)

    @cached_property
    def alive(self) -> Any:
        """Per call the most bytes alive during it, and what is alive in all of the step."""
        most = most_per_call(self.problem, self.tables) if self.known is None else self.known
        return most + step_constant_bytes(self.problem)

    @property
    def peak_bytes(self) -> int:
        """``peak_live_bytes`` of the program."""
        if not self.problem.calls:
            return step_constant_bytes(self.problem)
        return int(self.alive.max())

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Its ``value_sizes``."""
        return value_sizes(self.problem)

    def in_order(self, calls: Sequence[StepCall]) -> "TimedProgram":
        """The same calls in another order."""
        problem = replace(self.problem, calls=tuple(calls))
        return TimedProgram(problem, self.costs, self.tables)

    def is_better_than(self, other: "TimedProgram", limit_bytes: int) -> bool:
        """True where it takes less time, and no more than ``limit_bytes``, or than ``other``."""
        if self.timeline.step_s >= other.timeline.step_s:
            return False
        return self.peak_bytes <= limit_bytes or self.peak_bytes <= other.peak_bytes
