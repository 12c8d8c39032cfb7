"""``memo fit SCRIPT.py``: the longest sequence, or the largest batch, for a device."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memo_compile.cli.options import AsJson, Script, require_script, stdout_to_stderr
from memo_compile.cli.progress import saying, working
from memo_compile.costs.hardware import find_hardware
from memo_compile.errors import InputError
from memo_compile.offline.fit_question import FitQuestion, Vary
from memo_compile.reporting.decision_lines import WIDTH, decision_lines, wrapped
from memo_compile.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from memo_compile.offline.first_call import FirstCall
    from memo_compile.offline.fit import FitAnswer, Fitted

MOST_DECISIONS = 8
"""Lines of decisions for each size, so that the answer stays on a screen."""


def fit(
    context: typer.Context,
    script: Script,
    vary: Annotated[
        str, typer.Option(help="What is made larger: sequence, batch, or both.")
    ] = "both",
    hardware: Annotated[
        str | None, typer.Option(help="Another device, e.g. h200. Default: where the script runs.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Device memory of the step: 60GiB, 80%. Default: the script's memory_budget, or "
            "with --hardware, and without a budget, what the device has."
        ),
    ] = None,
    host_budget: Annotated[
        str | None, typer.Option(help="Host memory for offloaded activations.")
    ] = None,
    multiple_of: Annotated[
        int | None,
        typer.Option(metavar="N", help="Try multiples of it. Default: 128 tokens; 1 of a batch."),
    ] = None,
    dims: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:DIM,...",
            help="Which dimensions vary together, with --vary. Default: seen from the shapes.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say the longest sequence and the largest batch that a training script can take.

    The script runs up to the first step of what it compiles with backend memo, which is planned
    for other sizes instead, and then ends: nothing is trained. Its own output goes to stderr.
    """
    require_script(context, script)
    question = _question(vary, hardware, memory, host_budget, multiple_of, dims)
    with os.fdopen(stdout_to_stderr(), "w") as stdout:
        answer = _fit_script(script, context.args, question)
        if as_json:
            print(json.dumps(_as_dict(script, answer)), file=stdout)
        else:
            print("\n".join(_lines(script, answer)), file=stdout)
    from memo_compile.offline.fit import require_fits

    require_fits(answer)


def _question(
    vary: str,
    hardware: str | None,
    memory: str | None,
    host_budget: str | None,
    multiple_of: int | None,
    dims: str | None,
) -> FitQuestion:
    """Returns the options as a question. Raises InputError: one of them cannot be used."""
    kinds = {"both": (*Vary,), **{kind.value: (kind,) for kind in Vary}}
    if vary not in kinds:
        raise InputError(f"vary: expected sequence, batch or both, got {vary!r}")
    if dims is not None and len(kinds[vary]) > 1:
        raise InputError("dims: say what they are: --vary sequence, or --vary batch")
    return FitQuestion(
        vary=kinds[vary],
        hardware=None if hardware is None else find_hardware(hardware),
        memory=memory,
        host_budget=host_budget,
        multiple_of=multiple_of,
        dims=dims,
    )


def _fit_script(script: Path, arguments: list[str], question: FitQuestion) -> "FitAnswer":
    """Runs ``script`` to its first training step and searches the sizes that fit.

    Raises InputError: the script ends without such a step.
    """
    from memo_compile.offline.first_call import at_first_call
    from memo_compile.offline.fit import Fitting

    answers: list[FitAnswer] = []

    def answer_for(call: "FirstCall") -> None:
        """Searches the sizes of the script's step, and says which are tried."""
        with working("planning") as progress:

            def say_tried(what: Vary, size: int, fits: bool) -> None:
                says = "fits" if fits else "does not fit"
                progress.console.print(f"{what.value} of {size:,}: {says}")

            answers.append(Fitting(call, question).answer(saying(progress), say_tried))

    code = at_first_call(script, arguments, answer_for)
    if not answers:
        how = "" if not code else f" (it left with exit code {code}; its own output is above)"
        raise InputError(
            f'{script}: no training step went through torch.compile(backend="memo"){how}; compile '
            "the model with it, and call it with gradients"
        )
    return answers[0]


