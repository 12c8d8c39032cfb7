"""A plan as one HTML page: numbers, memory, arena, lanes, frontier, decisions. It loads nothing."""

import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jinja2

from memo_compile.plans import Decision, Plan
from memo_compile.problem import CallKind, Phase, Problem
from memo_compile.reporting import svg
from memo_compile.reporting.svg import HEIGHT, WIDTH, Shape
from memo_compile.reporting.view import Role, StepView, view_step
from memo_compile.units import format_bytes, format_seconds

ROOM = 1.14
"""Height of a picture over its highest value: room for the budget's label."""

NUM_HUES = 8
"""Steps of the scale that colours layers."""

CURVE_COLUMNS = 500
"""Points of the memory curve: two pixels each on a wide screen."""

ROLE_WORDS = {
    Role.SAVED: "saved for the backward",
    Role.OFFLOADED: "until copied to the host",
    Role.RELOADED: "copied back from the host",
    Role.RECOMPUTED: "computed again",
    Role.SCRATCH: "scratch of one pass",
}

LANES = ("compute", "d2h", "h2d", "communication")
LANE_WORDS = {
    "compute": "compute",
    "d2h": "copy to host",
    "h2d": "copy from host",
    "communication": "network",
}


def render_html(problem: Problem, plan: Plan) -> str:
    """The page for ``plan`` of ``problem``; under 2 MB for 80 layers.

    Raises:
        InputError: the plan is not one of this problem.
    """
    view = view_step(problem, plan)
    arena, memory = _arena(view, plan), _memory(view, plan)
    lanes, frontier = _lanes(problem, plan, view), _frontier(plan)
    charts = {
        name: chart.pop("data")
        for name, chart in (("arena", arena), ("memory", memory), ("lanes", lanes))
        if chart is not None
    }
    return _template().render(
        plan=plan,
        title=plan.name or "training step",
        sentence=_sentence(problem, plan),
        verdict=_verdict(plan),
        cards=_cards(plan, view),
        parts=_parts(plan, view),
        program=_program_axis(view),
        arena=arena,
        memory=memory,
        lanes=lanes,
        frontier=frontier,
        decisions=[_decision_row(one, plan) for one in plan.decisions],
        roles=[(role.value, words) for role, words in ROLE_WORDS.items()],
        data=json.dumps(charts, separators=(",", ":")).replace("<", "\\u003c"),
        bytes=format_bytes,
        seconds=format_seconds,
    )


@functools.cache
def _template() -> jinja2.Template:
    loader = jinja2.PackageLoader("memo_compile.reporting", "templates")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.j2")


def _sentence(problem: Problem, plan: Plan) -> str:
    layers = sum(one.num_layers for one in plan.layer_classes)
    paths = ", ".join(one.module_path for one in plan.layer_classes if one.module_path)
    what = f"{layers} layers" + (f" ({paths})" if paths else "")
    runs = sum(one.kind in (CallKind.RUN, CallKind.RECOMPUTE) for one in problem.calls)
    return (
        f"One training step, planned before it runs: {what if layers else 'no repeating layers'}, "
        f"forward and then backward, in {runs} passes. Policy {plan.policy}."
    )


def _verdict(plan: Plan) -> tuple[str, str]:
    """(CSS class, words): does it fit?"""
    if not plan.check.ok:
        return "bad", "the checker found faults"
    if plan.budget_bytes is None:
        return "plain", "no budget was set"
    room = plan.budget_bytes - plan.peak_bytes
    if room >= 0:
        return "good", f"fits, {format_bytes(room)} to spare"
    return "bad", f"does not fit: {format_bytes(-room)} too much"


