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

Events = Sequence[Mapping[str, Any]]


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
    """Returns the snapshot in ``path``. Raises InputError: unreadable, or none of torch's."""
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
    """Returns the peak of ``device``; by default that of the device with the highest peak.

    ``where`` names the file in messages. Raises InputError: nothing was recorded, the device is
    unknown, or an event is malformed.
    """
    traces: Sequence[Events] = snapshot["device_traces"]
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


def _replay(snapshot: Mapping[str, Any], events: Events, device: int) -> Measured:
    """Returns the peak of ``device`` and the blocks that are alive there, by replaying events."""
    alive = _alive_at_start(snapshot, events, device)
    total_bytes = peak_bytes = sum(size for size, _ in alive.values())
    at_peak = dict(alive)
    is_at_peak = False  # the blocks are copied when a block is freed, not at each allocation
    for event in events:
        if event["action"] == "alloc":
            alive[event["addr"]] = (event["size"], event.get("frames", ()))
            total_bytes += event["size"]
            if total_bytes > peak_bytes:
                peak_bytes, is_at_peak = total_bytes, True
        elif event["action"] == "free_requested" and event["addr"] in alive:
            if is_at_peak:
                at_peak, is_at_peak = dict(alive), False
            total_bytes -= alive.pop(event["addr"])[0]
    if is_at_peak:
        at_peak = alive
    blocks = [
        LiveBlock(
            size_bytes=size,
            frames=tuple(f"{row['filename']}:{row['line']} {row['name']}" for row in frames),
        )
        for size, frames in at_peak.values()
    ]
    blocks.sort(key=lambda block: -block.size_bytes)
    return Measured(device=device, peak_bytes=peak_bytes, blocks=tuple(blocks))


Alive = dict[int, tuple[int, Sequence[Mapping[str, Any]]]]
"""Address -> size and frames of the block there."""


def _alive_at_start(snapshot: Mapping[str, Any], events: Events, device: int) -> Alive:
    """Returns the blocks from before the first event: no event allocates, but one may free them."""
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