def _lines(script: Path, answer: "FitAnswer") -> Iterator[str]:
    """Yields the answer as lines of at most WIDTH characters."""
    shapes = ", ".join(
        f"{path} {' x '.join(map(str, shape))}" for path, shape in answer.shapes.items()
    )
    yield from wrapped(f"{script.name}: {answer.name} ({shapes})")
    yield f"  on {answer.device}, {format_bytes(answer.budget_bytes)} for the step"
    for fitted in answer.largest:
        yield from _lines_of(fitted)
    if any(fitted.size for fitted in answer.largest):
        options = {"memory_budget": answer.budget_bytes, **answer.options}
        yield from wrapped(f"planned with options={options!r}")
    for note in _notes(answer):
        yield from wrapped(f"note: {note}")


def _lines_of(fitted: "Fitted") -> Iterator[str]:
    """Yields what is said of one kind of size: the largest that fits, its plan, its decisions."""
    what, step = fitted.varied.what.value, fitted.step
    word = "longest" if what == "sequence" else "largest"
    if step is None:
        yield f"{word} {what}: none, not even {fitted.multiple_of}"
        return
    plan, host_bytes = step.plan, step.problem.host_bytes
    assert plan.timeline is not None, "an offline plan is simulated"
    factor = fitted.size / fitted.varied.size
    yield from wrapped(
        f"{word} {what}: {fitted.size:,}, {factor:.3g} times the script's {fitted.varied.size:,} "
        f"({fitted.varied})"
    )
    kind = "" if step.exact else " (estimated, an upper bound)"
    host = f", {format_bytes(host_bytes)} on the host" if host_bytes else ""
    yield (
        f"  peak {format_bytes(plan.peak_bytes)}{kind}{host}; step "
        f"{format_seconds(plan.timeline.step_s)} (roofline), policy {plan.policy}"
    )
    decisions = list(decision_lines(plan.decisions, plan.layer_classes, width=WIDTH - 2))
    for line in decisions[:MOST_DECISIONS]:
        yield f"  {line}"
    if len(decisions) > MOST_DECISIONS:
        yield f"  {len(decisions) - MOST_DECISIONS} more decisions: memo explain --verbose has all"
    if fitted.refused:
        yield from wrapped(f"  not memory bounds it: a larger one fails ({fitted.refused})")


def _notes(answer: "FitAnswer") -> Iterable[str]:
    """Returns the notes of all sizes and plans, each once."""
    notes = (
        note
        for fitted in answer.largest
        for note in (*fitted.notes, *(() if fitted.step is None else fitted.step.notes))
    )
    return dict.fromkeys(notes)


def _as_dict(script: Path, answer: "FitAnswer") -> dict[str, Any]:
    return {
        "script": str(script),
        "step": answer.name,
        "inputs": {path: list(shape) for path, shape in answer.shapes.items()},
        "hardware": answer.device,
        "budget_bytes": answer.budget_bytes,
        "fits": answer.fits,
        "options": dict(answer.options),
        "found": [_fitted_dict(fitted) for fitted in answer.largest],
    }


def _fitted_dict(fitted: "Fitted") -> dict[str, Any]:
    step = fitted.step
    body: dict[str, Any] = {
        "vary": fitted.varied.what.value,
        "dims": [{"tensor": path, "dim": dim} for path, dim in fitted.varied.dims],
        "script_size": fitted.varied.size,
        "multiple_of": fitted.multiple_of,
        "size": fitted.size,
        "bound": "model" if fitted.refused else "memory",
        "refused": fitted.refused or None,
        "notes": [*fitted.notes, *(() if step is None else step.notes)],
    }
    if step is None:
        return {**body, "peak_bytes": None, "floor_bytes": fitted.floor_bytes}
    timeline = step.plan.timeline
    assert timeline is not None, "an offline plan is simulated"
    return {
        **body,
        "peak_bytes": step.plan.peak_bytes,
        "host_bytes": step.problem.host_bytes,
        "step_s": timeline.step_s,
        "policy": step.plan.policy,
        "buffers": "exact" if step.exact else "estimated",
    }
