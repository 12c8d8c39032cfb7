"""Plans a lowered step for a request: decides what moves under the budget, places it, proves it."""

from memo_compile.config import MemoConfig
from memo_compile.driver.knowledge import StepKnowledge
from memo_compile.driver.stages import LoweredStep, PlannedStep, PlanRequest
from memo_compile.driver.step_planner import plan_known


def plan_step(
    lowered: LoweredStep, config: MemoConfig, request: PlanRequest, known: StepKnowledge
) -> PlannedStep:
    """The checked plan; ``known`` keeps what can be reused. Raises Infeasible: no plan fits."""
    assert known.lowered is lowered, "what is known is known of this step"
    return plan_known(known, config, request)
