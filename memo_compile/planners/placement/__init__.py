"""PlacementProblem -> Placement: offsets of buffers in an arena.

Every ``deadline_s`` here is on the clock of ``time.perf_counter``.
"""

from memo_compile.planners.placement.placement_problem import (
    Block,
    Buffer,
    Placement,
    PlacementProblem,
)
from memo_compile.planners.placement.planner import place
from memo_compile.planners.placement.validate import check_placement, find_violations

__all__ = [
    "Block",
    "Buffer",
    "Placement",
    "PlacementProblem",
    "check_placement",
    "find_violations",
    "place",
]
