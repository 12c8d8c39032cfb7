"""Finds the peak of a torch memory snapshot, and the blocks that were allocated there.

The snapshot's events are replayed. Memory from before the first event is what events free without
having allocated it, and what is allocated in the end without an event. As in torch's
``memory_allocated``, a block is free as soon as its free is requested; sizes are as requested.
"""

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memo_compile.errors import InputError
from memo_compile.text_files import named


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBlock:
    """One block that was allocated at the measured peak."""

    size_bytes: int
    frames: tuple[str, ...]
    """``file:line name``, innermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The peak of one device in a snapshot."""

    device: int
    peak_bytes: int
    blocks: tuple[LiveBlock, ...]
    """Alive at the peak, largest first."""


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
        peaks = [_replay(snapshot, traces[index], index) for index in chosen]
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{where}: not a memory snapshot: {error!r} in an event") from error
    return max(peaks, key=lambda measured: measured.peak_bytes)


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
        )
        for size, frames in at_peak.values()
    ]
    blocks.sort(key=lambda block: -block.size_bytes)
    return Measured(device=device, peak_bytes=peak, blocks=tuple(blocks))


Alive = dict[int, tuple[int, Sequence[Mapping[str, Any]]]]
"""Address -> size and frames."""


def _before(snapshot: Mapping[str, Any], events: Sequence[Mapping[str, Any]], device: int) -> Alive:
    """The blocks that were allocated before the first event."""
    alive: Alive = {}
    allocated: set[int] = set()
    for event in events:
        if event["action"] == "alloc":
            allocated.add(event["addr"])
        elif event["action"] == "free_requested":
            if event["addr"] not in allocated:
                alive[event["addr"]] = (event["size"], event.get("frames", ()))
            allocated.discard(event["addr"])
    for segment in snapshot["segments"]:
        if segment.get("device", 0) != device:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and address not in allocated:
                size = block.get("requested_size", block["size"])
                alive[address] = (size, block.get("frames", ()))
            address += block["size"]
    return alive
