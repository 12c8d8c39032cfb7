"""One plan before it is placed: the step program that its moves make, simulated."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
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


@dataclass(frozen=True, kw_only=True, eq=False)
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
    next_widen: float = math.inf
    """The least ``Schedule.widen`` with which its copies get more time; infinite: none does."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate(Figures):
    """A plan before it is placed."""

    moves: Moves
    make: Callable[[], Problem]

    @functools.cached_property
    def problem(self) -> Problem:
        """The step program."""
        return self.make()

    @property
    def figures(self) -> Figures:
        """Its figures alone, without what makes the step program."""
        return Figures(**{each.name: getattr(self, each.name) for each in fields(Figures)})


@dataclass(frozen=True, slots=True, kw_only=True)
class UntimedProgram:
    """The step program of some moves before its copies and collectives get their time."""

    problem: Problem
    costs: StepCosts
    alive: Any
    """Per call the most bytes alive during it; None where the schedule gives copies no time."""
    tables: CallTables | None
    """Of the programs of the same step."""
    has_windows: bool
    """True where recomputations may move to where the step waits for other ranks."""

    def timed(self, schedule: Schedule) -> tuple[TimedProgram, float]:
        """The program whose transfers have their time, and ``Figures.next_widen``.

        Copies last as long as ``schedule.widen`` times the peak allows, and recomputations move
        into the windows of collectives. Copies of weights, which no policy decides, get their time
        within the peak even where ``schedule`` gives others none.
        """
        widen = schedule.widen or float(bool(self.problem.host_weights))
        program = TimedProgram(self.problem, self.costs, self.tables, self.alive)
        if not widen:
            return program, math.inf
        peak_bytes = program.peak_bytes
        placed = with_time(
            program,
            int(widen * peak_bytes),
            collectives=self.has_windows,
            spare_bytes=int(schedule.spare * peak_bytes),
        )
        return placed.program, widen + placed.lacking_bytes / peak_bytes


def simulated(
    step: MovableStep,
    moves: Moves,
    recompute: RecomputeOf,
    make_untimed: Callable[[], UntimedProgram] | None = None,
) -> Candidate:
    """The candidate of ``moves``: its step program, simulated.

    ``make_untimed`` gives what ``untimed_program`` does: plans that differ in ``widen`` share it.
    """
    untimed = make_untimed() if make_untimed else untimed_program(step, moves, recompute)
    program, next_widen = untimed.timed(moves.schedule)
    problem, timeline = program.problem, program.timeline
    return Candidate(
        moves=moves,
        make=lambda: problem,
        timeline=timeline,
        live_bytes=program.peak_bytes,
        host_bytes=problem.host_bytes,
        cost_s=timeline.step_s + COPY_WEIGHT * copy_seconds(step, problem),
        next_widen=next_widen,
    )


def untimed_program(step: MovableStep, moves: Moves, recompute: RecomputeOf) -> UntimedProgram:
    """The program of ``moves`` before its transfers get their time."""
    problem = apply_moves(step, moves, recompute)
    alive = most_per_call(problem, facts_of(step).tables) if moves.schedule.widen else None
    return UntimedProgram(
        problem=problem,
        costs=costs_with(step, moves, recompute),
        alive=alive,
        tables=facts_of(step).tables,
        has_windows=step.waits_late and facts_of(step).talks,
    )


def program_of(
    step: MovableStep, moves: Moves, recompute: RecomputeOf
) -> tuple[Problem, StepCosts]:
    """The step program of ``moves`` as it runs, and its costs."""
    program = untimed_program(step, moves, recompute)
    return program.timed(moves.schedule)[0].problem, program.costs


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
