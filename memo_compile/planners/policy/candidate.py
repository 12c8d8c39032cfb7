"""One plan before it is placed: the step program that its moves make, simulated."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from memo_compile.planners.move_rules import RecomputeOf, facts_of, recompute_keys
from memo_compile.planners.moves import apply_moves
from memo_compile.planners.policy.model import COPY_WEIGHT
from memo_compile.planners.transfers import with_time
from memo_compile.step.lives import CallTables
from memo_compile.step.movable import MovableStep, Moves, Schedule, StepCosts
from memo_compile.step.plans import Timeline
from memo_compile.step.problem import CallKind, Problem
from memo_compile.step.simulate import most_per_call
from memo_compile.step.timed import TimedProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a simulation tells of a plan."""

    timeline: Timeline
    """Without spans."""
    live_bytes: int
    """A lower bound of the placed peak."""
    host_bytes: int
    """Bytes of the step's host frame."""
    cost_s: float
    """Seconds of the step, and a little for each second of copying; cheaper plans come first."""
    next_times: float = math.inf
    """With how many times its peak its copies get more time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A plan before it is placed."""

    moves: Moves
    figures: Figures
    make: Callable[[], Problem]

    @functools.cached_property
    def problem(self) -> Problem:
        """The step program."""
        return self.make()

    @property
    def timeline(self) -> Timeline:
        """Without spans."""
        return self.figures.timeline

    @property
    def live_bytes(self) -> int:
        """A lower bound of its placed peak."""
        return self.figures.live_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the step's host frame."""
        return self.figures.host_bytes

    @property
    def cost_s(self) -> float:
        """As of ``Figures``."""
        return self.figures.cost_s

    @property
    def next_times(self) -> float:
        """As of ``Figures``."""
        return self.figures.next_times


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The step program of some decisions before its copies get more time."""

    problem: Problem
    costs: StepCosts
    alive: Any
    """Per call the most bytes alive during it; None where the copies' times stay as they are."""
    tables: CallTables | None
    """Of the programs of the same step."""
    has_windows: bool
    """True where recomputations may move to where the step waits for other ranks."""

    def widened(self, schedule: Schedule) -> tuple[TimedProgram, float]:
        """The program whose copies get as much time as ``schedule`` says, and ``next_times``.

        Likewise recomputations move into the windows of collectives.
        """
        times = schedule.widen or float(bool(self.problem.host_weights))  # weights are no policy's
        program = TimedProgram(self.problem, self.costs, self.tables, self.alive)
        if not times:
            return program, math.inf
        peak_bytes = program.peak_bytes
        placed = with_time(
            program,
            int(times * peak_bytes),
            collectives=self.has_windows,
            spare_bytes=int(schedule.spare * peak_bytes),
        )
        return placed.program, times + placed.lacking_bytes / peak_bytes


def simulated(
    step: MovableStep,
    moves: Moves,
    recompute: RecomputeOf,
    find: Callable[[], Program] | None = None,
) -> Candidate:
    """The step program of ``moves``, simulated; ``find`` gives what ``program_before`` does."""
    before = program_before(step, moves, recompute) if find is None else find()
    program, next_times = before.widened(moves.schedule)
    problem, timeline = program.problem, program.timeline
    figures = Figures(
        timeline=timeline,
        live_bytes=program.peak_bytes,
        host_bytes=problem.host_bytes,
        cost_s=timeline.step_s + COPY_WEIGHT * copy_seconds(step, problem),
        next_times=next_times,
    )
    return Candidate(moves=moves, figures=figures, make=lambda: problem)


def program_before(step: MovableStep, moves: Moves, recompute: RecomputeOf) -> Program:
    """The program of ``moves`` before copies get more time."""
    problem = apply_moves(step, moves, recompute)
    alive = most_per_call(problem, facts_of(step).tables) if moves.schedule.widen else None
    return Program(
        problem=problem,
        costs=costs_with(step, moves, recompute),
        alive=alive,
        tables=facts_of(step).tables,
        has_windows=step.waits_late and facts_of(step).talks,
    )


def program_of(
    step: MovableStep, moves: Moves, recompute: RecomputeOf
) -> tuple[Problem, StepCosts]:
    """The step program of ``moves``, and its costs."""
    program = program_before(step, moves, recompute)
    return program.widened(moves.schedule)[0].problem, program.costs


def costs_with(step: MovableStep, moves: Moves, recompute: RecomputeOf) -> StepCosts:
    """The step's costs and those of the recompute regions that ``moves`` call."""
    recompute_s = {}
    for layer, mode in zip(step.layers, moves.modes, strict=True):
        for key in recompute_keys(step.class_of(layer), mode):
            recompute_s[key.region] = recompute(key).seconds
    return replace(step.costs, region_s={**step.costs.region_s, **recompute_s})


def copy_seconds(step: MovableStep, problem: Problem) -> float:
    """Seconds that the copies of ``problem`` keep their lanes busy."""
    seconds = {CallKind.OFFLOAD: step.costs.d2h_s, CallKind.RELOAD: step.costs.h2d_s}
    return sum(
        seconds[call.kind](call.copy.num_bytes) for call in problem.calls if call.copy is not None
    )
