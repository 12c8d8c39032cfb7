"""A step that was planned and never ran: what ``memo plan`` and ``memo_compile.plan`` answer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memo_compile.config import MemoConfig
from memo_compile.costs.hardware import HardwareProfile
from memo_compile.driver.report_rows import recomputes_slices
from memo_compile.driver.stages import PlannedStep, PlanRequest
from memo_compile.driver.step_planner import KnownStep, plan_known
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
    """What is not known of the plan because nothing ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineFacts:
    """What an answer says beside the plan."""

    costs: StepCosts
    model_flops: int
    exact: bool
    tiled: tuple[str, ...]
    """The regions that run in tiles."""
    lowering_s: float = 0.0


def offline_config(config: MemoConfig, hardware: HardwareProfile | None) -> MemoConfig:
    """``config`` for a step that never runs."""
    config = replace(config, costs="roofline", cache=False)
    if hardware is not None and hardware.name != "cpu":
        config = replace(config, inductor_options={**config.inductor_options, **_PLAIN_LOOPS})
    return config


def planned_offline(
    known: KnownStep, config: MemoConfig, facts: OfflineFacts, request: PlanRequest | None = None
) -> tuple[PlannedStep, OfflineStep]:
    """The step planned for ``config``, at any speed but one that ends the plan (TooSlow)."""
    request = request or PlanRequest()
    planned = plan_known(known, _of_one_arena(known, config, request), request)
    made = planned.plan
    timeline = made.timeline
    if timeline is None:  # everything is kept: no step is faster
        timeline = simulate(planned.problem, facts.costs)
        step_s = timeline.step_s
        made = replace(made, timeline=timeline, step_lower_bound_s=step_s, compute_s=step_s)
    observed = Observed(
        planning_s=planned.planning_s,
        lowering_s=facts.lowering_s,
        stall_s=timeline.stall_s,
    )
    found = OfflineStep(
        problem=planned.problem,
        plan=ReportedPlan.of(made, observed),
        costs=_with_recomputation(facts.costs, known, config, planned.problem),
        model_flops=facts.model_flops,
        exact=facts.exact,
        notes=tuple(_not_compared(facts.tiled, planned.plan)),
    )
    return planned, found


def _of_one_arena(known: KnownStep, config: MemoConfig, request: PlanRequest) -> MemoConfig:
    """``config`` with what its budget leaves to a plan, whose arena counts once."""
    budget_bytes = config.budget_bytes(known.device_bytes())
    if budget_bytes is None or config.arena_percent == 100:
        return config
    beside_bytes = beside_arena_bytes(known.requested(request))
    return replace(config, memory_budget=config.plan_bytes(budget_bytes, beside_bytes))


def _with_recomputation(
    costs: StepCosts, known: KnownStep, config: MemoConfig, problem: Problem
) -> StepCosts:
    """``costs`` with those of the recompute regions that ``problem`` calls."""
    again = {call.region for call in problem.calls if call.kind is CallKind.RECOMPUTE}
    if not again:
        return costs
    made = known.library(config.host_store).regions.values()
    more = {region.key.region: region.seconds for region in made if region.key.region in again}
    return replace(costs, region_s={**costs.region_s, **more})


def _not_compared(tiled: Sequence[str], plan: Plan) -> Iterator[str]:
    """What runs in slices of rows because rules say so."""
    if tiled:
        yield NOT_COMPARED.format(f"tiles of {', '.join(tiled)}")
    if recomputes_slices(plan.decisions):
        yield NOT_COMPARED.format("recomputations of a part of the tokens")
