"""Chrome trace and memory snapshot: well formed, and telling the plan's numbers."""

import base64
import dataclasses
import itertools
import json
import os
import pickle
import re
import subprocess
import sys
from collections import Counter

import pytest
from torch.cuda import _memory_viz

from memo_compile.errors import InputError
from memo_compile.reporting.snapshot import FIRST_ADDRESS, memory_snapshot
from memo_compile.reporting.trace import THREADS, chrome_trace
from memo_compile.reporting.write import write_pictures
from memo_compile.step.movable import StepCosts
from memo_compile.step.plans import Plan
from memo_compile.step.problem import CallKind, OutsideBuffer, Problem
from memo_compile.step.serialise import from_json
from tests.steps.pictures import MIB, layered
from tests.steps.small import planned, two_layers


def events_of(problem, plan):
    """The trace's events as another program reads them."""
    return json.loads(json.dumps(chrome_trace(problem, plan)))["traceEvents"]


def slices(events):
    """(thread, begin, end, name) of matched B and E events; they follow one another."""
    found, open_of = [], {}
    for event in events:
        if event["ph"] == "B":
            assert event["tid"] not in open_of, "slices of a lane do not nest"
            open_of[event["tid"]] = event
        elif event["ph"] == "E":
            begin = open_of.pop(event["tid"])
            assert begin["name"] == event["name"]
            assert begin["ts"] <= event["ts"]
            found.append((event["tid"], begin["ts"], event["ts"], event["name"]))
    assert open_of == {}
    return found


def test_lanes_are_threads_whose_events_match():
    problem, plan = layered()
    events = events_of(problem, plan)
    found = slices(events)
    on = Counter(thread for thread, *_ in found)
    spans = Counter("compute" if s.lane == "stall" else s.lane for s in plan.timeline.spans)
    for lane in ("compute", "d2h", "h2d"):
        assert on[THREADS[lane]] == spans[lane] > 0
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert "copy to host" in names
    assert max(end for _, _, end, _ in found) == pytest.approx(plan.timeline.step_s * 1e6, abs=0.1)
    for thread in THREADS.values():
        own = [(begin, end) for tid, begin, end, _ in found if tid == thread]
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(own))


def test_arrows_lead_from_issue_through_copy_to_wait():
    problem, plan = layered()
    events = events_of(problem, plan)
    found = slices(events)
    flows: dict[int, dict[str, dict]] = {}
    for event in events:
        if event["ph"] in "stf":
            flows.setdefault(event["id"], {})[event["ph"]] = event
    copies = [c for c in problem.calls if c.kind in (CallKind.OFFLOAD, CallKind.RELOAD)]
    assert len(flows) == len(copies) == 20
    for flow in flows.values():
        assert flow["s"]["ts"] <= flow["t"]["ts"] <= flow["f"]["ts"]
        assert flow["t"]["tid"] in (THREADS["d2h"], THREADS["h2d"])
        for phase, prefix in (("s", "issue "), ("t", ""), ("f", "wait for ")):
            event = flow[phase]
            around = [
                n
                for tid, begin, end, n in found
                if tid == event["tid"] and begin <= event["ts"] <= end
            ]
            assert prefix + event["name"] in around


def test_the_counter_reaches_the_plans_bytes():
    problem, plan = layered()
    counters = [e for e in events_of(problem, plan) if e["ph"] == "C"]
    times = [e["ts"] for e in counters]
    assert times == sorted(set(times))
    assert max(e["args"]["activations"] for e in counters) == plan.lower_bound_bytes
    made = max(e["args"]["gradients and outputs"] for e in counters)
    assert made == 12 * 20 * MIB


def test_without_a_timeline_a_line_is_a_microsecond():
    problem = two_layers()
    trace = chrome_trace(problem, planned(problem))
    assert trace["otherData"]["time"] == "1 us for each line of generated code"
    assert len(slices(trace["traceEvents"])) == len(problem.calls)


def blocks_over_time(snapshot):
    """Replays the events: no two live blocks share a byte, each lies in a segment."""
    segments = [(s["address"], s["address"] + s["total_size"]) for s in snapshot["segments"]]
    alive, most = {}, 0
    for event in snapshot["device_traces"][0]:
        begin, end = event["addr"], event["addr"] + event["size"]
        if event["action"] == "alloc":
            assert any(low <= begin and end <= high for low, high in segments)
            assert all(end <= low or high <= begin for low, high in alive.items())
            alive[begin] = end
            most = max(most, sum(high - low for low, high in alive.items()))
        elif event["action"] == "free_completed":
            assert alive.pop(begin) == end
    return alive, most


