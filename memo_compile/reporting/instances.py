"""The picture of a group: a lane for each instance, and what of it lies in the arena when."""

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from memo_compile.reporting import svg
from memo_compile.reporting.charts import ROLE_WORDS, hover, paths
from memo_compile.reporting.svg import HEIGHT, WIDTH, Shape
from memo_compile.reporting.view import Box, Role, StepView
from memo_compile.step.halves import half_keys, half_starts
from memo_compile.step.problem import CallKind, Problem
from memo_compile.units import format_bytes

KEPT = (Role.SAVED, Role.OFFLOADED, Role.RELOADED, Role.RECOMPUTED)
"""Roles in the order in which they are stacked; scratch belongs to no instance for long."""

RUNS = "runs"
"""CSS class of the halves of an instance."""

MAX_NAMED = 4
"""Most tensors that hovering names."""


def instances(problem: Problem, view: StepView) -> dict[str, Any] | None:
    """The lanes of a group; None where the step is of one instance."""
    members = sorted({call.member for call in problem.calls})
    if len(members) < 2:
        return None
    own: dict[int, list[Box]] = {member: [] for member in members}
    for box in view.boxes:
        if box.role in KEPT:
            own[problem.calls[box.call].member].append(box)
    spans = {member: list(_spans(boxes)) for member, boxes in own.items()}
    sums = (sum(box.size_bytes for box in alive) for rows in spans.values() for *_, alive in rows)
    top = max(sums, default=0) or 1
    runs = {member: list(_halves(problem, view, member)) for member in members}
    alive = {
        member: svg.merge_small(_stacks(member, view, top, rows), noun="small spans")
        for member, rows in spans.items()
    }
    return {
        "rows": [
            {
                "key": str(member),
                "name": f"instance {member}",
                "words": _words(problem, own[member], member),
                "paths": [*paths(runs[member]), *paths(alive[member])],
            }
            for member in members
        ],
        "top": format_bytes(top),
        "roles": {shape.css for shapes in alive.values() for shape in shapes},
        "data": {str(member): hover([*alive[member], *runs[member]]) for member in members},
    }


def _spans(boxes: Iterable[Box]) -> Iterator[tuple[int, int, list[Box]]]:
    """(first line, end, what is alive) between any two changes."""
    boxes = list(boxes)
    lines = sorted({line for box in boxes for line in (box.start, box.end)})
    for first, end in itertools.pairwise(lines):
        alive = [box for box in boxes if box.start <= first < box.end]
        if alive:
            yield first, end, alive


def _halves(problem: Problem, view: StepView, member: int) -> Iterator[Shape]:
    """Where the instance's forward and backward run."""
    starts = half_starts(problem)
    for at, (phase, owner) in enumerate(half_keys(problem)):
        if owner == member:
            first, end = view.starts[starts[at]], view.starts[starts[at + 1]]
            tip = (f"instance {member}: {phase.value}", "runs here")
            yield _shape(view, first, end, (0.0, HEIGHT), RUNS, tip)


def _stacks(
    member: int, view: StepView, top: int, rows: Iterable[tuple[int, int, list[Box]]]
) -> Iterator[Shape]:
    for row in rows:
        yield from _stack(member, view, top, *row)


def _stack(
    member: int, view: StepView, top: int, first: int, end: int, alive: list[Box]
) -> Iterator[Shape]:
    """What is alive from one line to the next, one role upon the other."""
    below = 0
    for role in KEPT:
        own = [box for box in alive if box.role is role]
        size = sum(box.size_bytes for box in own)
        if not own:
            continue
        height = size / top * HEIGHT
        y = HEIGHT - below / top * HEIGHT - height
        title = f"instance {member}: {format_bytes(size)} {ROLE_WORDS[role]}"
        tip = (title, view.labels[view.call_at(first)], *_named(own))
        yield _shape(view, first, end, (y, height), role.value, tip)
        below += size


def _shape(
    view: StepView, first: int, end: int, rows: tuple[float, float], css: str, tip: tuple[str, ...]
) -> Shape:
    across, (y, height) = WIDTH / max(view.starts[-1], 1), rows
    width = (end - first) * across
    return Shape(x=first * across, y=y, width=width, height=height, css=css, tip=tip)


def _named(boxes: Iterable[Box]) -> Iterator[str]:
    """The largest tensors with the reason why they are kept, copied or recomputed."""
    largest = sorted(boxes, key=operator.attrgetter("size_bytes"), reverse=True)
    for box in largest[:MAX_NAMED]:
        yield f"{box.name}, {format_bytes(box.size_bytes)}" + (f": {box.reason}" * bool(box.reason))
    if len(largest) > MAX_NAMED:
        yield f"and {len(largest) - MAX_NAMED} more"


def _words(problem: Problem, boxes: Iterable[Box], member: int) -> str:
    """What becomes of the instance's saved tensors, in bytes."""
    sizes: Counter[str] = Counter()
    for box in boxes:
        if box.role in (Role.SAVED, Role.RECOMPUTED):
            sizes["keeps" if box.role is Role.SAVED else "recomputes"] += box.size_bytes
    sizes["copies"] = sum(
        call.copy.num_bytes
        for call in problem.calls
        if call.kind is CallKind.OFFLOAD and call.copy is not None and call.member == member
    )
    words = [f"{verb} {format_bytes(sizes[verb])}" for verb in ("keeps", "copies", "recomputes")]
    found = [
        word
        for word, verb in zip(words, ("keeps", "copies", "recomputes"), strict=True)
        if sizes[verb]
    ]
    return ", ".join(found) or "keeps nothing"
