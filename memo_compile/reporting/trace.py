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
        """Returns the second at which ``line`` runs: lines of one call last equally long."""
        call = view.call_at(line)
        first, end = view.starts[call], view.starts[call + 1]
        share = (line - first) / (end - first)
        return self.starts_s[call] + share * (self.ends_s[call] - self.starts_s[call])


def chrome_trace(problem: Problem, plan: Plan) -> dict[str, Any]:
    """Returns the trace of ``plan`` as JSON data. Raises InputError: it is not of ``problem``."""
    view = view_step(problem, plan)
    timeline = plan.timeline or _timeline_of_lines(problem, view)
    times = call_times(problem, timeline)
    issues_and_waits = list(_issues_and_waits(problem, times, view))
    events = [
        *_names(),
        *_begin_end([*_lane_slices(problem, timeline, view), *issues_and_waits]),
        *_arrows(timeline, issues_and_waits),
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
    """Returns a timeline for a step that was not simulated: each line of code takes LINE_S."""
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
    """Returns when each call is on the compute lane; copies and idle waits take no time there."""
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
    """A span of the trace on one lane."""

    lane: str
    name: str
    start_s: float
    end_s: float
    category: str
    arguments: dict[str, Any]
    call: str = ""
    """The copy that an issue or a wait is about."""


def _lane_slices(problem: Problem, timeline: Timeline, view: StepView) -> Iterator[_Slice]:
    """Yields the timeline's spans; a stall is shown on the compute lane."""
    index_of = {call.name: index for index, call in enumerate(problem.calls)}
    for span in timeline.spans:
        index, stalls = index_of[span.name], span.lane == "stall"
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


def _issues_and_waits(problem: Problem, times: CallTimes, view: StepView) -> Iterator[_Slice]:
    """Yields where copies and collectives begin and are waited for, one after the other."""
    end_s = 0.0
    for index, call in enumerate(problem.calls):
        if call.kind in (CallKind.RUN, CallKind.RECOMPUTE):
            continue
        start_s = max(times.starts_s[index], end_s)
        end_s = max(times.ends_s[index], start_s + MOMENT_S)
        what = "issue" if call.waits_for is None else "wait for"
        yield _Slice(
            lane="issue",
            name=f"{what} {call.waits_for or call.name}",
            start_s=start_s,
            end_s=end_s,
            category=call.kind.value,
            arguments={"what": view.labels[index]},
            call=call.waits_for or call.name,
        )


def _names() -> Iterator[dict[str, Any]]:
    """Yields the events that name the process and its threads."""
    process = {"name": "memo: one training step"}
    yield {"ph": "M", "pid": PROCESS, "tid": 0, "name": "process_name", "args": process}
    for lane, thread in THREADS.items():
        common = {"ph": "M", "pid": PROCESS, "tid": thread}
        yield {**common, "name": "thread_name", "args": {"name": THREAD_WORDS[lane]}}
        yield {**common, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _begin_end(slices: list[_Slice]) -> Iterator[dict[str, Any]]:
    """Yields a begin and an end event for each slice, lane by lane; those of a lane never nest."""
    for lane, thread in THREADS.items():
        common = {"pid": PROCESS, "tid": thread}
        lane_slices = (entry for entry in slices if entry.lane == lane)
        for entry in sorted(lane_slices, key=lambda entry: (entry.start_s, entry.end_s)):
            yield {
                **common,
                "ph": "B",
                "name": entry.name,
                "cat": entry.category,
                "ts": _us(entry.start_s),
                "args": entry.arguments,
            }
            yield {**common, "ph": "E", "name": entry.name, "ts": _us(entry.end_s)}


def _arrows(timeline: Timeline, issues_and_waits: list[_Slice]) -> Iterator[dict[str, Any]]:
    """Yields arrows from each issue through its copy to its waits, each inside of its slice."""
    copies = {span.name: span for span in timeline.spans if span.lane in _OTHER_LANES}
    waits: dict[str, list[_Slice]] = {}
    for entry in issues_and_waits:
        if entry.category in _WAITS:
            waits.setdefault(entry.call, []).append(entry)
    numbers = itertools.count(1)
    for issue in issues_and_waits:
        if issue.category in _WAITS:
            continue
        for wait in waits.get(issue.call, ()):
            flow = {"cat": "copy", "name": issue.call, "id": next(numbers), "pid": PROCESS}
            yield {**flow, "ph": "s", "tid": THREADS["issue"], "ts": _us(issue.start_s)}
            if (copy := copies.get(issue.call)) is not None:
                start_s = max(copy.start_s, issue.start_s)
                yield {**flow, "ph": "t", "tid": THREADS[copy.lane], "ts": _us(start_s)}
            end_s = wait.end_s - MOMENT_S / 2
            yield {**flow, "ph": "f", "bp": "e", "tid": THREADS["issue"], "ts": _us(end_s)}


def _us(seconds: float) -> float:
    """Microseconds, to a thousandth of a nanosecond: equal times stay equal in JSON."""
    return round(seconds * 1e6, 6)


def _counter(view: StepView, times: CallTimes) -> Iterator[dict[str, Any]]:
    """Yields device memory over time; of Moments at one time only the last one stays."""
    values_at: dict[float, dict[str, int]] = {}
    for moment in view.moments:
        values_at[_us(times.at_line(view, moment.line))] = {
            "activations": moment.live_bytes,
            "allocated by kernels": moment.outside_bytes,
            "gradients and outputs": moment.made_bytes,
            "constant": view.constant_bytes,
        }
    for time_us, values in sorted(values_at.items()):
        yield {
            "ph": "C",
            "pid": PROCESS,
            "tid": 0,
            "name": "device memory (bytes)",
            "ts": time_us,
            "args": values,
        }