def test_the_snapshot_replays_the_plan():
    problem, plan = layered(6)
    snapshot = memory_snapshot(problem, plan)
    left, _ = blocks_over_time(snapshot)
    assert len(left) == 7, "the loss and a gradient of each layer stay"
    arena = next(s for s in snapshot["segments"] if s["frames"][0]["name"] == "arena")
    assert arena["total_size"] == plan.arena_bytes
    kept = [b for s in snapshot["segments"] for b in s["blocks"] if b["state"] != "inactive"]
    assert sum(b["size"] for b in kept) == 6 * 80 * MIB + 16 * MIB + 512
    ranges = sorted((s["address"], s["address"] + s["total_size"]) for s in snapshot["segments"])
    assert ranges[0][0] == FIRST_ADDRESS
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(ranges))
    categories = {e["category"] for e in snapshot["device_traces"][0]}
    assert {"unknown", "saved", "offloaded", "recomputed", "output"} <= categories
    times = [e["time_us"] for e in snapshot["device_traces"][0]]
    assert times == sorted(times)


def test_memory_of_kernels_is_a_segment_of_its_own():
    problem = two_layers()
    more = OutsideBuffer(kind="aten.convolution", size_bytes=4096, start=1, end=3)
    regions = {**problem.regions, "L": dataclasses.replace(problem.regions["L"], outside=(more,))}
    problem = dataclasses.replace(problem, regions=regions)
    snapshot = memory_snapshot(problem, planned(problem))
    blocks_over_time(snapshot)
    own = next(s for s in snapshot["segments"] if s["frames"][0]["name"] == "allocated by kernels")
    assert own["total_size"] == 4096, "the two layers take the same place in turn"


COMMANDS = ("stats", "trace", "segments", "memory", "trace_plot", "segment_plot")
"""Of ``python -m torch.cuda._memory_viz``; its compare fails on every file in torch 2.13."""

RUN_ALL = """
import contextlib, runpy, sys
for command in COMMANDS:
    out = [] if command in ("stats", "trace") else ["-o", command]
    sys.argv = ["memory_viz", command, "snapshot.pickle", *out]
    with open(command, "w") as stream, contextlib.redirect_stdout(stream):
        runpy.run_module("torch.cuda._memory_viz", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def torchs(tmp_path_factory):
    """The folder in which each command of torch's left what it made of the snapshot."""
    folder = tmp_path_factory.mktemp("torchs")
    (folder / "snapshot.pickle").write_bytes(pickle.dumps(memory_snapshot(*layered(4))))
    # A stand-in for flamegraph.pl, which torch would download.
    (folder / ".cache").mkdir()
    script = folder / ".cache" / "flamegraph.pl"
    script.write_text("#!/bin/sh\ncat\n")
    script.chmod(0o755)
    # One process for all commands, as loading torch takes longer than they do.
    program = RUN_ALL.replace("COMMANDS", repr(COMMANDS))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "HOME": str(folder), "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_torchs_stats_and_trace_read_the_snapshot(torchs):
    arena = layered(4)[1].arena_bytes
    assert "segments: 3" in (torchs / "stats").read_text()
    trace = (torchs / "trace").read_text()
    constant = 4 * 60 * MIB + 16 * MIB
    assert f"cudaMalloc({FIRST_ADDRESS + constant + 2 * MIB}, {arena / MIB:.1f}MiB)" in trace
    assert "free completed for" in trace


@pytest.mark.parametrize("command", ["segments", "memory"])
def test_torchs_flame_graphs_read_the_snapshot(torchs, command):
    lines = (torchs / command).read_text().splitlines()
    assert any("memo:0:optimizer state" in line for line in lines)
    constant = 4 * 60 * MIB + 16 * MIB
    total = constant + layered(4)[1].arena_bytes + 4 * 20 * MIB + 512
    assert sum(int(line.rsplit(" ", 1)[1]) for line in lines) == total


def test_torchs_compare_reads_its_segments():
    segments = memory_snapshot(*layered(4))["segments"]
    others = memory_snapshot(*layered(6))["segments"]
    text = _memory_viz.compare(segments, others, format_flamegraph=str)
    assert "only_after;stream_0;seg_" in text
    assert "optimizer state" in text


@pytest.mark.parametrize("command", ["trace_plot", "segment_plot"])
def test_torchs_plots_read_the_snapshot(torchs, command):
    page = (torchs / command).read_text()
    files = json.loads(re.search(r"local_files = (.*)", page).group(1))
    snapshot = pickle.loads(base64.b64decode(files[0]["base64"]))
    assert snapshot == memory_snapshot(*layered(4))


def test_a_folder_holds_every_picture(tmp_path):
    problem, plan = layered(4)
    costs = StepCosts(region_s={"fwd": 0.01}, d2h_bytes_per_s=1e9, h2d_bytes_per_s=2e9)
    written = write_pictures(tmp_path / "new" / "folder", problem, plan, costs)
    names = {path.name for path in written}
    whole = {"problem.json", "plan.json", "report.html", "plan.trace.json", "plan.snapshot.pickle"}
    assert whole | {"costs.json"} <= names
    for path in written:
        assert path.stat().st_size > 0
    folder = written[0].parent
    assert from_json((folder / "plan.json").read_text(), Plan) == plan
    assert from_json((folder / "problem.json").read_text(), Problem) == problem
    assert from_json((folder / "costs.json").read_text(), StepCosts) == costs


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file: cannot be written"):
        write_pictures(tmp_path / "file", *layered(4))
