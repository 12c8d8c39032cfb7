"""What a step among ranks takes at least, however much memory there is."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from memo_compile.planners.begin_order import gathers_of
from memo_compile.planners.transfers import late
from memo_compile.step.communication import has_collectives
from memo_compile.step.halves import halves_of_calls
from memo_compile.step.movable import MovableStep, StepCosts, once_per_step
from memo_compile.step.problem import CallKind, Problem, StepCall
from memo_compile.step.simulate import simulate
from memo_compile.step.tilings import WholeStep


class Least(NamedTuple):
    """Seconds that every plan of a step takes at least, however much memory there is."""

    step_s: float
    hideable_s: float
    """Recomputation of at most so many seconds may add nothing to ``step_s``."""

    def with_more_s(self, recompute_s: float) -> float:
        """What the step takes at least with so much recomputation."""
        return self.step_s + max(0.0, recompute_s - self.hideable_s)


@once_per_step
def least_of_step(step: MovableStep) -> Least:
    """``least_of`` a step, which every budget asks for."""
    return least_of(step.problem, step.costs)


def least_of(problem: Problem, costs: StepCosts) -> Least:
    """Seconds that every plan of ``problem`` takes at least, however much memory there is.

    It is the time of a program in which every collective begins as early, and is waited for as
    late, as its values allow. What converts the input of one that runs ahead takes no time here.

    Let X be the seconds of all computation, C those of collectives, s the slowdown, and I the time
    for which nothing is computed. Of C at least C - I runs beside computation, which loses a share
    of 1 - 1/s of it: the step takes X + I + (C - I)(1 - 1/s) = X + C(1 - 1/s) + I/s. I is the
    longest path of the program less what is computed, the most over paths of (collectives on it
    less computation that is not), so that it is least where all computation takes s times as long.
    A second of recomputation lowers I by at most s.
    """
    converting = {gather.calls[0].region for gather in gathers_of(problem).values()}
    alone_s = {**costs.region_s, **dict.fromkeys(converting, 0.0)} if converting else costs.region_s
    slowdown = costs.comm_slowdown
    slowed_s = {region: slowdown * seconds for region, seconds in alone_s.items()}
    alone = replace(costs, comm_slowdown=1.0, region_s=alone_s)
    slowed = replace(costs, comm_slowdown=1.0, region_s=slowed_s)
    fastest = problem
    for _ in range(2):  # a wait stands before the beginning of another that reads the same input
        fastest = _earliest(late(fastest, holds_inputs=True))
    timeline = simulate(fastest, slowed, spans=False)
    computed_s = compute_s(fastest, alone)
    idle_s = max(0.0, timeline.step_s - slowdown * computed_s) / slowdown
    comm_s = timeline.hidden_comm_s + timeline.exposed_comm_s
    step_s = computed_s + (1 - 1 / slowdown) * comm_s + idle_s
    return Least(step_s=step_s, hideable_s=idle_s)


def least_wait_s(problem: Problem, costs: StepCosts) -> float:
    """Seconds that every plan of ``problem`` waits for other ranks."""
    if not has_collectives(problem):
        return 0.0
    return least_of(problem, costs).step_s - compute_s(problem, costs)


def compute_s(problem: Problem, costs: StepCosts) -> float:
    """Seconds of all that ``problem`` computes."""
    calls = (call for call in problem.calls if call.kind in (CallKind.RUN, CallKind.RECOMPUTE))
    return math.fsum(map(costs.call_s, calls))


def whole_compute_s(
    problem: Problem, whole: WholeStep, costs: StepCosts, region_s: Mapping[str, float]
) -> float:
    """Seconds of ``problem`` before any region ran in tiles, or of itself if those are fewer.

    ``region_s`` are seconds of the whole regions, which ``problem`` in tiles has no more. What
    every plan waits for other ranks counts as well.
    """
    untiled = replace(costs, region_s={**costs.region_s, **region_s})
    whole_s = math.fsum(map(untiled.call_s, whole.calls))
    return min(compute_s(problem, costs), whole_s) + least_wait_s(problem, costs)


def _earliest(problem: Problem) -> Problem:
    """``problem`` that gathers as early as the order of collectives allows."""
    gathers = gathers_of(problem)
    if not gathers:
        return problem
    gather_calls = {call.name for gather in gathers.values() for call in gather.calls}
    calls: list[StepCall] = []
    last: dict[int, int] = {}
    """Half -> behind which place the next gather of it can begin."""
    for half, call in zip(halves_of_calls(problem), problem.calls, strict=True):
        at = last.setdefault(half, len(calls))
        if call.name in gathers:
            calls[at:at] = gathers[call.name].calls
            last[half] = at + len(gathers[call.name].calls)
        elif call.name not in gather_calls:
            calls.append(call)
            if call.kind is CallKind.ISSUE:
                last[half] = len(calls)
    return replace(problem, calls=tuple(calls))
