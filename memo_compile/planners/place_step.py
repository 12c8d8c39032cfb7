"""Problem -> Plan: lifetimes, placement, the numbers of the plan, and the checker's verdict."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from memo_compile.check.check_plan import require_valid
from memo_compile.errors import Infeasible
from memo_compile.planners.beneath_ordinary import offsets_from_above, with_walls
from memo_compile.planners.placement import Buffer, Placement, PlacementProblem, place
from memo_compile.planners.solver import SolveStatus
from memo_compile.step.ordinary import outside_peak
from memo_compile.step.plans import Decision, Plan
from memo_compile.step.problem import (
    ALIGNMENT_BYTES,
    ArenaBuffer,
    Problem,
    arena_buffers,
    live_bytes,
)
from memo_compile.step.residency import residency
from memo_compile.units import format_bytes, format_enough


class Placer(Protocol):
    """Finds offsets, as ``placement.place`` does."""

    def __call__(self, problem: PlacementProblem, *, solver: str, time_limit_s: float) -> Placement:
        """Offsets for the buffers of ``problem``, found within about ``time_limit_s``."""
        ...


def place_step(
    problem: Problem,
    *,
    name: str = "",
    solver: str = "auto",
    time_limit_s: float = 5.0,
    decisions: tuple[Decision, ...] = (),
    budget_bytes: int | None = None,
) -> Plan:
    """A checked plan of one step, as its program says.

    ``memo replay`` repeats from a dumped Problem what ``driver.plan_step`` ends with: a dump has no
    graphs for the stages before.

    Raises:
        Infeasible: the step needs more than ``budget_bytes``.
        InvalidPlan: the checker found a fault in what the planner made.
    """
    plan = placed_step(problem, name=name, solver=solver, time_limit_s=time_limit_s)
    if budget_bytes is not None and plan.peak_bytes > budget_bytes:
        plan = beneath_ordinary(problem, plan, time_limit_s=time_limit_s)
    plan = replace(plan, decisions=decisions, budget_bytes=budget_bytes)
    require_budget(plan)
    return require_valid(problem, plan)


def placed_step(
    problem: Problem,
    *,
    name: str = "",
    solver: str = "auto",
    time_limit_s: float = 5.0,
    capacity_bytes: int | None = None,
    place: Placer = place,
) -> Plan:
    """The plan of ``place_step``, unchecked, without decisions and budget.

    With ``capacity_bytes`` the search ends at an arena that is no larger, where it finds one.
    Raises Infeasible: it is proved that there is none.
    """
    buffers = arena_buffers(problem)
    rectangles = replace(_rectangles(problem, buffers), capacity=capacity_bytes)
    placed = place(rectangles, solver=solver, time_limit_s=time_limit_s)
    if placed.status is SolveStatus.INFEASIBLE:
        raise Infeasible(
            f"no arena of {format_bytes(capacity_bytes or 0)} holds the step; give it more",
            floor_bytes=placed.lower_bound_bytes,
        )
    resident = residency(problem, placed.offsets, placed.height_bytes, buffers)
    return Plan(
        name=name,
        offsets=placed.offsets,
        arena_bytes=placed.height_bytes,
        peak_bytes=resident.peak_bytes,
        resident_bytes=resident.resident_bytes,
        dropped=resident.dropped,
        releases_pages=problem.releases_pages,
        lower_bound_bytes=max(live_bytes(buffers).values(), default=0),
        outside_bytes_by_kind=outside_peak(problem),
        fixed=problem.fixed,
        layer_classes=problem.layer_classes,
        solver=placed.solver,
        num_regions=len(problem.regions),
    )


def beneath_ordinary(
    problem: Problem, plan: Plan, *, time_limit_s: float = 5.0, place: Placer = place
) -> Plan:
    """``plan``, or with offsets of which the sum of arena and ordinary memory is less.

    ``plan`` has the lowest arena that was found. Where pages are given back, and ordinary memory is
    at its most in calls that hold little of the arena, another placement has the lower peak.
    """
    if not problem.releases_pages:
        return plan
    buffers = arena_buffers(problem)
    rectangles = with_walls(_rectangles(problem, buffers), problem)
    placed = place(rectangles, solver="greedy", time_limit_s=time_limit_s)
    offsets = offsets_from_above(buffers, placed)
    arena_bytes = max((offsets[buffer.id] + buffer.size_bytes for buffer in buffers), default=0)
    resident = residency(problem, offsets, arena_bytes, buffers)
    if resident.peak_bytes >= plan.peak_bytes:
        return plan
    return replace(
        plan,
        offsets=offsets,
        arena_bytes=arena_bytes,
        peak_bytes=resident.peak_bytes,
        resident_bytes=resident.resident_bytes,
        dropped=resident.dropped,
        solver=placed.solver,
    )


def require_budget(plan: Plan) -> None:
    """Raises Infeasible where ``plan`` exceeds its budget; its peak is the floor that is known."""
    if plan.budget_bytes is None or plan.peak_bytes <= plan.budget_bytes:
        return
    fixed = plan.fixed
    why = "" if plan.layer_classes else "; everything is kept, since no repeating layers were found"
    raise Infeasible(
        f"budget {format_bytes(plan.budget_bytes)} < floor {format_enough(plan.peak_bytes)} "
        f"(parameters {format_bytes(fixed.parameters)}, gradients {format_bytes(fixed.gradients)}, "
        f"optimizer state {format_bytes(fixed.optimizer_state)}, arena "
        f"{format_bytes(plan.arena_bytes)}, outside {format_bytes(plan.outside_bytes)}{why}); "
        "raise memory_budget or shorten the sequence",
        floor_bytes=plan.peak_bytes,
    )


def placement_problem(problem: Problem) -> PlacementProblem:
    """The step's buffers as rectangles."""
    return _rectangles(problem, arena_buffers(problem))


def _rectangles(problem: Problem, alive: Iterable[ArenaBuffer]) -> PlacementProblem:
    """The buffers as rectangles, lines by bytes; those that live inside one call are one block."""
    buffers = tuple(
        Buffer(
            id=buffer.id,
            lower=buffer.start,
            upper=buffer.end,
            size=buffer.size_bytes,
            alignment=ALIGNMENT_BYTES,
            block=problem.calls[buffer.call].name if buffer.transient else None,
        )
        for buffer in alive
    )
    return PlacementProblem(buffers=buffers, alignment=ALIGNMENT_BYTES)
