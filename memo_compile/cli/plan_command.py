"""``memo plan``: plans a training step that never runs, and says whether it fits a device."""

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from memo_compile.cli.options import AsJson, Hardware, parse_count
from memo_compile.cli.plan_text import numbers, plan_lines, verdict
from memo_compile.cli.progress import saying, working
from memo_compile.config import resolve
from memo_compile.costs.hardware import HardwareProfile, find_hardware
from memo_compile.errors import Infeasible, InputError
from memo_compile.garbage import seldom_collected
from memo_compile.reporting.emit import TOOLS, Settings, emit
from memo_compile.reporting.html import render_html
from memo_compile.reporting.table import decision_table
from memo_compile.step.serialise import to_json
from memo_compile.text_files import require_writable, write_text
from memo_compile.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from memo_compile.offline.forecast import Forecast, Question


GARBAGE = 2_000_000
"""Python's garbage collector looks for cycles after so many new objects: with its default it took a
sixth of a plan's time, mostly in vain. A plan of Llama-3-8B stays below 600 MiB."""

PLAIN_WIDTH = 140
"""Characters of a line where stdout is a file or a pipe."""


NUM_BUDGETS = 8
"""How many budgets a sweep has by default."""

OPTIMIZER_HELP = "adamw, adamw-fp32 (float32 master weights), sgd, sgd-momentum, none."


def plan_command(
    model: Annotated[
        str, typer.Argument(help="A named shape, a config.json, or package.module:function.")
    ],
    seq: Annotated[
        int | None, typer.Option(parser=parse_count, metavar="N", help="Tokens of one sequence.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences of a micro-batch.")] = 1,
    dtype: Annotated[str, typer.Option(help="Of parameters and activations.")] = "bfloat16",
    hardware: Hardware = "h200",
    budget: Annotated[
        str | None,
        typer.Option(help="Device memory of the step: 60GiB, 80%. Default: all but 1 GiB."),
    ] = None,
    host_budget: Annotated[
        str | None,
        typer.Option(
            help="Host memory for offloaded activations: 400GiB, 50%, none. Default: the share of "
            "one device in its usual machine, less a tenth (memo hardware show has it)."
        ),
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor and sequence parallel devices.")] = 1,
    cp: Annotated[int, typer.Option(help="Context parallel devices.")] = 1,
    cp_kind: Annotated[
        str | None,
        typer.Option(help="ring, or ulysses (all-to-all). Default: the faster one that fits."),
    ] = None,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    dp: Annotated[int, typer.Option(help="Data parallel replicas; ZeRO-1 over dp x cp.")] = 1,
    optimizer: Annotated[str, typer.Option(help=OPTIMIZER_HELP)] = "adamw",
    offload: Annotated[
        str,
        typer.Option(
            help="On the host: none, state of the optimizer, gradients too (and the update), "
            "weights too; auto: as fits."
        ),
    ] = "none",
    lora: Annotated[
        int | None,
        typer.Option(metavar="RANK", help="Train adapters of this rank beside frozen weights."),
    ] = None,
    policy: Annotated[str, typer.Option(help="auto, or a named one for ablation.")] = "auto",
    max_seq: Annotated[bool, typer.Option(help="Search the longest sequence that fits.")] = False,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="budget", help="Plans for budgets from the smallest one to none."),
    ] = None,
    budgets: Annotated[
        int | None, typer.Option(help="How many of them.", show_default=str(NUM_BUDGETS))
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option(help="Trace and lower anew; remember nothing and use nothing remembered."),
    ] = False,
    emit: Annotated[
        str | None, typer.Option(help="Settings of hf, torchtitan or megatron on stdout.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan as JSON.")] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Every tensor with its reason, and whole notes.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Plan one training step on any machine: does it fit, how fast is it, what sets the peak."""
    from memo_compile.offline.forecast import Question
    from memo_compile.offline.shapes.degrees import Degrees, parse_dtype

    _require_one_form(emit, as_json=as_json)
    _require_one_question(sweep, budgets, max_seq=max_seq)
    for path in (report, out):
        if path is not None:
            require_writable(path)
    device = find_hardware(hardware)
    question = Question(
        model=model,
        hardware=device,
        seq=seq,
        batch=batch,
        dtype=parse_dtype(dtype),
        degrees=Degrees(tp=tp, cp=cp, pp=pp, dp=dp, cp_kind=cp_kind),
        budget=budget,
        host_budget=_host_budget(host_budget, device),
        optimizer=optimizer,
        offload=offload,
        lora=lora,
        policy=policy,
        remembers=not fresh,
    )
    if sweep is not None:
        _sweep(question, NUM_BUDGETS if budgets is None else budgets, as_json=as_json)
        return
    answer, longest_seq = _forecast(question, max_seq, as_json=as_json)
    _write(answer, report, out)
    if emit is not None:
        print(_settings_text(emit, answer), end="")
    else:
        _show(answer, longest_seq, as_json=as_json, verbose=verbose)
    if not answer.fits:
        over = format_bytes(answer.peak_bytes - answer.budget_bytes)
        print(f"memo: does not fit: {over} over the budget", file=sys.stderr)
        raise typer.Exit(1)


def _host_budget(given: str | None, device: HardwareProfile) -> str | int | None:
    """Returns the bound on host memory: ``given``, MEMO_HOST_BUDGET's, or what is usual."""
    if given == "none":
        return None
    configured = resolve(None, None).host_budget
    if given is None and configured is not None:
        return configured if isinstance(configured, str) else int(configured)
    return device.usable_host_bytes if given is None else given