def _cards(plan: Plan, view: StepView) -> list[tuple[str, str, str]]:
    """(label, value, remark) of the headline numbers."""
    budget = plan.budget_bytes
    of = "no budget" if budget is None else f"budget {format_bytes(budget)}"
    ratio = plan.arena_bytes / plan.lower_bound_bytes if plan.lower_bound_bytes else 1.0
    cards = [
        ("peak device memory", format_bytes(plan.peak_bytes), of),
        ("arena for activations", format_bytes(plan.arena_bytes), f"{ratio:.3f} x what must live"),
    ]
    if plan.timeline is not None:
        step, stall = plan.timeline.step_s, plan.timeline.stall_s
        share = f"{100 * stall / step:.1f} % waits for copies" if step else "nothing runs"
        cards.append(("simulated step", format_seconds(step), share))
    on_host = format_bytes(plan.host_bytes) if plan.host_bytes else "nothing"
    cards.append(("moved to the host", on_host, "pinned memory of the host"))
    kinds = Counter(one.decision for one in plan.decisions)
    words = ", ".join(f"{kinds[key]} {key.lower()}" for key in sorted(kinds))
    cards.append(("tensors per layer", str(len(plan.decisions)), words or "none is kept"))
    most = max(view.moments, key=lambda one: one.live_bytes, default=None)
    if most is not None:
        where = view.labels[view.call_at(most.line)]
        cards.append(("most activations alive", format_bytes(most.live_bytes), f"in {where}"))
    return cards


def _parts(plan: Plan, view: StepView) -> list[dict[str, Any]]:
    """What the peak is made of, largest first where it is drawn; percentages of the peak."""
    fixed, peak = plan.fixed, view.peak
    old = max(0, fixed.gradients - fixed.new_gradients)
    rows = [
        ("parameters", fixed.parameters, "p1"),
        ("optimizer state", fixed.optimizer_state, "p2"),
        ("gradients and outputs", old + (peak.made_bytes if peak else 0), "p3"),
        ("buffers and inputs", fixed.buffers + fixed.inputs, "p4"),
        ("allocated by kernels", peak.outside_bytes if peak else 0, "p5"),
    ]
    arena = plan.peak_bytes - sum(size for _, size, _ in rows)
    rows.append(("activations (arena)", max(0, arena), "p6"))
    total = sum(size for _, size, _ in rows) or 1
    return [
        {"name": name, "size": format_bytes(size), "percent": 100 * size / total, "css": css}
        for name, size, css in rows
        if size
    ]


def _program_axis(view: StepView) -> dict[str, Any]:
    """The x axis shared by memory and arena: the two phases, and layers as ticks."""
    end = max(view.starts[-1], 1)
    turn = 100 * view.turn / end
    ticks = [
        *_layer_ticks(view, 0, view.turn, turn),
        *_layer_ticks(view, view.turn, end, 100 - turn),
    ]
    return {"turn": round(turn, 2), "ticks": ticks}


