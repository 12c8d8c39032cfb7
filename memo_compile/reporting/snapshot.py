"""A planned step as a PyTorch memory snapshot: opens in memory_viz, as a measured one does.

Segments: the constant memory (parameters, optimizer state, ...), the arena, what kernels allocate
themselves, and the gradients and outputs that the step makes. The trace has an allocation and a
free for every buffer, by line. Frames say which tensor, of which pass, made where by the user.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from memo_compile.planners.placement import Buffer, PlacementProblem, place
from memo_compile.reporting.trace import call_times
from memo_compile.reporting.view import Box, StepView, view_step
from memo_compile.step.ordinary import outside_events
from memo_compile.step.plans import Plan
from memo_compile.step.problem import ALIGNMENT_BYTES, Problem, Storage, align

FIRST_ADDRESS = 0x7F00_0000_0000
"""Like a GPU's, but so low that sums stay exact in JavaScript, which also reads the file."""

GAP_BYTES = 2 * 1024 * 1024
"""Bytes between segments, so that nobody takes two for one."""

FRAME_FILE = "memo"
"""The file name of frames that are no place in the user's code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Life:
    """An allocation of the step. ``end`` is None for what outlives it."""

    start: int
    end: int | None
    address: int
    size_bytes: int
    category: str
    frames: tuple[dict[str, Any], ...]


def memory_snapshot(problem: Problem, plan: Plan) -> dict[str, Any]:
    """Returns the step as torch's snapshot has one. Raises InputError: ``plan`` is another's."""
    view = view_step(problem, plan)
    address = FIRST_ADDRESS
    segments = [_constant_segment(plan, address)]
    lives: list[_Life] = []
    makers = (partial(_arena, plan), partial(_kernels, problem), partial(_outputs, problem))
    for make in makers:
        address += int(segments[-1]["total_size"]) + GAP_BYTES
        segment, segment_lives = make(view, address)
        segments.append(segment)
        lives.extend(segment_lives)
    clock = _clock(problem, plan, view)
    return {
        "segments": [segment for segment in segments if segment["total_size"]],
        "device_traces": [[*_segment_events(segments[1:], clock), *_buffer_events(lives, clock)]],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _frame(name: str, filename: str = FRAME_FILE, line: int = 0) -> dict[str, Any]:
    return {"name": name, "filename": filename, "line": line}


def _frames(box: Box, label: str, call: str) -> tuple[dict[str, Any], ...]:
    """Returns the tensor, the user's line where known, and the plan's ``call``: innermost first."""
    file, _, line = box.source.rpartition(":")
    users = [_frame(box.name, file, int(line))] if file and line.isdigit() else []
    return (_frame(box.name), *users, _frame(call, f"{FRAME_FILE} {label}"))


def _block(address: int, size: int, state: str, frames: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns a block of a segment, in torch's ``state``: ``active_allocated``, or ``inactive``."""
    return {
        "address": address,
        "size": size,
        "requested_size": size,
        "state": state,
        "frames": list(frames),
    }


