"""The report as text: lines or tables for each plan, then what was left out."""

import io
import textwrap
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from memo_compile.reporting.decision_lines import decision_lines
from memo_compile.reporting.state import Report
from memo_compile.reporting.view import short_source
from memo_compile.step.plans import ReportedGroup, ReportedPlan
from memo_compile.units import format_bytes, format_seconds

_WIDTH, _TABLE_WIDTH = 100, 110
"""Of lines, as the commands print them; a table has seven columns, of which four are text."""


def render(report: Report, *, verbose: bool) -> str:
    """``report`` as text of at most 100 columns; verbose: tables of 110 with all reasons."""
    state = "active" if report.active else "NOT active"
    groups = f"{len(report.groups)} group(s), " if report.groups else ""
    head = (
        f"memo is {state}: {len(report.plans)} plan(s), {groups}"
        f"{report.unplanned_steps} step(s) ran without one"
    )
    if verbose:
        return f"{head}\n{_tables(report)}".rstrip()
    lines = [line for plan in _standing(report) for line in _lines(plan)]
    notes = [f"note: {note}" for note in report.notes]
    wrapped = (
        part
        for line in (*lines, *notes)
        for part in textwrap.wrap(line, _WIDTH, subsequent_indent="    ", break_on_hyphens=False)
    )
    return "\n".join([head, *wrapped])


def _standing(report: Report) -> tuple[ReportedPlan, ...]:
    """The plans by which steps run: a group's stands in place of those of its single graphs."""
    grouped = {name for group in report.groups for name in group.graphs}
    return (*(plan for plan in report.plans if plan.name not in grouped), *report.groups)


def _title(plan: ReportedPlan) -> str:
    """What ``plan`` is of."""
    if not isinstance(plan, ReportedGroup):
        return f"plan {plan.name}"
    if len(plan.graphs) == 1:
        return f"group of {plan.num_instances} x {plan.module_path or plan.graphs[0]}"
    return f"group of {len(plan.graphs)} graphs, {plan.num_instances} calls in a step"


def _lines(plan: ReportedPlan) -> Iterator[str]:
    """What a person wants to know of a plan, a line each."""
    fixed = plan.fixed
    budget = (
        "no budget" if plan.budget_bytes is None else f"budget {format_bytes(plan.budget_bytes)}"
    )
    yield f"{_title(plan)}: peak {format_bytes(plan.peak_bytes)}, {budget}, policy {plan.policy}"
    ratio = plan.arena_bytes / plan.lower_bound_bytes if plan.lower_bound_bytes else 1.0
    yield (
        f"  arena {format_bytes(plan.arena_bytes)} ({ratio:.4f} x the live bytes), outside it "
        f"{format_bytes(plan.outside_bytes)}, on the host {format_bytes(plan.host_bytes)}"
    )
    yield (
        f"  parameters {format_bytes(fixed.parameters)}, gradients {format_bytes(fixed.gradients)},"
        f" optimizer state {format_bytes(fixed.optimizer_state)}"
    )
    if plan.dropping_saves_bytes:
        yield (
            f"  results count as held, {format_bytes(fixed.outputs)}: dropped before the backward "
            f"{format_bytes(plan.dropping_saves_bytes)} less (outputs='dropped')"
        )
    if isinstance(plan, ReportedGroup) and plan.between_bytes:
        yield f"  code between its blocks takes {format_bytes(plan.between_bytes)} at its most"
    if fixed.earlier_outputs:
        yield f"  results of earlier steps are held: {format_bytes(fixed.earlier_outputs)}"
    if plan.step_s:
        yield (
            f"  step {format_seconds(plan.step_s)} simulated; the last one moved "
            f"{format_bytes(plan.offloaded_bytes)} to the host and recomputed "
            f"{format_bytes(plan.recomputed_bytes)}"
        )
    if plan.num_collectives:
        yield (
            f"  {plan.num_collectives} collectives: {format_seconds(plan.hidden_comm_s)} beside "
            f"computation, of which {format_seconds(plan.window_recompute_s)} recompute, and "
            f"{format_seconds(plan.exposed_comm_s)} waited for, simulated; the last step waited "
            f"{format_seconds(plan.comm_wait_s)}; seconds of {_measured(plan)}"
        )
    yield (
        f"  {plan.num_regions} regions lowered in {format_seconds(plan.lowering_s)}, planned in "
        f"{format_seconds(plan.planning_s)}; checker: {plan.check}"
    )
    if plan.layer_classes:
        layers = (
            f"{cls.num_layers} x {cls.module_path or 'no module'}" for cls in plan.layer_classes
        )
        yield f"  layers: {', '.join(layers)}"
    for line in decision_lines(plan.decisions, plan.layer_classes, width=_WIDTH - 2):
        yield f"  {line}"


def _tables(report: Report) -> str:
    text = io.StringIO()
    console = Console(file=text, width=_TABLE_WIDTH, highlight=False, no_color=True)
    for plan in _standing(report):
        console.print(_numbers(plan))
        if plan.decisions:
            console.print(_decisions(plan))
    for note in report.notes:
        console.print(f"note: {note}")
    return text.getvalue()


def _measured(plan: ReportedPlan) -> str:
    """Of how many collectives the seconds were measured, and which are declared."""
    declared = plan.num_collectives - plan.measured_collectives
    if declared == 0:
        return "collectives measured"
    if plan.measured_collectives == 0:
        return "collectives declared"
    return f"{plan.measured_collectives} measured, of {declared} declared"


def _numbers(plan: ReportedPlan) -> Table:
    table = Table(title=_title(plan), show_header=False, title_justify="left")
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
    if isinstance(plan, ReportedGroup) and plan.between_bytes:
        table.add_row("code between blocks", format_bytes(plan.between_bytes), "as measured")
    if fixed.libraries:
        what = "cuBLAS's workspaces; Inductor's tuning"
        table.add_row("kept by libraries", format_bytes(fixed.libraries), what)
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
