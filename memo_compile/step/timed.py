"""A step program with its simulated seconds and memory, each computed once."""

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
    """A program, its timeline and its live bytes; both are computed on first use and kept."""

    problem: Problem
    costs: StepCosts
    tables: CallTables | None = None
    """Those of programs that share calls with this one."""
    call_bytes: Any = None
    """Its ``most_per_call``, if the caller has it."""

    @cached_property
    def timeline(self) -> Timeline:
        """The result of ``simulate``, without spans. Raises InputError: a region has no seconds."""
        return simulate(self.problem, self.costs, spans=False)

    @cached_property
    def alive(self) -> Any:
        """For each call the most bytes alive during it, constant memory included."""
        call_bytes = self.call_bytes
        if call_bytes is None:
            call_bytes = most_per_call(self.problem, self.tables)
        return call_bytes + step_constant_bytes(self.problem)

    @property
    def peak_bytes(self) -> int:
        """``peak_live_bytes`` of the program."""
        if not self.problem.calls:
            return step_constant_bytes(self.problem)
        return int(self.alive.max())

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The ``value_sizes`` of the program."""
        return value_sizes(self.problem)

    def in_order(self, calls: Sequence[StepCall]) -> "TimedProgram":
        """Returns the program with the same calls in another order."""
        problem = replace(self.problem, calls=tuple(calls))
        return TimedProgram(problem, self.costs, self.tables)

    def is_better_than(self, other: "TimedProgram", limit_bytes: int) -> bool:
        """True if it is faster than ``other``, with a peak of ``limit_bytes`` or ``other``'s."""
        if self.timeline.step_s >= other.timeline.step_s:
            return False
        return self.peak_bytes <= limit_bytes or self.peak_bytes <= other.peak_bytes
