"""The report as text: a table a plan, then what was left out."""

import io

from rich.console import Console
from rich.table import Table

from memo_compile.reporting.state import Report
from memo_compile.reporting.view import short_source
from memo_compile.step.plans import ReportedPlan
from memo_compile.units import format_bytes, format_seconds

_WIDTH = 110


def render(report: Report) -> str:
    """``report`` as text of at most 110 columns."""
    text = io.StringIO()
    console = Console(file=text, width=_WIDTH, highlight=False, no_color=True)
    state = "active" if report.active else "NOT active"
    console.print(
        f"memo is {state}: {len(report.plans)} plan(s), "
        f"{report.unplanned_steps} step(s) ran without one"
    )
    for plan in report.plans:
        console.print(_numbers(plan))
        if plan.decisions:
            console.print(_decisions(plan))
    for note in report.notes:
        console.print(f"note: {note}")
    return text.getvalue().rstrip()


def _numbers(plan: ReportedPlan) -> Table:
    table = Table(title=f"plan {plan.name}", show_header=False, title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("remark")
    ratio = plan.arena_bytes / plan.lower_bound_bytes if plan.lower_bound_bytes else 1.0
    budget = "no budget" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)
    table.add_row("peak of the step", format_bytes(plan.peak_bytes), budget)
    table.add_row("arena", format_bytes(plan.arena_bytes), f"{ratio:.4f} x the live bytes")
    kinds = ", ".join(f"{k} {format_bytes(v)}" for k, v in plan.outside_bytes_by_kind.items())
    table.add_row("outside the arena", format_bytes(plan.outside_bytes), kinds or "nothing")
    fixed = plan.fixed
    table.add_row("parameters", format_bytes(fixed.parameters), "")
    table.add_row("gradients", format_bytes(fixed.gradients), "")
    assumed = fixed.optimizer_state == 2 * fixed.new_gradients
    remark = "two tensors a parameter" if assumed else "as declared"
    table.add_row("optimizer state", format_bytes(fixed.optimizer_state), remark)
    rest = fixed.buffers + fixed.inputs + fixed.outputs
    table.add_row("buffers, inputs, outputs", format_bytes(rest), "")
    if plan.dropping_saves_bytes:
        saved = format_bytes(plan.dropping_saves_bytes)
        table.add_row(
            "results count as held",
            format_bytes(fixed.outputs),
            f"dropped before the backward: {saved} less (outputs='dropped')",
        )
    if fixed.earlier_outputs:
        table.add_row("results of earlier steps", format_bytes(fixed.earlier_outputs), "held")
    for cls in plan.layer_classes:
        table.add_row(
            "layers", str(cls.num_layers), f"{cls.module_path or 'no module'}, period {cls.period}"
        )
    table.add_row("regions lowered", str(plan.num_regions), format_seconds(plan.lowering_s))
    table.add_row("planning", format_seconds(plan.planning_s), plan.solver)
    table.add_row("checker", "valid" if plan.check.ok else "INVALID", str(plan.check))
    return table


def _decisions(plan: ReportedPlan) -> Table:
    table = Table(title="saved activations, per layer", title_justify="left")
    for column in ("layers", "tensor"):
        table.add_column(column, overflow="fold")
    table.add_column("bytes", justify="right")
    for column in ("decision", "tokens", "why", "source"):
        table.add_column(column, overflow="fold")
    for row in plan.decisions:
        table.add_row(
            row.layer_class,
            row.tensor,
            format_bytes(row.bytes),
            row.decision,
            f"{row.token_fraction:.3f}",
            row.reason,
            short_source(row.source),
        )
    return table
