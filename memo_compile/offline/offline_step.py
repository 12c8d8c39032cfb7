"""A step that was planned and never ran: what ``memo plan`` and ``memo_compile.plan`` answer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memo_compile.config import MemoConfig
from memo_compile.costs.hardware import HardwareProfile
from memo_compile.driver.report_rows import recomputes_slices
from memo_compile.driver.stages import PlannedStep, PlanRequest
from memo_compile.driver.step_planner import KnownStep, StepPlanner, plan_known
from memo_compile.step.movable import StepCosts
from memo_compile.step.plans import Observed, Plan, ReportedPlan
from memo_compile.step.problem import CallKind, Problem
from memo_compile.step.residency import beside_arena_bytes
from memo_compile.step.simulate import simulate

_PLAIN_LOOPS = {"cpp.simdlen": 1}
"""Inductor's settings for another device than the CPU, whose kernels nobody runs: plain loops have
the same buffers, take a fifth less time to make, and need no C++ compiler to ask."""

NOT_COMPARED = (
    "{}: not compared with the whole. That is done before a step runs; nothing is computed for a "
    "plan, which believes the rules about operators"
)


class NotUniform(Exception):
    """The step is not one class of layers, each wired to its neighbours like the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineStep:
    """A step that was planned and never ran."""

    problem: Problem
    plan: ReportedPlan
    """The plan, with its ``timeline``."""
    costs: StepCosts
    model_flops: int
    """FLOPs of forward and backward on one device, without those of recomputation."""
    exact: bool
    """True when the backend makes the same plan; False for another device than the tensors'."""
    notes: tuple[str, ...] = ()
    """What was not checked, because nothing ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineFacts:
    """Costs and counts of a lowered step that answers need beside its plan."""

    costs: StepCosts
    model_flops: int
    exact: bool
    tiled: tuple[str, ...]
    """The regions that run in tiles."""
    lowering_s: float = 0.0


def offline_config(config: MemoConfig, hardware: HardwareProfile | None) -> MemoConfig:
    """Returns ``config`` with roofline costs and without caches, for a step that never runs."""
    config = replace(config, costs="roofline", cache=False)
    if hardware is not None and hardware.name != "cpu":
        config = replace(config, inductor_options={**config.inductor_options, **_PLAIN_LOOPS})
    return config


def planned_offline(
    step: KnownStep, config: MemoConfig, facts: OfflineFacts, request: PlanRequest | None = None
) -> tuple[PlannedStep, OfflineStep]:
    """Plans ``step``. Raises Infeasible, and TooSlow where ``config`` bounds the plan's seconds."""
    request = request or PlanRequest()
    planned = plan_known(step, _for_one_arena(step, config, request), request)
    plan = planned.plan
    timeline = plan.timeline
    if timeline is None:  # everything is kept: no step is faster
        timeline = simulate(planned.problem, facts.costs)
        step_s = timeline.step_s
        plan = replace(plan, timeline=timeline, step_lower_bound_s=step_s, compute_s=step_s)
    observed = Observed(
        planning_s=planned.planning_s, lowering_s=facts.lowering_s, stall_s=timeline.stall_s
    )
    offline_step = OfflineStep(
        problem=planned.problem,
        plan=ReportedPlan.of(plan, observed),
        costs=_with_recomputation(facts.costs, step, config, planned.problem),
        model_flops=facts.model_flops,
        exact=facts.exact,
        notes=tuple(_not_compared(facts.tiled, planned.plan)),
    )
    return planned, offline_step


def _for_one_arena(step: KnownStep, config: MemoConfig, request: PlanRequest) -> MemoConfig:
    """Returns ``config`` with the budget that a plan may have whose arena counts several times."""
    budget_bytes = config.budget_bytes(step.device_bytes())
    if budget_bytes is None or config.attempt.arena_percent == 100:
        return config
    beside_bytes = beside_arena_bytes(StepPlanner.of(step, config, request).problem)
    return replace(config, memory_budget=config.plan_bytes(budget_bytes, beside_bytes))


def _with_recomputation(
    costs: StepCosts, step: KnownStep, config: MemoConfig, problem: Problem
) -> StepCosts:
    """Returns ``costs`` with the seconds of the recompute regions that ``problem`` calls."""
    called = {call.region for call in problem.calls if call.kind is CallKind.RECOMPUTE}
    if not called:
        return costs
    regions = step.library(config.host_store).regions.values()
    recompute_s = {
        region.key.region: region.seconds for region in regions if region.key.region in called
    }
    return replace(costs, region_s={**costs.region_s, **recompute_s})


def _not_compared(tiled: Sequence[str], plan: Plan) -> Iterator[str]:
    """Yields notes on what runs in slices of rows because rules about operators allow it."""
    if tiled:
        yield NOT_COMPARED.format(f"tiles of {', '.join(tiled)}")
    if recomputes_slices(plan.decisions):
        yield NOT_COMPARED.format("recomputations of a part of the tokens")
