"""A plan against what was measured: the peak of a torch memory snapshot, layer by layer.

The snapshot's events are replayed: memory that was there before they began is what they free
without having allocated it, and what is allocated in the end without an event. As torch counts
``memory_allocated``, a block is free as soon as that is requested; sizes are as requested.
"""

import io
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memo_compile.errors import InputError
from memo_compile.reporting.view import view_step
from memo_compile.step.plans import Plan
from memo_compile.step.problem import Problem
from memo_compile.text_files import named

TOLERANCE = 0.02
"""A measured peak may exceed the plan by this share, since allocators round and kernels differ."""

NUM_LARGEST = 8
"""How many of the blocks that are alive at the measured peak are named."""

SMALL_SHARE = 0.001
"""Layers that differ by less than this share of the planned peak are not named."""

OTHER = "other memory"
"""Stands for blocks whose frames name no call of the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBlock:
    """One block that was allocated at the measured peak."""

    size_bytes: int
    frames: tuple[str, ...]
    """``file:line name``, innermost first."""
    names: tuple[str, ...]
    """The frames' names alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a snapshot says about one device."""

    device: int
    peak_bytes: int
    blocks: tuple[LiveBlock, ...]
    """Alive at the peak, largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes that calls of one layer made and that are alive at the peak."""

    layer: str
    planned_bytes: int | None
    """None when the plan's problem is not at hand."""
    measured_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Planned against measured."""

    planned_bytes: int
    measured: Measured
    layers: tuple[LayerBytes, ...]
    """Empty when no frame of the snapshot names a call of the plan."""

    @property
    def holds(self) -> bool:
        """Whether the measured peak is at most the planned one, TOLERANCE included."""
        return self.measured.peak_bytes <= self.planned_bytes * (1 + TOLERANCE)

    def differences(self) -> tuple[tuple[str, int], ...]:
        """(layer, bytes measured beyond the plan), the largest first, where they are worth a word.

        Less than SMALL_SHARE of the plan is not; nor is what no plan says anything about.
        """
        known = (
            (layer.layer, layer.measured_bytes - layer.planned_bytes)
            for layer in self.layers
            if layer.planned_bytes is not None
        )
        least = SMALL_SHARE * self.planned_bytes
        return tuple(sorted((d for d in known if abs(d[1]) >= least), key=lambda d: -abs(d[1])))


class _PlainUnpickler(pickle.Unpickler):
    """Snapshots are lists, dicts, numbers and texts; nothing else may be made from a file."""

    def find_class(self, module: str, name: str) -> Any:
        """Raise: plain data names no class."""
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read_snapshot(path: Path) -> dict[str, Any]:
    """The snapshot in ``path``; an InputError where it cannot be read, or is none of torch's."""
    with named(path, "read"):
        content = path.read_bytes()
    try:
        data = _PlainUnpickler(io.BytesIO(content)).load()
    except Exception as error:  # a broken pickle raises nearly anything
        raise InputError(
            f"{path}: not a memory snapshot ({error}); expected the file that "
            "torch.cuda.memory._dump_snapshot writes"
        ) from error
    if not isinstance(data, dict) or not {"segments", "device_traces"} <= data.keys():
        raise InputError(
            f"{path}: not a memory snapshot: expected a dict with segments and device_traces; "
            "torch.cuda.memory._dump_snapshot writes one"
        )
    return data


def measured_peak(
    snapshot: Mapping[str, Any], *, device: int | None = None, where: str
) -> Measured:
    """The peak of ``device`` in ``snapshot``; by default of the device with the highest peak.

    Raises InputError: nothing was recorded, the device is unknown, or an event is malformed.
    """
    traces: Sequence[Sequence[Mapping[str, Any]]] = snapshot["device_traces"]
    try:
        recorded = [index for index, events in enumerate(traces) if events]
        if device is not None and device not in recorded:
            raise InputError(f"{where}: no events of device {device}; there are of {recorded}")
        if not recorded:
            raise InputError(
                f"{where}: no events; call torch.cuda.memory._record_memory_history() before the "
                "step that is to be measured"
            )
        chosen = recorded if device is None else [device]
        found = [_replay(snapshot, traces[index], index) for index in chosen]
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{where}: not a memory snapshot: {error!r} in an event") from error
    return max(found, key=lambda measured: measured.peak_bytes)