def _write(answer: "Forecast", report: Path | None, out: Path | None) -> None:
    """Writes the report and the plan to the files that were asked for."""
    if report is not None:
        page = render_html(answer.step.problem, answer.step.plan, _about(answer))
        write_text(report, page)
    if out is not None:
        write_text(out, to_json(answer.step.plan))


def _about(answer: "Forecast") -> dict[str, str]:
    """Says in a report's head what was planned: model, shape, device and options."""
    question = answer.question
    hardware, degrees = question.hardware, question.degrees
    options = {
        "policy": question.policy,
        "optimizer": question.optimizer,
        "offload": question.offload,
        "budget": format_bytes(question.budget_bytes),
        **{name: str(degree) for name, degree in degrees.sizes.items() if degree > 1},
    }
    if degrees.cp_kind is not None:
        options["cp kind"] = degrees.cp_kind
    if question.host_budget_bytes is not None:
        options["host budget"] = format_bytes(question.host_budget_bytes)
    about = {"model": answer.name, "dtype": question.dtype}
    if question.seq is not None:
        about["shape"] = f"{question.batch} x {question.seq} tokens"
    about["device"] = f"{hardware.name}, {format_bytes(hardware.memory_bytes)} (planned, not run)"
    about["options"] = ", ".join(f"{name} {text}" for name, text in options.items())
    return about


def _show(answer: "Forecast", max_seq: int | None, *, as_json: bool, verbose: bool) -> None:
    """Prints the answer; ``max_seq`` is the longest sequence that fits, where it was searched."""
    if as_json:
        print(json.dumps(_as_dict(answer) | _max_seq_dict(max_seq)))
    elif verbose:
        _print_tables(answer, max_seq)
    else:
        print("\n".join(plan_lines(answer, max_seq)))


def _max_seq_dict(max_seq: int | None) -> dict[str, int]:
    return {} if max_seq is None else {"max_seq": max_seq}


def _require_one_form(emit: str | None, *, as_json: bool) -> None:
    """Raise InputError where stdout would hold two forms, or settings of an unknown tool."""
    if emit is not None and emit not in TOOLS:
        raise InputError(f"emit: expected one of {', '.join(TOOLS)}, got {emit!r}")
    if emit is not None and as_json:
        raise InputError("emit: prints settings, --json prints JSON; give one of the two")


def _require_one_question(sweep: str | None, budgets: int | None, *, max_seq: bool) -> None:
    """Raise InputError for options of which one would be ignored."""
    if sweep is not None and max_seq:
        raise InputError("sweep: it is of one length; leave out --max-seq")
    if sweep is None and budgets is not None:
        raise InputError("budgets: of a sweep; give --sweep budget with it")
    if sweep not in (None, "budget"):
        raise InputError(f"sweep: expected budget, got {sweep!r}")


@seldom_collected(GARBAGE)
def _forecast(
    question: "Question", max_seq: bool, *, as_json: bool
) -> "tuple[Forecast, int | None]":
    """Returns the forecast; with ``max_seq`` that of the longest sequence that fits, and it."""
    from memo_compile.offline.forecast import forecast, longest

    longest_seq = None
    try:
        if max_seq:
            with working("searching the longest sequence") as progress:
                longest_seq = longest(question, functools.partial(_say_tried, progress.console))
            if longest_seq == 0:
                raise Infeasible("max-seq: not even the shortest sequence fits; raise --budget")
            question = dataclasses.replace(question, seq=longest_seq)
        with working("planning") as progress:
            return forecast(question, saying(progress)), longest_seq
    except Infeasible as error:
        if as_json:
            body = {"fits": False, "conflict": str(error)}
            print(json.dumps(body | _max_seq_dict(longest_seq)))
        raise


def _say_tried(console: Console, seq: int, fits: bool) -> None:
    console.print(f"{seq} tokens: {'fits' if fits else 'does not fit'}")


