"""Rows of the report: what happens to each saved tensor of a layer class, and why."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from memo_compile.config import MemoConfig
from memo_compile.planners.gather_again import AGAIN, values_again
from memo_compile.planners.moves import original_name
from memo_compile.planners.policy import Choice, reasons
from memo_compile.step.movable import Action, Mode, MovableStep, Slot
from memo_compile.step.plans import Decision
from memo_compile.step.problem import CallKind, Phase, Problem, TensorInfo
from memo_compile.units import format_bytes

MIN_NAMED_BYTES = 2**20
"""Results of fewer bytes (losses, statistics) get no note: they do not matter to a plan."""


def saved_rows(
    problem: Problem, leased_bytes: Mapping[str, int], labels: Mapping[str, str | None]
) -> tuple[Decision, ...]:
    """Returns the rows of a step that saves everything, from each class's first layer.

    ``leased_bytes`` has the bytes of every saved activation, ``labels`` the path of the modules of
    every layer class. Weights that the backward gathers again are not saved.
    """
    gathered_again = values_again(problem)
    return tuple(
        Decision(
            tensor=f"{value} {list(problem.tensors[value].shape)}",
            layer_class=labels.get(call.layer_class or "") or call.region,
            bytes=leased_bytes[value],
            decision="SAVE",
            token_fraction=1.0,
            reason="read by the layer's backward; min-cut keeps it",
            source=problem.tensors[value].source,
            role=problem.tensors[value].role,
        )
        for call in problem.calls
        if call.phase is Phase.FORWARD and not call.instance and call.layer_class is not None
        for value in call.outputs
        if value in leased_bytes and value not in gathered_again
    )


def moved_rows(
    step: MovableStep, choice: Choice, labels: Mapping[str, str | None]
) -> tuple[Decision, ...]:
    """Returns the rows of a step that offloads or recomputes tensors.

    Layers of one class that follow each other with the same mode share their rows. A tensor that
    the backward does not read in these layers is neither kept nor moved, and has no row.
    """
    why = reasons(step, choice.moves)
    read = _read_in_backward(choice.problem)
    calls = {call.name: call for call in step.problem.calls}
    rows: list[Decision] = []
    for key, cls in step.classes.items():
        members = [
            (layer, mode)
            for layer, mode in zip(step.layers, choice.moves.modes, strict=True)
            if layer.class_key == key
        ]
        call = calls[members[0][0].forward]
        label = labels.get(call.layer_class or "") or key
        first = 0
        for mode, group in itertools.groupby(members, key=lambda member: member[1]):
            values = [layer.values for layer, _ in group]
            end = first + len(values)
            where = label if len(values) == len(members) else f"{label} [{first}:{end}]"
            first = end
            for index, slot in enumerate(cls.slots):
                is_again = values[0][index].startswith(AGAIN)  # a weight, which is not saved
                if is_again or not any(of_layer[index] in read for of_layer in values):
                    continue
                info = step.problem.tensors.get(slot.name)
                slot_rows = _rows_of(slot, info, mode, index, where, why[key, index, mode])
                is_input = len(members) > 1 and slot.name in members[0][0].inputs
                rows += (replace(row, role="layer input") if is_input else row for row in slot_rows)
    return tuple(rows)


def _read_in_backward(problem: Problem) -> set[str]:
    """Returns values of the forward that the backward reads, whether kept, reloaded, recomputed."""
    return {
        original_name(value)
        for call in problem.calls
        if call.phase is Phase.BACKWARD and call.kind is not CallKind.WAIT
        for value in call.touched
    }


def recomputes_slices(rows: Iterable[Decision]) -> bool:
    """True where only a part of a tensor's tokens is recomputed."""
    return any(row.decision == Action.RECOMPUTE.value and row.token_fraction < 1 for row in rows)


def step_notes(
    problem: Problem, rows: Iterable[Decision], config: MemoConfig, *, device_type: str = ""
) -> Iterator[str]:
    """Yields what the user should know of a step that recomputes, runs in tiles or has a budget.

    ``device_type`` is that of the device on which the step runs; empty where it is only planned.
    """
    for cause, is_so in (
        ("a part of the tokens is recomputed", recomputes_slices(rows)),
        ("wide chains run in tiles of tokens", (config.token_tiles or 1) > 1),
    ):
        if is_so:
            yield f"{cause}: products of fewer rows may round differently; exact=True forbids it"
    if config.memory_budget is not None and problem.fixed.outputs >= MIN_NAMED_BYTES:
        size = format_bytes(problem.fixed.outputs)
        yield (
            f"the forward returns {size} that exist whole: if these are logits, compile a function "
            "that returns only the loss"
        )
    is_bounded = config.memory_budget is not None and config.host_budget is None
    if is_bounded and problem.host_bytes and config.host_is_device(device_type):
        yield (
            "memory_budget is met by copies to host memory, and on a CPU that is the same memory: "
            "what is copied comes on top of the budget. host_budget=0 plans without copies"
        )


def _rows_of(
    slot: Slot, info: TensorInfo | None, mode: Mode, index: int, where: str, reason: str
) -> Iterator[Decision]:
    """Yields one row; two for a tensor that is recomputed in part and offloaded in part."""
    shape = "" if info is None else f" {list(info.shape)}"
    action = mode.actions[index]
    parts = [(action, 1.0)]
    if action is Action.RECOMPUTE and mode.recompute_rows is not None:
        fraction = mode.recompute_rows / slot.num_rows
        parts = [(Action.RECOMPUTE, fraction), (Action.OFFLOAD, 1.0 - fraction)]
    for part_action, fraction in parts:
        yield Decision(
            tensor=f"{slot.name}{shape}",
            layer_class=where,
            bytes=slot.size_bytes,
            decision=part_action.value,
            token_fraction=fraction,
            reason=reason,
            source=None if info is None else info.source,
            role="" if info is None else info.role,
        )
