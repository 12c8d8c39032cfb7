"""A simulated step as Chrome trace events: opens in Perfetto and chrome://tracing.

Lanes are threads of one process; every span is a begin and an end event. Arrows lead from where a
copy is issued through it to the wait that needs it; a counter shows the device's memory. Without a
simulated timeline a line of generated code lasts a microsecond, and ``otherData`` says so.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memo_compile.reporting.charts import LANE_WORDS
from memo_compile.reporting.view import StepView, view_step
from memo_compile.step.plans import Plan, Span, Timeline
from memo_compile.step.problem import CallKind, Problem

PROCESS = 1

THREADS = {"compute": 1, "issue": 2, "d2h": 3, "h2d": 4, "communication": 5}
"""Lane -> thread; a stall is on the compute lane, ``issue`` is where the program starts copies."""

THREAD_WORDS = {**LANE_WORDS, "issue": "copies begin and are waited for"}

_OTHER_LANES = ("d2h", "h2d", "communication")

_WAITS = (CallKind.WAIT.value, CallKind.COMM_WAIT.value)

LINE_S = 1e-6
"""Seconds that a line is shown to last in a step that was not simulated."""

MOMENT_S = 1e-9
"""Seconds of an issue or of a wait without a stall, so that arrows can begin and end there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTimes:
    """When the compute lane reaches and leaves each call, in seconds from the step's start."""

    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]

    def at_line(self, view: StepView, line: int) -> float:
        """The second at which ``line`` of the step runs: lines of one call last equally long."""
        call = view.call_at(line)
        first, last = view.starts[call], view.starts[call + 1]
        part = (line - first) / (last - first)
        return self.starts_s[call] + part * (self.ends_s[call] - self.starts_s[call])


def chrome_trace(problem: Problem, plan: Plan) -> dict[str, Any]:
    """``plan`` as a JSON object with ``traceEvents``; an InputError if it is not of ``problem``."""
    view = view_step(problem, plan)
    timeline = plan.timeline or _timeline_of_lines(problem, view)
    times = call_times(problem, timeline)
    program = list(_program(problem, times, view))
    events = [
        *_names(),
        *_begin_end([*_spans(problem, timeline, view), *program]),
        *_arrows(timeline, program),
        *_counter(view, times),
    ]
    return {
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "otherData": {
            "plan": plan.name,
            "policy": plan.policy,
            "peak_bytes": plan.peak_bytes,
            "time": "simulated" if plan.timeline else "1 us for each line of generated code",
        },
    }


def _timeline_of_lines(problem: Problem, view: StepView) -> Timeline:
    spans = tuple(
        Span(
            lane="compute",
            name=call.name,
            start_s=view.starts[index] * LINE_S,
            end_s=view.starts[index + 1] * LINE_S,
        )
        for index, call in enumerate(problem.calls)
        if call.kind in (CallKind.RUN, CallKind.RECOMPUTE)
    )
    return Timeline(step_s=view.starts[-1] * LINE_S, stall_s=0.0, spans=spans)


def call_times(problem: Problem, timeline: Timeline) -> CallTimes:
    """When each call is on the compute lane; a copy or a wait without a stall takes no time."""
    on_lane = {span.name: span for span in timeline.spans if span.lane in ("compute", "stall")}
    starts, ends, clock = [], [], 0.0
    for call in problem.calls:
        span = on_lane.get(call.name)
        starts.append(clock if span is None else max(clock, span.start_s))
        clock = clock if span is None else max(clock, span.end_s)
        ends.append(clock)
    return CallTimes(starts_s=tuple(starts), ends_s=tuple(ends))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slice:
    lane: str
    name: str
    start_s: float
    end_s: float
    category: str
    arguments: dict[str, Any]
    call: str = ""
    """The copy that an issue or a wait is about."""


def _spans(problem: Problem, timeline: Timeline, view: StepView) -> Iterator[_Slice]:
    calls = {call.name: index for index, call in enumerate(problem.calls)}
    for span in timeline.spans:
        index, stalls = calls[span.name], span.lane == "stall"
        call = problem.calls[index]
        arguments: dict[str, Any] = {"what": view.labels[index], "region": call.region}
        if call.copy is not None:
            arguments["bytes"] = call.copy.num_bytes
        yield _Slice(
            lane="compute" if stalls else span.lane,
            name=f"stall: {span.name}" if stalls else span.name,
            start_s=span.start_s,
            end_s=max(span.end_s, span.start_s),
            category=span.lane,
            arguments=arguments,
        )


