"""The pictures of the HTML report as data for its template: paths, ticks, texts for hovering."""

import bisect
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from memo_compile.reporting import svg
from memo_compile.reporting.svg import HEIGHT, WIDTH, Shape
from memo_compile.reporting.view import Box, Role, StepView, short_source
from memo_compile.step.halves import half_keys, half_starts
from memo_compile.step.plans import FrontierPoint, Plan, Span
from memo_compile.step.problem import CallKind, Problem
from memo_compile.units import format_bytes, format_seconds

ROOM = 1.14
"""A picture is this many times as high as its highest value, for the budget's label."""

MIN_TICK_PERCENT, LAYER_PERCENT = 12, 13
"""Ticks nearer than the first would touch on a phone; the name of a layer needs the second."""

NUM_HUES = 8
"""Steps of the scale that colours layers."""

DENSE, DENSE_LANE = 1200, 150
"""With more shapes, of a picture or of a lane, the gaps between them are drawn thinner."""

CURVE_COLUMNS = 500
"""Most points of the memory curve: two pixels each on a wide screen."""

ROLE_WORDS = {
    Role.SAVED: "saved for the backward",
    Role.OFFLOADED: "until copied to the host",
    Role.RELOADED: "copied back from the host",
    Role.RECOMPUTED: "recomputed",
    Role.SCRATCH: "scratch of one pass",
}

AREAS = ("fixed", "made", "outside", "live", "held")
"""CSS classes of the memory curve, from its bottom upwards."""

LANE_WORDS = {
    "compute": "compute",
    "d2h": "copy to host",
    "h2d": "copy from host",
    "communication": "network",
}


LANE_KINDS = (
    ("forward", "forward"),
    ("backward", "backward"),
    ("recomputed", "recomputed"),
    ("stall", "stall: compute waits"),
    ("d2h", "copy to the host"),
    ("h2d", "copy back"),
    ("communication", "network"),
)
"""CSS class of a span and its words in the legend, in the legend's order."""


def program_axis(problem: Problem, plan: Plan, view: StepView) -> dict[str, Any]:
    """Returns the x axis of memory and arena: where the backward begins, layers, seconds."""
    end = max(view.starts[-1], 1)
    backward = 100 * view.backward_start / end
    ticks = [
        *_layer_ticks(view, 0, view.backward_start, backward),
        *_layer_ticks(view, view.backward_start, end, 100 - backward),
    ]
    seconds = _second_ticks_of_lines(problem, plan, view)
    return {"turn": round(backward, 2), "ticks": ticks, "times": seconds}


def _second_ticks_of_lines(problem: Problem, plan: Plan, view: StepView) -> list[dict[str, Any]]:
    """Returns ticks that say which second of the simulated step lies where on an axis of lines.

    Calls are drawn as wide as their code is long, so that equal times are not equally far apart.
    """
    if plan.timeline is None or plan.timeline.step_s <= 0:
        return []
    index_of = {call.name: index for index, call in enumerate(problem.calls)}
    computing = [span for span in plan.timeline.spans if span.lane == "compute"]
    points = sorted((span.start_s, view.starts[index_of[span.name]]) for span in computing)
    points.append((plan.timeline.step_s, view.starts[-1]))
    end = max(view.starts[-1], 1)
    ticks: list[dict[str, Any]] = []
    for second in svg.nice_ticks(plan.timeline.step_s):
        # The line is interpolated between the call that begins last before it and the next one.
        after = bisect.bisect_left(points, (second, -1))
        (next_s, next_line) = points[min(after, len(points) - 1)]
        (begin_s, begin_line) = points[after - 1] if after else (0.0, 0)
        share = (second - begin_s) / (next_s - begin_s) if next_s > begin_s else 0.0
        at = 100 * (begin_line + (next_line - begin_line) * min(share, 1.0)) / end
        if not ticks or at - ticks[-1]["at"] >= MIN_TICK_PERCENT:
            ticks.append({"at": round(at, 2), "text": _short_seconds(second, digits=2)})
    return ticks