def _replay(
    snapshot: Mapping[str, Any], events: Sequence[Mapping[str, Any]], device: int
) -> Measured:
    alive = _before(snapshot, events, device)
    total = peak = sum(size for size, _ in alive.values())
    at_peak = dict(alive)
    stale = False
    for event in events:
        if event["action"] == "alloc":
            alive[event["addr"]] = (event["size"], event.get("frames", ()))
            total += event["size"]
            if total > peak:
                peak, stale = total, True
        elif event["action"] == "free_requested" and event["addr"] in alive:
            if stale:
                at_peak, stale = dict(alive), False
            total -= alive.pop(event["addr"])[0]
    if stale:
        at_peak = alive
    blocks = [
        LiveBlock(
            size_bytes=size,
            frames=tuple(f"{at['filename']}:{at['line']} {at['name']}" for at in frames),
            names=tuple(at["name"] for at in frames),
        )
        for size, frames in at_peak.values()
    ]
    blocks.sort(key=lambda block: -block.size_bytes)
    return Measured(device=device, peak_bytes=peak, blocks=tuple(blocks))


Alive = dict[int, tuple[int, Sequence[Mapping[str, Any]]]]
"""Address -> size and frames."""


def _before(snapshot: Mapping[str, Any], events: Sequence[Mapping[str, Any]], device: int) -> Alive:
    """What was allocated when the first event happened."""
    alive: Alive = {}
    made: set[int] = set()
    for event in events:
        if event["action"] == "alloc":
            made.add(event["addr"])
        elif event["action"] == "free_requested":
            if event["addr"] not in made:
                alive[event["addr"]] = (event["size"], event.get("frames", ()))
            made.discard(event["addr"])
    for segment in snapshot["segments"]:
        if segment.get("device", 0) != device:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and address not in made:
                size = block.get("requested_size", block["size"])
                alive[address] = (size, block.get("frames", ()))
            address += block["size"]
    return alive


def compare(plan: Plan, measured: Measured, problem: Problem | None = None) -> Comparison:
    """``plan`` next to ``measured``; with its ``problem`` (else an InputError) layer by layer."""
    calls = {name.split("/", 1)[0] for name in plan.offsets}
    labels: dict[str, str] = {}
    planned: dict[str, int] | None = None
    if problem is not None:
        calls |= {call.name for call in problem.calls}
        labels, planned = _planned(plan, problem)
    found: Counter[str] = Counter()
    for block in measured.blocks:
        call = next((name for name in block.names if name in calls), None)
        found[OTHER if call is None else labels.get(call, call)] += block.size_bytes
    order = dict.fromkeys([*(planned or {}), *found]) if found.keys() - {OTHER} else {}
    layers = tuple(
        LayerBytes(
            layer=label,
            planned_bytes=None if planned is None else planned.get(label, 0),
            measured_bytes=found[label],
        )
        for label in sorted(order, key=lambda label: label == OTHER)
    )
    return Comparison(planned_bytes=plan.peak_bytes, measured=measured, layers=layers)


def _planned(plan: Plan, problem: Problem) -> tuple[dict[str, str], dict[str, int]]:
    """Call -> label of its layer; label -> bytes alive where the plan has most of them alive."""
    view = view_step(problem, plan)
    names = [
        label if layer is None else f"layer {layer}"
        for label, layer in zip(view.labels, view.layers, strict=True)
    ]
    labels = {call.name: name for call, name in zip(problem.calls, names, strict=True)}
    most = max(
        view.moments,
        key=lambda moment: moment.live_bytes + moment.outside_bytes + moment.made_bytes,
        default=None,
    )
    planned = dict.fromkeys(names, 0)
    if most is None:
        return labels, planned
    for box in view.boxes:
        if box.start <= most.line < box.end:
            planned[names[box.call]] += box.size_bytes
    for index, size in enumerate(view.made):
        if view.starts[index] <= most.line:
            planned[names[index]] += size
    planned[OTHER] = view.constant_bytes + most.outside_bytes
    return labels, {label: size for label, size in planned.items() if size}
