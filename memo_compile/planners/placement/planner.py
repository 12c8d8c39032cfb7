"""The one interface to all placement solvers."""

import time
from enum import Enum

from memo_compile.planners.placement.bounds import lower_bound
from memo_compile.planners.placement.greedy import greedy_offsets
from memo_compile.planners.placement.instance import build_instance
from memo_compile.planners.placement.problem import Placement, PlacementProblem, PlacementStatus


class Solver(Enum):
    """How offsets are found; the values are those of the command line."""

    AUTO = "auto"
    GREEDY = "greedy"
    MIP = "mip"
    SEARCH = "search"


class Levels(Enum):
    """Whether blocks are planned before the whole."""

    AUTO = "auto"
    FLAT = "flat"
    BILEVEL = "bilevel"


def place(
    problem: PlacementProblem,
    *,
    solver: str = "auto",
    time_limit_s: float = 10.0,
    levels: str = "auto",
) -> Placement:
    """Offsets for every buffer of ``problem``, as low as ``solver`` finds them in the time."""
    begin = time.perf_counter()
    instance = build_instance(problem)
    bound = lower_bound(instance)
    target = bound if problem.capacity is None else max(bound, problem.capacity)
    offsets = greedy_offsets(instance, target, begin + time_limit_s)
    height = instance.height(offsets)
    status = PlacementStatus.OPTIMAL if height == bound else PlacementStatus.FEASIBLE
    if problem.capacity is not None and height > problem.capacity:
        status = PlacementStatus.TIME_LIMIT
    return Placement(
        offsets=instance.offsets(offsets),
        height_bytes=height,
        lower_bound_bytes=bound,
        status=status,
        seconds=time.perf_counter() - begin,
        solver="greedy",
    )
