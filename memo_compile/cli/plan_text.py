"""The answer of ``memo plan`` on one screen, and what to change where the step does not fit."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memo_compile.reporting.decision_lines import WIDTH, decision_lines, wrapped
from memo_compile.step.problem import FixedBytes
from memo_compile.units import format_bytes, format_enough, format_seconds

if TYPE_CHECKING:
    from memo_compile.offline.forecast import Forecast, PeakAt, TensorAtPeak

MOST_LINES, MOST_DECISIONS, MOST_NOTE_LINES = 40, 12, 9
"""Most lines of the answer, and among them of decisions and of notes; ``--verbose`` has all."""

NO_STALL = 0.001
"""Share of the step below which copies are said to hide."""

SEQ_GRANULE = 1024
"""A shorter sequence is told in multiples of this."""


def plan_lines(answer: "Forecast", max_seq: int | None) -> Iterator[str]:
    """Yields the whole answer, at most MOST_LINES lines of WIDTH characters.

    ``max_seq`` is the longest sequence that fits, where it was searched.
    """
    lines = list(_answer_lines(answer, max_seq))
    yield from lines
    num_left = MOST_LINES - len(lines) - 1  # the last line says how many notes are left out
    yield from _note_lines(answer.notes, min(num_left, MOST_NOTE_LINES))


def _answer_lines(answer: "Forecast", max_seq: int | None) -> Iterator[str]:
    """Yields all lines but the notes."""
    yield from wrapped(verdict(answer), "  ")
    for name, text in numbers(answer, max_seq):
        yield from wrapped(f"  {name:<18}{text}", " " * 20)
    plan = answer.step.plan
    lines = list(decision_lines(plan.decisions, plan.layer_classes, copies=_copies(answer)))
    for line in lines[:MOST_DECISIONS]:
        yield textwrap.shorten(line, WIDTH, placeholder=" ...")
    if len(lines) > MOST_DECISIONS:
        yield f"{len(lines) - MOST_DECISIONS} more decisions: --verbose"
    if not answer.fits:
        yield "what to change:"
        for advice in _advice(answer):
            yield from wrapped(f"  {advice}")


def _note_lines(notes: Sequence[str], most: int) -> Iterator[str]:
    """Yields the first notes that ``most`` lines hold, each whole, and how many more there are."""
    for num_shown, note in enumerate(notes):
        lines = wrapped(f"note: {note}", "  ")
        most -= len(lines)
        if most < 0:
            yield f"{len(notes) - num_shown} more notes: --verbose"
            return
        yield from lines


def verdict(answer: "Forecast") -> str:
    """Says in one line whether the step fits, and by how much."""
    question = answer.question
    gap = format_bytes(abs(answer.budget_bytes - answer.peak_bytes))
    host = f"with {format_bytes(answer.host_bytes)} of host memory, " if answer.host_bytes else ""
    fits = f"fits, {host}{gap} to spare" if answer.fits else f"does not fit: {gap} too much"
    seq = "" if question.seq is None else f", {question.batch} x {question.seq} tokens"
    return f"{answer.name}{seq} on {question.hardware.name}: {fits}"


def numbers(answer: "Forecast", max_seq: int | None) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of what the plan needs and takes."""
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
    if fixed.on_host:
        yield "on the host", _state_on_host(fixed)
    yield "outside", f"{format_bytes(answer.outside_bytes)} of libraries"
    yield "host", f"{format_bytes(answer.host_bytes)} of pinned memory{_host_bound(answer)}"
    if peak is not None:
        yield "set by", f"{_peak_call(peak)}: {_largest(peak.tensors)}"
    speed = "" if answer.tokens_per_s is None else f", {answer.tokens_per_s:.0f} tokens/s"
    yield "step", f"{format_seconds(answer.step_s)}, MFU {answer.mfu:.1%}{speed} (roofline)"
    if answer.update.sum_s:
        yield "update", _update(answer)
    if plan.timeline is not None:
        yield "stalls", format_seconds(stall_s) if (stall_s := plan.timeline.stall_s) else "none"
    if answer.question.degrees.cp_kind is not None:
        yield "attention", _cp_kind(answer)
    if plan.num_collectives:
        yield "collectives", _collectives(answer)
    if plan.step_lower_bound_s:
        above = answer.step_s / plan.step_lower_bound_s - 1
        yield (
            "at best",
            f"{format_seconds(plan.step_lower_bound_s)}: this plan is {above:.1%} above",
        )


def _host_bound(answer: "Forecast") -> str:
    """Says how much host memory there is, and where that bound comes from."""
    question = answer.question
    bound = question.host_budget_bytes
    if bound is None:
        return " on each device's host, without a bound"
    if bound == 0:
        return ", none may be used (--host-budget)"
    usual = question.hardware.host_memory_bytes
    why = f": a device's share of a usual machine is {format_bytes(usual)}"
    is_usual = bound == question.hardware.usable_host_bytes
    return f", of {format_bytes(bound)} (--host-budget{why if is_usual else ''})"


