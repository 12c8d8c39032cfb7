"""Numbers of the last step, under names that TensorBoard and Weights & Biases group by."""

import torch

from memo_compile.lowering import region_cache
from memo_compile.reporting import state
from memo_compile.step.plans import ReportedPlan


def metrics() -> dict[str, float]:
    """Returns numbers of the last step that has ended: what was planned, and what it did.

    ``memo/active`` is 1.0 where ``report().active`` is True. Of several graphs in a step the
    largest peak counts, and the sum of what they moved. A step is a forward with its backward: with
    accumulated gradients each micro-batch is one. ``memo/lowered_regions`` counts those that
    Inductor lowered in this process, and none that came from the cache. Unknown numbers are left
    out: before the first step all but ``memo/active``, ``memo/unplanned_steps`` and
    ``memo/lowered_regions``, without a budget ``memo/budget_bytes``, and
    ``memo/measured_peak_bytes`` on a CPU. On CUDA that is torch's ``max_memory_allocated``, since
    the process began or since its peak was reset.
    """
    report, plans = state.report(), state.last_step()
    numbers = {
        "memo/active": float(report.active),
        "memo/unplanned_steps": float(report.unplanned_steps),
        "memo/lowered_regions": float(region_cache.counts.lowered),
    }
    if plans:
        numbers |= {f"memo/{name}": float(value) for name, value in _of_step(plans).items()}
    if plans and torch.cuda.is_available():
        numbers["memo/measured_peak_bytes"] = float(torch.cuda.max_memory_allocated())
    return numbers


def _of_step(plans: tuple[ReportedPlan, ...]) -> dict[str, float]:
    """Returns the numbers of a step whose graphs ran by ``plans``."""
    budgets = [plan.budget_bytes for plan in plans if plan.budget_bytes is not None]
    return {
        "planned_peak_bytes": max(plan.peak_bytes for plan in plans),
        "arena_bytes": max(plan.arena_bytes for plan in plans),
        "host_bytes": max(plan.host_bytes for plan in plans),
        "offloaded_bytes": sum(plan.offloaded_bytes for plan in plans),
        "recomputed_bytes": sum(plan.recomputed_bytes for plan in plans),
        "stall_s": sum(plan.stall_s for plan in plans),
    } | ({"budget_bytes": min(budgets)} if budgets else {})