def _layer_ticks(view: StepView, start: int, end: int, percent: float) -> list[dict[str, Any]]:
    """Layers of one phase, as many as a phone has room for. ``percent`` is the phase's width."""
    longest: dict[int, tuple[int, int]] = {}
    for index, layer in enumerate(view.layers):
        first, last = view.starts[index], view.starts[index + 1]
        if layer is not None and start <= first < end:
            before = longest.get(layer, (0, 0))
            longest[layer] = max(before, (first, last), key=lambda one: one[1] - one[0])
    room = max(1, int(percent / 13))
    stride = max(1, -(-len(longest) // room))
    chosen = list(longest.items())[stride // 2 :: stride]
    total = max(view.starts[-1], 1)
    return [
        {"at": round(100 * (first + last) / 2 / total, 2), "text": f"L{layer}"}
        for layer, (first, last) in chosen
    ]


def _byte_ticks(most: float) -> list[dict[str, Any]]:
    ticks = svg.nice_ticks(most / ROOM, base=2)
    return [{"at": round(100 * one / most, 2), "text": _short_bytes(one)} for one in ticks]


def _short_bytes(size: float) -> str:
    value, unit = format_bytes(size).split(" ")
    return f"{float(value):g} {unit}"


def _arena(view: StepView, plan: Plan) -> dict[str, Any]:
    """The arena map: addresses over the program."""
    top = max(plan.arena_bytes, 1)
    across, up = WIDTH / max(view.starts[-1], 1), HEIGHT / top
    layers = max((one for one in view.layers if one is not None), default=0) + 1
    shapes = []
    for one in view.boxes:
        hue = "n" if one.layer is None else one.layer * NUM_HUES // layers
        until = view.labels[view.call_at(one.end - 1)]
        tip = (
            one.name,
            view.labels[one.call],
            f"until {until}" if until != view.labels[one.call] else "",
            f"{format_bytes(one.size_bytes)} at {format_bytes(one.offset)}",
            ROLE_WORDS[one.role],
            one.about,
            one.reason,
            _short_source(one.source),
        )
        shapes.append(
            Shape(
                x=one.start * across,
                y=HEIGHT - (one.offset + one.size_bytes) * up,
                width=(one.end - one.start) * across,
                height=one.size_bytes * up,
                css=f"{one.role.value} y{hue}",
                tip=tip,
            )
        )
    merged = svg.merge_small(shapes, noun="small buffers")
    return {
        "paths": _paths(merged),
        "ticks": [
            {"at": round(100 * one / top, 2), "text": _short_bytes(one)}
            for one in svg.nice_ticks(top, base=2)
        ],
        "roles": {one.css.split(" ")[0] for one in merged},
        "num_layers": layers,
        "data": _hover(merged),
    }


def _paths(shapes: Iterable[Shape]) -> list[tuple[str, str]]:
    """(CSS class, d): one path for each class, in a fixed order."""
    ordered = sorted(shapes, key=lambda one: one.css)
    grouped = itertools.groupby(ordered, key=lambda one: one.css)
    return [(css, svg.path_of(group)) for css, group in grouped]


def _hover(shapes: Sequence[Shape]) -> dict[str, Any]:
    """What the page's script looks up: rectangles and, by index, the texts of their tips."""
    texts: dict[str, int] = {}
    rows = []
    for one in shapes:
        lines = [texts.setdefault(line, len(texts)) for line in one.tip if line]
        sides = (one.x, one.y, one.width, one.height)
        rows.append([*(round(side, 1) for side in sides), *lines])
    return {"rows": rows, "texts": list(texts)}


def _short_source(source: str) -> str:
    return "/".join(source.split("/")[-2:])


def _memory(view: StepView, plan: Plan) -> dict[str, Any]:
    """The memory curve: what is held over the program, from what."""
    budget = plan.budget_bytes or 0
    most = max(plan.peak_bytes, budget, 1) * ROOM
    columns = view.columns(CURVE_COLUMNS)
    width, up = WIDTH / len(columns), HEIGHT / most
    constant = view.constant_bytes
    layered: tuple[tuple[str, Callable[[Any], int]], ...] = (
        ("held", lambda one: one.held_bytes),
        ("live", lambda one: constant + one.made_bytes + one.outside_bytes + one.live_bytes),
        ("outside", lambda one: constant + one.made_bytes + one.outside_bytes),
        ("made", lambda one: constant + one.made_bytes),
        ("fixed", lambda one: constant),
    )
    areas = [
        (css, svg.steps_path([value(one) * up for one in columns], width)) for css, value in layered
    ]
    shapes = []
    for index, one in enumerate(columns):
        tip = (
            f"{format_bytes(one.held_bytes)} held",
            view.labels[view.call_at(one.line)],
            f"activations alive {format_bytes(one.live_bytes)}",
            f"gradients and outputs {format_bytes(one.made_bytes)}",
            f"allocated by kernels {format_bytes(one.outside_bytes)}",
            f"constant {format_bytes(constant)}",
        )
        shapes.append(Shape(x=index * width, y=0, width=width, height=HEIGHT, css="", tip=tip))
    return {
        "areas": areas,
        "ticks": _byte_ticks(most),
        "budget": round(100 * budget / most, 2) if budget else None,
        "budget_text": f"budget {format_bytes(budget)}",
        "data": _hover(shapes),
    }


def _lanes(problem: Problem, plan: Plan, view: StepView) -> dict[str, Any] | None:
    """The lanes of the simulated step; None without one."""
    if plan.timeline is None or not plan.timeline.spans or plan.timeline.step_s <= 0:
        return None
    end = max(plan.timeline.step_s, *(one.end_s for one in plan.timeline.spans))
    calls = {call.name: index for index, call in enumerate(problem.calls)}
    shapes: dict[str, list[Shape]] = {lane: [] for lane in LANES}
    busy: Counter[str] = Counter()
    for span in plan.timeline.spans:
        lane = "compute" if span.lane == "stall" else span.lane
        index = calls.get(span.name)
        shapes.setdefault(lane, []).append(
            Shape(
                x=span.start_s / end * WIDTH,
                y=0,
                width=(span.end_s - span.start_s) / end * WIDTH,
                height=HEIGHT,
                css=_span_css(problem, span.lane, index),
                tip=(
                    "stall: " + span.name if span.lane == "stall" else span.name,
                    view.labels[index] if index is not None else LANE_WORDS.get(lane, lane),
                    f"{format_seconds(span.end_s - span.start_s)} from "
                    f"{format_seconds(span.start_s)}",
                ),
            )
        )
        if span.lane != "stall":
            busy[lane] += round((span.end_s - span.start_s) / end * 1e6)
    rows = {
        lane: svg.merge_along(group, noun="calls, each under a pixel")
        for lane, group in shapes.items()
    }
    ticks = svg.nice_ticks(end)
    return {
        "rows": [
            {
                "key": lane,
                "name": LANE_WORDS.get(lane, lane),
                "busy": f"{busy[lane] / 1e4:.0f} % busy" if group else "idle",
                "paths": _paths(group),
            }
            for lane, group in rows.items()
        ],
        "ticks": [{"at": round(100 * one / end, 2), "text": _short_seconds(one)} for one in ticks],
        "data": {lane: _hover(group) for lane, group in rows.items()},
    }


def _short_seconds(seconds: float) -> str:
    value, unit = format_seconds(seconds).split(" ")
    return f"{float(value):g} {unit}" if seconds else "0"


def _span_css(problem: Problem, lane: str, index: int | None) -> str:
    if lane != "compute":
        return lane
    if index is None:
        return "forward"
    call = problem.calls[index]
    if call.kind is CallKind.RECOMPUTE:
        return "recomputed"
    return "forward" if call.phase is Phase.FORWARD else "backward"


def _frontier(plan: Plan) -> dict[str, Any] | None:
    """Step time against memory of every plan that was considered; None with fewer than two."""
    points = plan.frontier
    if len(points) < 2:
        return None
    budget = plan.budget_bytes
    right = max([one.peak_bytes for one in points] + ([budget] if budget else [])) * ROOM
    top = max(one.step_s for one in points) * ROOM or 1.0
    dots = [
        {
            "x": round(100 * one.peak_bytes / right, 2),
            "y": round(100 * one.step_s / top, 2),
            "policy": one.policy,
            "step": format_seconds(one.step_s),
            "peak": format_bytes(one.peak_bytes),
            "host": format_bytes(one.host_bytes),
            "chosen": one.chosen,
        }
        for one in sorted(points, key=lambda one: (one.step_s, one.peak_bytes))
    ]
    return {
        "dots": dots,
        "chosen": next((one for one in dots if one["chosen"]), None),
        "x_ticks": [
            {"at": round(100 * one / right, 2), "text": _short_bytes(one)}
            for one in svg.nice_ticks(right / ROOM, base=2)
        ],
        "y_ticks": [
            {"at": round(100 * one / top, 2), "text": _short_seconds(one)}
            for one in svg.nice_ticks(top / ROOM)
        ],
        "budget": round(100 * budget / right, 2) if budget else None,
    }


def _decision_row(one: Decision, plan: Plan) -> dict[str, Any]:
    name, _, shape = one.tensor.partition(" ")
    return {
        "tensor": name,
        "shape": shape,
        "layers": one.layer_class,
        "size": format_bytes(one.bytes),
        "decision": one.decision,
        "css": {"SAVE": "saved", "OFFLOAD": "offloaded", "RECOMPUTE": "recomputed"}.get(
            one.decision, "scratch"
        ),
        "tokens": "all" if one.token_fraction == 1.0 else f"{100 * one.token_fraction:.0f} %",
        "reason": one.reason,
        "source": _short_source(one.source or ""),
    }