def _state_on_host(fixed: FixedBytes) -> str:
    """Lists the training state that lies on the host, by kind."""
    sizes = {
        "parameters": fixed.parameters_on_host,
        "gradients": fixed.gradients_on_host,
        "optimizer state": fixed.state_on_host,
    }
    return ", ".join(f"{format_bytes(size)} {kind}" for kind, size in sizes.items() if size)


def _update(answer: "Forecast") -> str:
    """Says where and how long parameters are updated, beyond the step; tokens/s count it."""
    step_s, gradients_s = map(format_seconds, (answer.update.step_s, answer.update.gradients_s))
    if not answer.update.gradients_s:
        return f"{step_s} more, on the device: state comes and goes"
    return f"{step_s} more, on the host, and {gradients_s} for gradients on their way there"


def _cp_kind(answer: "Forecast") -> str:
    """How the devices of ``--cp`` share attention, and what the other kind would take."""
    degrees, other = answer.question.degrees, answer.other_kind
    text = f"{degrees.cp_kind} over {degrees.cp} devices"
    if other is None:
        return text
    fits = "" if other.fits else ", which does not fit"
    kind = other.question.degrees.cp_kind
    return f"{text}; a step with {kind} takes {format_seconds(other.step_s)}{fits}"


def _collectives(answer: "Forecast") -> str:
    """Says how many collectives there are, over which link, and what becomes of their time."""
    plan, hardware = answer.step.plan, answer.question.hardware
    recompute = ""
    if plan.window_recompute_s:
        recompute = f", {format_seconds(plan.window_recompute_s)} of it recomputation"
    return (
        f"{plan.num_collectives} at {format_bytes(hardware.link_bytes_per_s)}/s: "
        f"{format_seconds(plan.hidden_comm_s)} beside computation{recompute}, which takes "
        f"{hardware.comm_slowdown:.2f} x as long meanwhile; the step waits "
        f"{format_seconds(plan.exposed_comm_s)}"
    )


def _peak_call(peak: "PeakAt") -> str:
    return peak.call if peak.layer is None else f"the {peak.phase} of layer {peak.layer}"


def _largest(tensors: Sequence["TensorAtPeak"]) -> str:
    """Lists the largest tensors; those of one label and size are counted together."""
    counts = Counter((tensor.label, tensor.size_bytes) for tensor in tensors)
    return ", ".join(
        f"{label} {format_bytes(size)}" if count == 1 else f"{count} x {label} {format_bytes(size)}"
        for (label, size), count in counts.items()
    )


def _copies(answer: "Forecast") -> str:
    """Says whether the step waits for copies to the host and back."""
    stall_s = answer.step.plan.timeline.stall_s if answer.step.plan.timeline else 0.0
    if stall_s <= NO_STALL * answer.step_s:
        return "copies hide"
    return f"the step waits {format_seconds(stall_s)} for copies"


def _advice(answer: "Forecast") -> Iterator[str]:
    """Says what to change so that the step fits, the smallest change first.

    Lengths and degrees are estimates, which only another plan would confirm. The plan of an answer
    that does not fit is the smallest one.
    """
    question, fixed = answer.question, answer.step.plan.fixed
    peak_bytes, device_bytes = answer.peak_bytes, question.hardware.memory_bytes
    peak = format_enough(peak_bytes)
    if peak_bytes <= device_bytes:
        yield f"--budget {peak.replace(' ', '')} holds this plan, the smallest one"
    constant_bytes = fixed.parameters + fixed.gradients + fixed.optimizer_state
    activation_bytes = answer.budget_bytes - constant_bytes
    if activation_bytes <= 0:
        devices = "more devices (--tp, --pp), or " if question.can_be_cut else ""
        yield (
            f"no sequence is short enough: parameters, gradients and optimizer state alone take "
            f"{format_bytes(constant_bytes)}; {devices}another --optimizer"
        )
    elif question.seq is not None and answer.tokens_per_s is not None:
        # The least bytes beside the constant ones grow about linearly with the tokens.
        seq = int(question.seq * activation_bytes / max(1, peak_bytes - constant_bytes))
        num_devices = question.degrees.tp * question.degrees.cp  # which share a sequence's tokens
        granule = SEQ_GRANULE * num_devices if seq >= SEQ_GRANULE * num_devices else num_devices
        seq = seq // granule * granule
        if seq:
            cut = 1 - seq / question.seq
            yield f"about {cut:.0%} shorter, --seq {seq}; --max-seq finds the longest that fits"
    if question.host_budget_bytes is not None and question.hardware.name != "cpu":
        yield "more host memory may hold it: --host-budget none says how much"
    if peak_bytes > device_bytes:
        yield f"a device with {peak} holds this plan, the smallest one"
    if question.degrees.pp == 1:
        tp = question.tp_of(question.degrees.tp * peak_bytes / answer.budget_bytes)
        if tp is not None:
            yield f"--tp {tp}: weights and activations over {tp} devices take about a share each"
