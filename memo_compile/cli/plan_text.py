"""The answer of ``memo plan`` on one screen, and what to change where the step does not fit."""

import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memo_compile.reporting.decision_lines import decision_lines
from memo_compile.units import format_bytes, format_enough, format_seconds

if TYPE_CHECKING:
    from memo_compile.offline.forecast import Forecast

WIDTH = 100
"""Characters of a line: what a terminal shows beside a margin."""

MOST_DECISIONS, MOST_NOTES = 12, 3
"""Lines of decisions, and notes, that fit on the screen with the rest; ``--verbose`` has all."""

NO_STALL = 0.001
"""Share of the step below which copies are said to hide."""

SEQ_GRANULE = 1024
"""A shorter sequence is told in multiples of this."""


def plan_lines(answer: "Forecast", max_seq: int | None) -> Iterator[str]:
    """The whole answer, at most 40 lines of WIDTH characters."""
    yield from _wrapped(verdict(answer), "  ")
    for name, text in numbers(answer, max_seq):
        yield from _wrapped(f"  {name:<18}{text}", " " * 20)
    plan = answer.step.plan
    lines = list(
        decision_lines(plan.decisions, plan.layer_classes, copies=_copies(answer), width=WIDTH)
    )
    yield from _shown(lines, MOST_DECISIONS, "decisions")
    if not answer.fits:
        yield "what to change:"
        for advice in _advice(answer):
            yield from _wrapped(f"  {advice}", "    ")
    yield from _shown([f"note: {note}" for note in answer.notes], MOST_NOTES, "notes")


def _shown(lines: Sequence[str], most: int, what: str) -> Iterator[str]:
    """Each line cut to the screen's width, and how many there are beyond ``most``."""
    for line in lines[:most]:
        yield textwrap.shorten(line, WIDTH, placeholder=" ...")
    if len(lines) > most:
        yield f"{len(lines) - most} more {what}: --verbose"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=indent, drop_whitespace=True, break_on_hyphens=False
    )


def verdict(answer: "Forecast") -> str:
    """Does it fit, and by how much."""
    question = answer.question
    room = format_bytes(abs(answer.budget_bytes - answer.peak_bytes))
    fits = f"fits, {room} to spare" if answer.fits else f"does not fit: {room} too much"
    seq = "" if question.seq is None else f", {question.batch} x {question.seq} tokens"
    return f"{answer.name}{seq} on {question.hardware.name}: {fits}"


def numbers(answer: "Forecast", max_seq: int | None) -> Iterator[tuple[str, str]]:
    """(name, text) of what the plan needs and takes."""
    plan, fixed, peak = answer.step.plan, answer.step.plan.fixed, answer.peak_at
    kind = "exact" if answer.step.exact else "estimated, an upper bound"
    if max_seq is not None:
        yield "longest sequence", str(max_seq)
    yield "peak", f"{format_bytes(answer.peak_bytes)} of {format_bytes(answer.budget_bytes)}"
    yield "activations", f"{format_bytes(plan.arena_bytes)} arena ({kind}), policy {plan.policy}"
    yield (
        "model",
        f"{format_bytes(fixed.parameters)} parameters, {format_bytes(fixed.gradients)} gradients, "
        f"{format_bytes(fixed.optimizer_state)} optimizer state ({answer.question.optimizer})",
    )
    yield "outside", f"{format_bytes(answer.outside_bytes)} of libraries"
    bound = ""
    if answer.host_bytes and answer.question.host_budget is None:
        bound = " on each device's host (no --host-budget was given)"
    yield "host", f"{format_bytes(answer.host_bytes)} of pinned memory{bound}"
    if peak is not None:
        largest = ", ".join(f"{t.name} {format_bytes(t.size_bytes)}" for t in peak.tensors)
        yield "set by", f"{peak.call} ({peak.phase}): {largest}"
    speed = "" if answer.tokens_per_s is None else f", {answer.tokens_per_s:.0f} tokens/s"
    yield "step", f"{format_seconds(answer.step_s)}, MFU {answer.mfu:.1%}{speed} (roofline)"
    if plan.timeline is not None:
        yield "stalls", format_seconds(plan.timeline.stall_s)
    if plan.step_lower_bound_s:
        above = answer.step_s / plan.step_lower_bound_s - 1
        yield (
            "at best",
            f"{format_seconds(plan.step_lower_bound_s)}: this plan is {above:.1%} above",
        )


def _copies(answer: "Forecast") -> str:
    stall_s = answer.step.plan.timeline.stall_s if answer.step.plan.timeline else 0.0
    if stall_s <= NO_STALL * answer.step_s:
        return "copies hide"
    return f"the step waits {format_seconds(stall_s)} for copies"


def _advice(answer: "Forecast") -> Iterator[str]:
    """What would make the step fit, the least first; sizes that depend on another plan are near."""
    question, fixed = answer.question, answer.step.plan.fixed
    over, total = answer.peak_bytes, question.hardware.memory_bytes
    if over <= total:
        yield f"--budget {format_enough(over).replace(' ', '')} holds this plan, the smallest one"
    constant = fixed.parameters + fixed.gradients + fixed.optimizer_state
    room = answer.budget_bytes - constant
    if room <= 0:
        yield (
            f"no sequence is short enough: parameters, gradients and optimizer state alone take "
            f"{format_bytes(constant)}; more devices (--tp, --pp), or another --optimizer"
        )
    elif question.seq is not None:
        # The least bytes beside the constant ones grow about linearly with the tokens.
        seq = int(question.seq * room / max(1, over - constant))
        granule = SEQ_GRANULE if seq >= SEQ_GRANULE else 1
        seq = seq // granule * granule
        cut = 1 - seq / question.seq
        yield f"about {cut:.0%} shorter, --seq {seq}; --max-seq finds the longest that fits"
    if question.degrees.pp == 1:
        tp = question.degrees.tp * 2 ** math.ceil(math.log2(max(2, over / answer.budget_bytes)))
        yield f"--tp {tp}: weights and activations over {tp} devices take about their share each"