def _layer_ticks(view: StepView, start: int, end: int, percent: float) -> list[dict[str, Any]]:
    """Names layers of the phase ``[start, end)``, as many as a phone has room for.

    ``percent`` is the phase's width. A layer's tick is at the middle of its longest call.
    """
    longest: dict[int, tuple[int, int]] = {}
    for index, layer in enumerate(view.layers):
        span = view.starts[index], view.starts[index + 1]
        if layer is not None and start <= span[0] < end:
            spans = longest.get(layer, (0, 0)), span
            longest[layer] = max(spans, key=lambda span: span[1] - span[0])
    most_ticks = max(1, int(percent / LAYER_PERCENT))
    stride = max(1, -(-len(longest) // most_ticks))
    chosen = sorted(longest.items(), key=lambda item: item[1])[stride // 2 :: stride]
    total = max(view.starts[-1], 1)
    return [
        {"at": round(100 * (first + last) / 2 / total, 2), "text": f"L{layer}"}
        for layer, (first, last) in chosen
    ]


def _ticks(
    values: Iterable[float], low: float, high: float, words: Callable[[float], str]
) -> list[dict[str, Any]]:
    """Returns ticks at ``values`` on an axis from ``low`` to ``high``, with their texts."""
    return [{"at": _percent(value, low, high), "text": words(value)} for value in values]


def _percent(value: float, low: float, high: float) -> float:
    """Returns where ``value`` is on the way from ``low`` (0) to ``high`` (100)."""
    return round(100 * (value - low) / (high - low), 2)


def _short_bytes(size: float) -> str:
    return _short(format_bytes(size))


def _short_seconds(seconds: float, *, digits: int) -> str:
    return _short(format_seconds(seconds, digits)) if seconds else "0"


def _second_ticks(values: Sequence[float], low: float, high: float) -> list[dict[str, Any]]:
    """Returns ticks of an axis of time, with as many digits as tell them apart."""
    for digits in range(2, 7):
        ticks = _ticks(values, low, high, partial(_short_seconds, digits=digits))
        if len({tick["text"] for tick in ticks}) == len(ticks):
            break
    return ticks


def _short(text: str) -> str:
    """Returns ``text`` without zeros behind the point of its number: ``2 GiB`` of ``2.00 GiB``."""
    value, unit = text.split(" ")
    return f"{float(value):g} {unit}"


def arena_map(view: StepView, plan: Plan) -> dict[str, Any]:
    """Returns the picture of addresses over the program; what is under a pixel is merged."""
    top = max(plan.arena_bytes, 1)
    num_layers = max((layer for layer in view.layers if layer is not None), default=0) + 1
    boxes = (_box_shape(box, view, top, num_layers) for box in view.boxes)
    merged = svg.merge_small(boxes, noun="small buffers")
    return {
        "paths": paths(merged),
        "ticks": _ticks(svg.nice_ticks(top, base=2), 0, top, _short_bytes),
        "roles": {shape.css.split(" ")[0] for shape in merged},
        "num_layers": num_layers,
        "dense": len(merged) > DENSE,
        "data": hover(merged),
    }


def _box_shape(box: Box, view: StepView, top: int, num_layers: int) -> Shape:
    """Draws one buffer: lines across, bytes up to ``top``, coloured by its layer."""
    up = HEIGHT / top
    hue = "n" if box.layer is None else box.layer * NUM_HUES // num_layers
    until = view.labels[view.call_at(box.end - 1)]
    tip = (
        box.name,
        view.labels[box.call],
        f"until {until}" if until != view.labels[box.call] else "",
        f"{format_bytes(box.size_bytes)} at {format_bytes(box.offset)}",
        ROLE_WORDS[box.role],
        box.about,
        box.reason,
        short_source(box.source),
    )
    rows = HEIGHT - (box.offset + box.size_bytes) * up, box.size_bytes * up
    return _shape(view, box.start, box.end, rows, f"{box.role.value} y{hue}", tip)


def paths(shapes: Iterable[Shape]) -> list[tuple[str, str]]:
    """Returns (CSS class, ``d`` of a path) for each class, in a fixed order."""
    by_class = operator.attrgetter("css")
    grouped = itertools.groupby(sorted(shapes, key=by_class), key=by_class)
    return [(css, svg.path_of(group)) for css, group in grouped]


def hover(shapes: Sequence[Shape]) -> dict[str, Any]:
    """Returns what the page's script looks up: rectangles and, by index, the texts of tips."""
    texts: dict[str, int] = {}
    rows = []
    for shape in shapes:
        lines = [texts.setdefault(line, len(texts)) for line in shape.tip if line]
        sides = (shape.x, shape.y, shape.width, shape.height)
        rows.append([*(round(side, 1) for side in sides), *lines])
    return {"rows": rows, "texts": list(texts)}


def memory_chart(view: StepView, plan: Plan) -> dict[str, Any]:
    """Returns the memory curve: what is held over the program, from what."""
    budget = plan.budget_bytes or 0
    most = max(plan.peak_bytes, budget, 1) * ROOM
    columns = view.columns(CURVE_COLUMNS)
    width, up = WIDTH / len(columns), HEIGHT / most
    tops = [(*view.heights(moment), moment.held_bytes) for moment in columns]
    areas = [
        (css, svg.steps_path([height * up for height in heights], width))
        for css, heights in zip(AREAS, zip(*tops, strict=True), strict=True)
    ]
    shapes = []
    for index, moment in enumerate(columns):
        tip = (
            f"{format_bytes(moment.held_bytes)} held",
            view.labels[view.call_at(moment.line)],
            f"activations alive {format_bytes(moment.live_bytes)}",
            f"gradients and outputs {format_bytes(moment.made_bytes)}",
            f"allocated by kernels {format_bytes(moment.outside_bytes)}",
            f"constant {format_bytes(view.constant_bytes)}",
        )
        shapes.append(Shape(x=index * width, y=0, width=width, height=HEIGHT, css="", tip=tip))
    return {
        "areas": areas[::-1],
        "outside": any(moment.outside_bytes for moment in columns),
        "ticks": _ticks(svg.nice_ticks(most / ROOM, base=2), 0, most, _short_bytes),
        "budget": _percent(budget, 0, most) if budget else None,
        "budget_text": f"budget {format_bytes(budget)}",
        "data": hover(shapes),
    }


def lanes(problem: Problem, plan: Plan, view: StepView) -> dict[str, Any] | None:
    """Returns what each lane does over simulated time; None without a timeline."""
    if plan.timeline is None or not plan.timeline.spans or plan.timeline.step_s <= 0:
        return None
    end_s = max(plan.timeline.step_s, *(span.end_s for span in plan.timeline.spans))
    index_of = {call.name: index for index, call in enumerate(problem.calls)}
    shapes: dict[str, list[Shape]] = {lane: [] for lane in LANE_WORDS}
    busy_ns: Counter[str] = Counter()
    for span in plan.timeline.spans:
        lane = "compute" if span.lane == "stall" else span.lane
        shapes[lane].append(_span_shape(span, problem, view, index_of[span.name], end_s))
        if span.lane != "stall":
            busy_ns[lane] += round((span.end_s - span.start_s) * 1e9)
    rows = {
        lane: svg.merge_along(group, noun="calls, each under a pixel")
        for lane, group in shapes.items()
    }
    return {
        "rows": [
            {
                "key": lane,
                "name": LANE_WORDS[lane],
                "busy": f"{busy_ns[lane] / end_s / 1e7:.0f} % busy" if group else "idle",
                "paths": paths(group),
            }
            for lane, group in rows.items()
        ],
        "dense": max(map(len, rows.values())) > DENSE_LANE,
        "kinds": {shape.css for group in rows.values() for shape in group},
        "ticks": _second_ticks(svg.nice_ticks(end_s), 0, end_s),
        "data": {lane: hover(group) for lane, group in rows.items()},
    }


def _span_shape(span: Span, problem: Problem, view: StepView, index: int, end_s: float) -> Shape:
    """Draws what a lane does for call ``index``, on an axis of ``end_s`` seconds."""
    call, css = problem.calls[index], span.lane
    if span.lane == "compute":
        css = "recomputed" if call.kind is CallKind.RECOMPUTE else call.phase.value
    lasts = format_seconds(span.end_s - span.start_s)
    tip = (
        f"stall: {span.name}" if span.lane == "stall" else span.name,
        view.labels[index],
        f"{lasts} from {format_seconds(span.start_s)}",
    )
    return Shape(
        x=span.start_s / end_s * WIDTH,
        y=0,
        width=(span.end_s - span.start_s) / end_s * WIDTH,
        height=HEIGHT,
        css=css,
        tip=tip,
    )


def frontier(plan: Plan) -> dict[str, Any] | None:
    """Returns step time against memory of each plan that was considered; None with fewer than 2."""
    points = sorted(plan.frontier, key=lambda point: (point.step_s, point.peak_bytes))
    if len(points) < 2:
        return None
    budget = plan.budget_bytes
    left, right = _range([point.peak_bytes for point in points] + ([budget] if budget else []))
    fastest_s = points[0].step_s or 1.0
    slower = [100 * (point.step_s / fastest_s - 1) for point in points]  # percent
    high = 1.16 * max(slower) or 1.0
    low = -0.12 * high  # the fastest plan's dot lies whole in the picture
    digits = 1 if max(slower) >= 10 else 2
    dots = [
        {
            "x": _percent(point.peak_bytes, left, right),
            "y": _percent(percent, low, high),
            "policy": point.policy,
            "step": format_seconds(point.step_s),
            "slower": f"+{percent:.{digits}f} %",
            "what": _layers_moved(point),
            "peak": format_bytes(point.peak_bytes),
            "host": format_bytes(point.host_bytes),
            "chosen": point.chosen,
        }
        for point, percent in zip(points, slower, strict=True)
    ]
    byte_ticks = svg.nice_ticks(right, base=2, low=left)
    return {
        "dots": dots,
        "chosen": next((dot for dot in dots if dot["chosen"]), None),
        "next": _next_gain(points),
        "x_ticks": _ticks(byte_ticks, left, right, _short_bytes),
        "y_ticks": _ticks(svg.nice_ticks(high), low, high, lambda percent: f"+{percent:g} %"),
        "budget": _percent(budget, left, right) if budget else None,
    }


def _layers_moved(point: FrontierPoint) -> str:
    """Says what a plan does: ``4 layers to the host, 2 recomputed``."""
    parts = []
    if point.layers_to_host:
        parts.append(f"{point.layers_to_host} layer{'s' * (point.layers_to_host > 1)} to the host")
    if point.layers_recomputed:
        parts.append(f"{point.layers_recomputed} recomputed")
    return ", ".join(parts) or "all kept"


def _next_gain(points: Sequence[FrontierPoint]) -> str:
    """Says what more memory buys beyond the chosen plan: ``1.00 GiB more buys 3.0 %``; "": nothing.

    Meant is the faster plan that gains most for each byte more.
    """
    chosen = next((point for point in points if point.chosen), None)
    if chosen is None:
        return ""
    larger = [
        point
        for point in points
        if point.peak_bytes > chosen.peak_bytes and point.step_s < chosen.step_s
    ]
    if not larger:
        return ""

    def gain_for_a_byte(point: FrontierPoint) -> float:
        return (chosen.step_s - point.step_s) / (point.peak_bytes - chosen.peak_bytes)

    best = max(larger, key=gain_for_a_byte)
    gain = 100 * (1 - best.step_s / chosen.step_s)
    more = format_bytes(best.peak_bytes - chosen.peak_bytes)
    return f"{more} more buys {gain:.{1 if gain >= 1 else 2}f} %"


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Returns the ends of an axis that shows all ``values`` with a margin; never below 0."""
    low, high = min(values), max(values)
    margin = (high - low) * 0.16 or max(high, 1e-9) * 0.1
    return max(0.0, low - margin), high + margin


KEPT = (Role.SAVED, Role.OFFLOADED, Role.RELOADED, Role.RECOMPUTED)
"""Roles in the order in which they are stacked; scratch belongs to no instance for long."""

RUNS = "runs"
"""CSS class of the halves of an instance."""

MAX_NAMED = 4
"""Most tensors that hovering names."""


def instances(problem: Problem, view: StepView) -> dict[str, Any] | None:
    """Returns the lanes of a group's instances (members); None where the step has one."""
    members = sorted({call.member for call in problem.calls})
    if len(members) < 2:
        return None
    boxes_of: dict[int, list[Box]] = {member: [] for member in members}
    for box in view.boxes:
        if box.role in KEPT:
            boxes_of[problem.calls[box.call].member].append(box)
    spans = {member: list(_spans(boxes)) for member, boxes in boxes_of.items()}
    sizes = (sum(box.size_bytes for box in alive) for rows in spans.values() for *_, alive in rows)
    top = max(sizes, default=0) or 1
    runs = {member: list(_halves(problem, view, member)) for member in members}
    alive = {
        member: svg.merge_small(
            (shape for row in rows for shape in _stack(member, view, top, *row)), noun="small spans"
        )
        for member, rows in spans.items()
    }
    return {
        "rows": [
            {
                "key": str(member),
                "name": f"instance {member}",
                "words": _words(problem, boxes_of[member], member),
                "paths": [*paths(runs[member]), *paths(alive[member])],
            }
            for member in members
        ],
        "top": format_bytes(top),
        "roles": {shape.css for shapes in alive.values() for shape in shapes},
        "data": {str(member): hover([*alive[member], *runs[member]]) for member in members},
    }


def _spans(boxes: Iterable[Box]) -> Iterator[tuple[int, int, list[Box]]]:
    """Yields (first line, end, boxes alive) for each span of lines in which nothing changes."""
    boxes = list(boxes)
    lines = sorted({line for box in boxes for line in (box.start, box.end)})
    for first, end in itertools.pairwise(lines):
        alive = [box for box in boxes if box.start <= first < box.end]
        if alive:
            yield first, end, alive


def _halves(problem: Problem, view: StepView, member: int) -> Iterator[Shape]:
    """Draws where the instance's forward and backward run."""
    starts = half_starts(problem)
    for half, (phase, owner) in enumerate(half_keys(problem)):
        if owner == member:
            first, end = view.starts[starts[half]], view.starts[starts[half + 1]]
            tip = (f"instance {member}: {phase.value}", "runs here")
            yield _shape(view, first, end, (0.0, HEIGHT), RUNS, tip)


def _stack(
    member: int, view: StepView, top: int, first: int, end: int, alive: list[Box]
) -> Iterator[Shape]:
    """Draws the boxes that are alive in lines ``[first, end)``, the roles upon each other."""
    below_bytes = 0
    for role in KEPT:
        boxes = [box for box in alive if box.role is role]
        size = sum(box.size_bytes for box in boxes)
        if not boxes:
            continue
        height = size / top * HEIGHT
        y = HEIGHT - below_bytes / top * HEIGHT - height
        title = f"instance {member}: {format_bytes(size)} {ROLE_WORDS[role]}"
        tip = (title, view.labels[view.call_at(first)], *_named(boxes))
        yield _shape(view, first, end, (y, height), role.value, tip)
        below_bytes += size


def _shape(
    view: StepView, first: int, end: int, rows: tuple[float, float], css: str, tip: tuple[str, ...]
) -> Shape:
    """Returns a rectangle over lines ``[first, end)``; ``rows`` are its y and its height."""
    across, (y, height) = WIDTH / max(view.starts[-1], 1), rows
    width = (end - first) * across
    return Shape(x=first * across, y=y, width=width, height=height, css=css, tip=tip)


def _named(boxes: Iterable[Box]) -> Iterator[str]:
    """Names the largest tensors with the reason why they are kept, copied or recomputed."""
    largest = sorted(boxes, key=operator.attrgetter("size_bytes"), reverse=True)
    for box in largest[:MAX_NAMED]:
        yield f"{box.name}, {format_bytes(box.size_bytes)}" + (f": {box.reason}" * bool(box.reason))
    if len(largest) > MAX_NAMED:
        yield f"and {len(largest) - MAX_NAMED} more"


def _words(problem: Problem, boxes: Iterable[Box], member: int) -> str:
    """Says how many bytes the instance keeps, copies and recomputes."""
    sizes: Counter[str] = Counter()
    for box in boxes:
        if box.role in (Role.SAVED, Role.RECOMPUTED):
            sizes["keeps" if box.role is Role.SAVED else "recomputes"] += box.size_bytes
    sizes["copies"] = sum(
        call.copy.num_bytes
        for call in problem.calls
        if call.kind is CallKind.OFFLOAD and call.copy is not None and call.member == member
    )
    verbs = [verb for verb in ("keeps", "copies", "recomputes") if sizes[verb]]
    return ", ".join(f"{verb} {format_bytes(sizes[verb])}" for verb in verbs) or "keeps nothing"
