"""A plan as one HTML page: numbers, memory, arena, lanes, frontier, decisions. It loads nothing."""

import datetime
import json
import platform
from collections import Counter
from collections.abc import Mapping
from typing import Any

from memo_compile.gpus import version_of
from memo_compile.reporting import charts
from memo_compile.reporting.charts import instances
from memo_compile.reporting.render import render
from memo_compile.reporting.view import StepView, short_source, view_step
from memo_compile.step.plans import Decision, Plan
from memo_compile.step.problem import CallKind, Problem
from memo_compile.units import format_bytes, format_seconds


def render_html(problem: Problem, plan: Plan, about: Mapping[str, str] | None = None) -> str:
    """Returns the page for ``plan``, under 2 MB for 80 layers.

    ``about`` says in its head what was planned, by whom and when: name -> text. Raises InputError:
    it is no plan of ``problem``.
    """
    view = view_step(problem, plan)
    arena, memory = charts.arena_map(view, plan), charts.memory_chart(view, plan)
    lanes, frontier = charts.lanes(problem, plan, view), charts.frontier(plan)
    group = instances(problem, view)
    pictures = {"arena": arena, "memory": memory, "instances": group, "lanes": lanes}
    hover = {name: chart.pop("data") for name, chart in pictures.items() if chart is not None}
    return render(
        "report.html.j2",
        plan=plan,
        title=plan.name or "training step",
        groups=_groups(plan),
        sentence=_sentence(problem, plan),
        verdict=_verdict(plan),
        cards=_cards(plan, view),
        parts=_parts(plan, view),
        about={**(about or {}), **written_by()},
        program=charts.program_axis(problem, plan, view),
        arena=arena,
        memory=memory,
        instances=group,
        lanes=lanes,
        frontier=frontier,
        decisions=[_decision_row(decision) for decision in plan.decisions],
        lane_kinds=charts.LANE_KINDS,
        roles=[(role.value, words) for role, words in charts.ROLE_WORDS.items()],
        data=json.dumps(hover, separators=(",", ":")).replace("<", "\\u003c"),
        bytes=format_bytes,
        seconds=format_seconds,
    )


def written_by() -> dict[str, str]:
    """Returns which versions made a page, and when."""
    versions = {"memo": version_of("memo-compile"), "torch": version_of("torch")}
    texts = [f"{name} {version}" for name, version in versions.items() if version]
    texts.append(f"Python {platform.python_version()}")
    now = datetime.datetime.now().astimezone()
    return {"versions": ", ".join(texts), "date": now.strftime("%Y-%m-%d %H:%M %Z")}


def _groups(plan: Plan) -> list[str]:
    """Says what repeats in the step: one line for each class of equal layers."""
    return [
        f"{cls.num_layers} x {cls.module_path or 'layers'}"
        + (f", {cls.period} blocks each" if cls.period > 1 else "")
        + f": compiled once, as {cls.num_regions} regions"
        for cls in plan.layer_classes
    ]


def _sentence(problem: Problem, plan: Plan) -> str:
    """Says in one sentence what was planned."""
    num_layers = sum(cls.num_layers for cls in plan.layer_classes)
    paths = ", ".join(cls.module_path for cls in plan.layer_classes if cls.module_path)
    layers = f"{num_layers} layers" + (f" ({paths})" if paths else "")
    num_runs = sum(call.kind in (CallKind.RUN, CallKind.RECOMPUTE) for call in problem.calls)
    return (
        "One training step, planned before it runs: "
        f"{layers if num_layers else 'no repeating layers'}, "
        f"forward and then backward, in {num_runs} passes. Policy {plan.policy}."
    )


def _verdict(plan: Plan) -> tuple[str, str]:
    """Returns (CSS class, words) that say whether the plan fits."""
    if not plan.check.ok:
        return "bad", "the checker found faults"
    if plan.budget_bytes is None:
        return "plain", "no budget was set"
    spare_bytes = plan.budget_bytes - plan.peak_bytes
    if spare_bytes >= 0:
        return "good", f"fits, {format_bytes(spare_bytes)} to spare"
    return "bad", f"does not fit: {format_bytes(-spare_bytes)} too much"


def _cards(plan: Plan, view: StepView) -> list[tuple[str, str, str]]:
    """Returns (label, value, remark) of the headline numbers."""
    budget = plan.budget_bytes
    budget_text = "no budget" if budget is None else f"budget {format_bytes(budget)}"
    ratio = plan.arena_bytes / plan.lower_bound_bytes if plan.lower_bound_bytes else 1.0
    cards = [
        ("peak device memory", format_bytes(plan.peak_bytes), budget_text),
        ("arena for activations", format_bytes(plan.arena_bytes), f"{ratio:.3f} x what must live"),
    ]
    if plan.timeline is not None:
        step, stall = plan.timeline.step_s, plan.timeline.stall_s
        share = f"{100 * stall / step:.1f} % waits for copies" if stall else "no stalls"
        if plan.step_lower_bound_s:
            share += f", {step / plan.step_lower_bound_s - 1:.1%} above the best possible"
        cards.append(("simulated step", format_seconds(step), share))
    on_host = ("nothing", "all tensors stay on the device")
    if plan.host_bytes:
        on_host = (format_bytes(plan.host_bytes), "in host memory")
    cards.append(("moved to the host", *on_host))
    kinds = Counter(row.decision for row in plan.decisions)
    words = ", ".join(f"{kinds[key]} {key.lower()}" for key in sorted(kinds))
    cards.append(("decisions", str(len(plan.decisions)), words or "no tensor is kept"))
    most = max(view.moments, key=lambda moment: moment.live_bytes, default=None)
    if most is not None:
        where = view.labels[view.call_at(most.line)]
        cards.append(("most activations alive", format_bytes(most.live_bytes), f"in {where}"))
    return cards


def _parts(plan: Plan, view: StepView) -> list[dict[str, Any]]:
    """Returns what the peak is made of: name, size, percent of the peak, CSS class."""
    fixed, peak = plan.fixed, view.peak
    old_gradients = max(0, fixed.gradients - fixed.new_gradients)  # of steps before this one
    rows = [
        ("parameters", fixed.parameters, "p1"),
        ("optimizer state", fixed.optimizer_state, "p2"),
        ("gradients and outputs", old_gradients + (peak.made_bytes if peak else 0), "p3"),
        ("buffers and inputs", fixed.buffers + fixed.inputs, "p4"),
        ("kept by libraries", fixed.libraries, "p5"),
        ("allocated by kernels", peak.outside_bytes if peak else 0, "p5"),
    ]
    arena = plan.peak_bytes - sum(size for _, size, _ in rows)
    rows.append(("activations (arena)", max(0, arena), "p6"))
    total = sum(size for _, size, _ in rows) or 1
    return [
        {"name": name, "size": format_bytes(size), "percent": 100 * size / total, "css": css}
        for name, size, css in rows
        if size
    ]


def _decision_row(row: Decision) -> dict[str, Any]:
    """Returns the cells of one decision in the page's table."""
    name, _, shape = row.tensor.partition(" ")
    return {
        "tensor": row.role or name,
        "value": name if row.role else "",
        "num_bytes": row.bytes,
        "shape": shape,
        "layers": row.layer_class,
        "size": format_bytes(row.bytes),
        "decision": row.decision,
        "css": {"SAVE": "saved", "OFFLOAD": "offloaded", "RECOMPUTE": "recomputed"}[row.decision],
        "tokens": "all" if row.token_fraction == 1.0 else f"{100 * row.token_fraction:.0f} %",
        "reason": row.reason,
        "source": short_source(row.source),
    }