@seldom_collected(GARBAGE)
def _sweep(question: "Question", num_budgets: int, *, as_json: bool) -> None:
    """Prints the plans at ``num_budgets`` budgets as a table or as JSON."""
    from memo_compile.offline.forecast import sweep

    if question.budget is not None:
        raise InputError("sweep: it chooses the budgets; leave out --budget")
    console = Console(stderr=True, highlight=False)
    progress = track(
        sweep(question, num_budgets),
        description="planning",
        total=num_budgets,
        console=console,
        disable=not console.is_terminal,
    )
    answers = list(progress)
    if as_json:
        print(json.dumps({"sweep": [_as_row(answer) for answer in answers]}))
        return
    table = Table("budget", "step", "/ computation", "/ bound", "offloaded", "recomputed", "policy")
    for answer in answers:
        plan, step_s = answer.step.plan, answer.step_s
        table.add_row(
            format_bytes(answer.budget_bytes),
            format_seconds(step_s),
            f"{step_s / plan.compute_s:.4f}" if plan.compute_s else "-",
            f"{step_s / plan.step_lower_bound_s:.4f}" if plan.step_lower_bound_s else "-",
            format_bytes(answer.offloaded_bytes),
            format_seconds(answer.recompute_s),
            plan.policy,
        )
    _stdout().print(table)
    hardware = question.hardware
    if any(answer.budget_bytes > hardware.memory_bytes for answer in answers):
        size = format_bytes(hardware.memory_bytes)
        print(f"{hardware.name} has {size}: larger budgets need another device")


def _stdout() -> Console:
    """Returns a console as wide as the terminal, or of PLAIN_WIDTH for a file or a pipe."""
    return Console(highlight=False, width=None if Console().is_terminal else PLAIN_WIDTH)


_SWEPT = (
    "budget_bytes peak_bytes host_bytes step_s compute_s step_lower_bound_s stall_s "
    "offloaded_bytes recompute_s tiles policy"
).split()
"""The fields that a sweep's JSON has of each plan."""


def _as_row(answer: "Forecast") -> dict[str, Any]:
    cost = {"offloaded_bytes": answer.offloaded_bytes, "recompute_s": answer.recompute_s}
    body = _as_dict(answer) | cost
    return {name: body[name] for name in _SWEPT}


def _settings_text(tool: str, answer: "Forecast") -> str:
    """Returns the settings of ``tool`` (hf, torchtitan, megatron) that come nearest to the plan."""
    question, plan = answer.question, answer.step.plan
    return emit(
        tool,
        Settings(
            model=answer.name,
            num_layers=sum(cls.num_layers for cls in plan.layer_classes),
            seq=question.seq,
            batch=question.batch,
            tp=question.degrees.tp,
            cp=question.degrees.cp,
            cp_kind=question.degrees.cp_kind,
            pp=question.degrees.pp,
            decisions=plan.decisions,
        ),
    )


def _as_dict(answer: "Forecast") -> dict[str, Any]:
    plan, question = answer.step.plan, answer.question
    peak, fixed = answer.peak_at, dataclasses.asdict(plan.fixed)
    del fixed["new_gradients"]
    tensors = [
        {"tensor": tensor.name, "bytes": tensor.size_bytes, "source": tensor.source}
        for tensor in (() if peak is None else peak.tensors)
    ]
    return {
        "model": answer.name,
        "hardware": question.hardware.name,
        "seq": question.seq,
        "batch": question.batch,
        "cp_kind": question.degrees.cp_kind,
        "other_cp_kind_step_s": None if answer.other_kind is None else answer.other_kind.step_s,
        "fits": answer.fits,
        "peak_bytes": answer.peak_bytes,
        "budget_bytes": answer.budget_bytes,
        "headroom_bytes": answer.budget_bytes - answer.peak_bytes,
        "arena_bytes": plan.arena_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "outside_bytes": answer.outside_bytes,
        "host_bytes": answer.host_bytes,
        "step_s": answer.step_s,
        "update_s": answer.update.sum_s,
        "stall_s": plan.stall_s,
        "num_collectives": plan.num_collectives,
        "hidden_comm_s": plan.hidden_comm_s,
        "exposed_comm_s": plan.exposed_comm_s,
        "window_recompute_s": plan.window_recompute_s,
        "step_lower_bound_s": plan.step_lower_bound_s,
        "compute_s": plan.compute_s,
        "tiles": dict(plan.tiles),
        "mfu": answer.mfu,
        "tokens_per_s": answer.tokens_per_s,
        "peak_at": None if peak is None else dataclasses.asdict(peak) | {"tensors": tensors},
        "buffers": "exact" if answer.step.exact else "estimated",
        **answer.lowered_by,
        "layer_classes": [dataclasses.asdict(cls) for cls in plan.layer_classes],
        "decisions": [dataclasses.asdict(decision) for decision in plan.decisions],
        "fixed_bytes": fixed,
        "state": dataclasses.asdict(plan.training_state),
        "policy": plan.policy,
        "micro_batches_in_flight": answer.in_flight,
        "check": str(plan.check),
        "notes": list(answer.notes),
    }


def _print_tables(answer: "Forecast", max_seq: int | None) -> None:
    """Prints the answer as tables, with every tensor."""
    console, plan = _stdout(), answer.step.plan
    console.print(f"[bold]{escape(verdict(answer))}[/bold]")
    shown = Table(show_header=False, box=None)
    for name, text in numbers(answer, max_seq):
        shown.add_row(name, text)
    console.print(shown)
    if plan.decisions:
        console.print(decision_table(plan.decisions))
    for note in answer.notes:
        console.print(f"note: {escape(note)}")
