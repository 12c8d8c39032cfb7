"""The last step in numbers with names that TensorBoard and Weights & Biases group by."""

import torch

from memo_compile.reporting import state
from memo_compile.step.plans import ReportedPlan


def metrics() -> dict[str, float]:
    """What was planned of the last step that has ended, and what it did; every value a number.

    ``memo/active`` is 1.0 where ``report().active`` is True. Of several graphs in a step the
    largest peak counts, and the sum of what they moved. A step is a forward with its backward: of
    accumulated gradients each micro-batch is one. What is not known has no name here: before the
    first step all but ``memo/active`` and ``memo/unplanned_steps``, without a bound
    ``memo/budget_bytes``, and ``memo/measured_peak_bytes`` on a CPU. On CUDA that is torch's
    ``max_memory_allocated``, since the process began or since its peak was reset.
    """
    report, ran = state.report(), state.last_step()
    found = {
        "memo/active": float(report.active),
        "memo/unplanned_steps": float(report.unplanned_steps),
    }
    if ran:
        found |= {f"memo/{name}": float(value) for name, value in _of_step(ran).items()}
    if ran and torch.cuda.is_available():
        found["memo/measured_peak_bytes"] = float(torch.cuda.max_memory_allocated())
    return found


def _of_step(ran: tuple[ReportedPlan, ...]) -> dict[str, float]:
    budgets = [plan.budget_bytes for plan in ran if plan.budget_bytes is not None]
    return {
        "planned_peak_bytes": max(plan.peak_bytes for plan in ran),
        "arena_bytes": max(plan.arena_bytes for plan in ran),
        "host_bytes": max(plan.host_bytes for plan in ran),
        "offloaded_bytes": sum(plan.offloaded_bytes for plan in ran),
        "recomputed_bytes": sum(plan.recomputed_bytes for plan in ran),
        "stall_s": sum(plan.stall_s for plan in ran),
    } | ({"budget_bytes": min(budgets)} if budgets else {})