def _segment(address: int, size: int, blocks: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Returns a segment of ``size`` bytes; the rest behind the allocated ``blocks`` is free."""
    active = sum(block["size"] for block in blocks)
    if size > active:
        blocks = [*blocks, _block(address + active, size - active, "inactive", ())]
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "allocated_size": active,
        "active_size": active,
        "requested_size": active,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [_frame(name)],
        "blocks": blocks,
    }


def _constant_segment(plan: Plan, address: int) -> dict[str, Any]:
    """Returns the memory that is there before the step begins and after it has ended."""
    fixed = plan.fixed
    parts = (
        ("parameters", fixed.parameters),
        ("optimizer state", fixed.optimizer_state),
        ("buffers", fixed.buffers),
        ("inputs", fixed.inputs),
        ("kept by libraries", fixed.libraries),
        ("gradients of earlier steps", max(0, fixed.gradients - fixed.new_gradients)),
    )
    blocks, end = [], address
    for name, size in parts:
        if size:
            blocks.append(_block(end, size, "active_allocated", [_frame(name)]))
            end += size
    return _segment(address, end - address, blocks, "constant memory")


def _arena(plan: Plan, view: StepView, address: int) -> tuple[dict[str, Any], list[_Life]]:
    """Returns the arena, which is free when the step ends, and the lives of its buffers."""
    lives = [
        _Life(
            start=box.start,
            end=box.end,
            address=address + box.offset,
            size_bytes=box.size_bytes,
            category=box.role.value,
            frames=_frames(box, view.labels[box.call], box.id.split("/", 1)[0]),
        )
        for box in view.boxes
        if box.size_bytes
    ]
    return _segment(address, align(plan.arena_bytes), [], "arena"), lives


def _kernels(problem: Problem, view: StepView, address: int) -> tuple[dict[str, Any], list[_Life]]:
    """Returns the memory that kernels allocate themselves, at made-up places, and its lives."""
    births: dict[tuple[str, int], list[int]] = {}
    spans: list[tuple[int, int, int, str]] = []
    for line, change, kind in sorted(outside_events(problem), key=lambda event: event[:2]):
        if change > 0:
            births.setdefault((kind, change), []).append(line)
        elif change < 0 and births.get((kind, -change)):  # ends the oldest one of this size
            spans.append((births[(kind, -change)].pop(0), line, -change, kind))
    buffers = tuple(
        Buffer(id=str(index), lower=start, upper=end, size=size)
        for index, (start, end, size, _) in enumerate(spans)
        if end > start
    )
    placed = place(PlacementProblem(buffers=buffers, alignment=ALIGNMENT_BYTES), solver="greedy")
    lives = []
    for buffer in buffers:
        call = view.call_at(buffer.lower)
        kind = spans[int(buffer.id)][3]
        where = _frame(problem.calls[call].name, f"{FRAME_FILE} {view.labels[call]}")
        lives.append(
            _Life(
                start=buffer.lower,
                end=buffer.upper,
                address=address + placed.offsets[buffer.id],
                size_bytes=buffer.size,
                category="outside",
                frames=(_frame(kind), where),
            )
        )
    return _segment(address, align(placed.height_bytes), [], "allocated by kernels"), lives


def _outputs(problem: Problem, view: StepView, address: int) -> tuple[dict[str, Any], list[_Life]]:
    """Returns the gradients and other outputs in ordinary memory, which outlive the step."""
    lives, end = [], address
    for index, call in enumerate(problem.calls):
        for output, value in problem.made_by(call):
            if output.storage is not Storage.EXTERNAL or not output.size_bytes:
                continue
            frames = (_frame(value), _frame(call.name, f"{FRAME_FILE} {view.labels[index]}"))
            lives.append(
                _Life(
                    start=view.starts[index] + output.start,
                    end=None,
                    address=end,
                    size_bytes=output.size_bytes,
                    category="output",
                    frames=frames,
                )
            )
            end += output.size_bytes
    blocks = [
        _block(life.address, life.size_bytes, "active_allocated", life.frames) for life in lives
    ]
    return _segment(address, end - address, blocks, "gradients and outputs"), lives


_Clock = Callable[[int], int]
"""Line -> microseconds."""


def _clock(problem: Problem, plan: Plan, view: StepView) -> _Clock:
    """Returns the simulated time of each line; without a timeline the line's number."""
    if plan.timeline is None:
        return lambda line: line
    times = call_times(problem, plan.timeline)
    return lambda line: round(times.at_line(view, line) * 1e6)


def _segment_events(segments: list[dict[str, Any]], clock: _Clock) -> Iterator[dict[str, Any]]:
    """Yields that ``segments``, all but the constant one, are allocated as the step begins.

    Their category is the one that memory_viz gives to blocks from before the trace: it fails on
    files in which categories are used and this one is not.
    """
    for segment in segments:
        if segment["total_size"]:
            yield {
                "action": "segment_alloc",
                "addr": segment["address"],
                "size": segment["total_size"],
                "stream": 0,
                "frames": segment["frames"],
                "time_us": clock(0),
                "category": "unknown",
            }


def _buffer_events(lives: list[_Life], clock: _Clock) -> Iterator[dict[str, Any]]:
    """Yields allocations and frees by line; at one line frees come first."""
    moments = [(life.start, 1, index) for index, life in enumerate(lives)]
    moments += [(life.end, 0, index) for index, life in enumerate(lives) if life.end is not None]
    for line, is_birth, index in sorted(moments):
        life = lives[index]
        event = {
            "addr": life.address,
            "size": life.size_bytes,
            "stream": 0,
            "frames": list(life.frames),
            "time_us": clock(line),
            "category": life.category,
        }
        for action in ("alloc",) if is_birth else ("free_requested", "free_completed"):
            yield {"action": action, **event}
