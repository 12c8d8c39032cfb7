"""PlacementProblem -> Placement: offsets of buffers in an arena.

How long something is searched is counted by its work (``effort``), so that it does not depend on
what else the machine does.
"""

from memo_compile.planners.placement.placement_problem import Buffer, Placement, PlacementProblem
from memo_compile.planners.placement.planner import place
from memo_compile.planners.placement.validate import check_placement, find_violations

__all__ = ["Buffer", "Placement", "PlacementProblem", "check_placement", "find_violations", "place"]
