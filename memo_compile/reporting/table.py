"""The report as text: lines or tables for each plan, then what was left out."""

import io
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from memo_compile.reporting.decision_lines import WIDTH, decision_lines, wrapped
from memo_compile.reporting.state import Report
from memo_compile.reporting.view import short_source
from memo_compile.step.plans import Decision, ReportedGroup, ReportedPlan
from memo_compile.units import format_bytes, format_seconds

_TABLE_WIDTH = 110
"""Characters of a table's line: it has seven columns, of which four are text."""


def render(report: Report, *, verbose: bool) -> str:
    """Returns ``report`` as text; verbose: with tables, which have each tensor's reason."""
    state = "active" if report.active else "NOT active"
    groups = f"{len(report.groups)} group(s), " if report.groups else ""
    head = (
        f"memo is {state}: {len(report.plans)} plan(s), {groups}"
        f"{report.unplanned_steps} step(s) ran without one"
    )
    parts = [head]
    for plan in _standing(report):
        parts += _wrapped(_lines(plan))
        if verbose and plan.decisions:
            text = io.StringIO()
            console = Console(file=text, width=_TABLE_WIDTH, highlight=False, no_color=True)
            console.print(decision_table(plan.decisions))
            parts.append(text.getvalue().rstrip())
        elif plan.decisions:
            lines = decision_lines(plan.decisions, plan.layer_classes, width=WIDTH - 2)
            parts += _wrapped(f"  {line}" for line in lines)
    return "\n".join([*parts, *_wrapped(f"note: {note}" for note in report.notes)])


def _wrapped(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield from wrapped(line)


def _standing(report: Report) -> tuple[ReportedPlan, ...]:
    """Returns the plans by which steps run: a group's in place of those of its single graphs."""
    grouped = {name for group in report.groups for name in group.graphs}
    return (*(plan for plan in report.plans if plan.name not in grouped), *report.groups)


def _title(plan: ReportedPlan) -> str:
    """Names what ``plan`` is of: ``plan graph0``, ``group of 12 x layers``."""
    if not isinstance(plan, ReportedGroup):
        return f"plan {plan.name}"
    if len(plan.graphs) == 1:
        return f"group of {plan.num_instances} x {plan.module_path or plan.graphs[0]}"
    return f"group of {len(plan.graphs)} graphs, {plan.num_instances} calls in a step"


def _on_host(size_bytes: int) -> str:
    return f" and {format_bytes(size_bytes)} on the host" if size_bytes else ""


def _lines(plan: ReportedPlan) -> Iterator[str]:
    """Yields what a person wants to know of a plan, a line each."""
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
        f"  parameters {format_bytes(fixed.parameters)}"
        + _on_host(fixed.parameters_on_host)
        + f", gradients {format_bytes(fixed.gradients)},"
        f" optimizer state {format_bytes(fixed.optimizer_state)}" + _on_host(fixed.state_on_host)
    )
    if fixed.gradients_on_host:
        home = format_bytes(fixed.gradients_on_host)
        yield f"  gradients of {home} go to the host as they are made; the update is there"
    other_bytes = fixed.buffers + fixed.inputs + fixed.outputs
    kinds = {**plan.outside_bytes_by_kind, "libraries": fixed.libraries}
    allocated = "".join(f", {kind} {format_bytes(size)}" for kind, size in kinds.items() if size)
    if other_bytes or allocated:
        yield f"  buffers, inputs and outputs {format_bytes(other_bytes)}{allocated}"
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
        measured = f", {format_seconds(plan.measured_s)} measured" if plan.measured_s else ""
        yield (
            f"  step {format_seconds(plan.step_s)} simulated{measured}; the last one moved "
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
        f"{format_seconds(plan.planning_s)} by {plan.solver}; checker: {plan.check}"
    )
    if plan.layer_classes:
        layers = (
            f"{cls.num_layers} x {cls.module_path or 'no module'}, period {cls.period}"
            for cls in plan.layer_classes
        )
        yield f"  layers: {', '.join(layers)}"


def _measured(plan: ReportedPlan) -> str:
    """Says of how many collectives the seconds were measured; those of others are declared."""
    declared = plan.num_collectives - plan.measured_collectives
    if declared == 0:
        return "collectives measured"
    if plan.measured_collectives == 0:
        return "collectives declared"
    return f"{plan.measured_collectives} measured, of {declared} declared"


def decision_table(decisions: Iterable[Decision]) -> Table:
    """Returns a table with a row for each tensor, with the reason."""
    table = Table(title="saved activations, per layer", title_justify="left")
    for column in ("layers", "tensor", "bytes", "decision", "tokens", "why", "source"):
        table.add_column(column, overflow="fold")
    for row in decisions:
        tokens, size = f"{row.token_fraction:.3f}", format_bytes(row.bytes)
        cells = (size, row.decision, tokens, row.reason, short_source(row.source))
        table.add_row(*map(escape, (row.layer_class, row.tensor, *cells)))
    return table