def _program(problem: Problem, times: CallTimes, view: StepView) -> Iterator[_Slice]:
    """Issues and waits, one after the other, on their own thread."""
    free_s = 0.0
    for index, call in enumerate(problem.calls):
        if call.kind in (CallKind.RUN, CallKind.RECOMPUTE):
            continue
        start = max(times.starts_s[index], free_s)
        free_s = max(times.ends_s[index], start + MOMENT_S)
        what = "issue" if call.waits_for is None else "wait for"
        yield _Slice(
            lane="issue",
            name=f"{what} {call.waits_for or call.name}",
            start_s=start,
            end_s=free_s,
            category=call.kind.value,
            arguments={"what": view.labels[index]},
            call=call.waits_for or call.name,
        )


def _names() -> Iterator[dict[str, Any]]:
    yield {
        "ph": "M",
        "pid": PROCESS,
        "tid": 0,
        "name": "process_name",
        "args": {"name": "memo: one training step"},
    }
    for lane, thread in THREADS.items():
        common = {"ph": "M", "pid": PROCESS, "tid": thread}
        yield {**common, "name": "thread_name", "args": {"name": THREAD_WORDS[lane]}}
        yield {**common, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _begin_end(slices: list[_Slice]) -> Iterator[dict[str, Any]]:
    """Matched B and E events: on each lane slices follow one another, so ends come first."""
    for lane, thread in THREADS.items():
        common = {"pid": PROCESS, "tid": thread}
        lane_slices = (part for part in slices if part.lane == lane)
        for part in sorted(lane_slices, key=lambda part: (part.start_s, part.end_s)):
            yield {
                **common,
                "ph": "B",
                "name": part.name,
                "cat": part.category,
                "ts": _us(part.start_s),
                "args": part.arguments,
            }
            yield {**common, "ph": "E", "name": part.name, "ts": _us(part.end_s)}


def _arrows(timeline: Timeline, program: list[_Slice]) -> Iterator[dict[str, Any]]:
    """From each issue through its copy to its waits. Events lie inside the slices they bind."""
    copies = {entry.name: entry for entry in timeline.spans if entry.lane in _OTHER_LANES}
    waits: dict[str, list[_Slice]] = {}
    for entry in program:
        if entry.category in _WAITS:
            waits.setdefault(entry.call, []).append(entry)
    numbers = itertools.count(1)
    for issue in program:
        if issue.category in _WAITS:
            continue
        for wait in waits.get(issue.call, ()):
            flow = {"cat": "copy", "name": issue.call, "id": next(numbers), "pid": PROCESS}
            yield {**flow, "ph": "s", "tid": THREADS["issue"], "ts": _us(issue.start_s)}
            if (copy := copies.get(issue.call)) is not None:
                yield {
                    **flow,
                    "ph": "t",
                    "tid": THREADS[copy.lane],
                    "ts": _us(max(copy.start_s, issue.start_s)),
                }
            yield {
                **flow,
                "ph": "f",
                "bp": "e",
                "tid": THREADS["issue"],
                "ts": _us(wait.end_s - MOMENT_S / 2),
            }


def _us(seconds: float) -> float:
    """Microseconds, to a thousandth of a nanosecond: equal times stay equal in JSON."""
    return round(seconds * 1e6, 6)


def _counter(view: StepView, times: CallTimes) -> Iterator[dict[str, Any]]:
    """Device memory; of Moments at one time only the last one stays."""
    last: dict[float, dict[str, int]] = {}
    for moment in view.moments:
        last[_us(times.at_line(view, moment.line))] = {
            "activations": moment.live_bytes,
            "allocated by kernels": moment.outside_bytes,
            "gradients and outputs": moment.made_bytes,
            "constant": view.constant_bytes,
        }
    for time_us, values in sorted(last.items()):
        yield {
            "ph": "C",
            "pid": PROCESS,
            "tid": 0,
            "name": "device memory (bytes)",
            "ts": time_us,
            "args": values,
        }
