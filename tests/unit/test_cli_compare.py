"""``memo compare``, ``memo diff`` and ``memo replay``: answers, exit codes, one clear line each."""

import dataclasses
import json
import pickle

import pytest

from memo_compile.cli.main import main
from memo_compile.errors import InputError
from memo_compile.reporting.compare import measured_peak
from memo_compile.reporting.snapshot import memory_snapshot
from memo_compile.reporting.write import write_pictures
from memo_compile.step.movable import StepCosts
from memo_compile.step.problem import Problem
from memo_compile.step.program_text import program_text
from memo_compile.step.serialise import from_json, to_json
from memo_compile.step.simulate import simulate
from tests.steps.pictures import ATTN, MIB, SECONDS, layered


@pytest.fixture
def dump(tmp_path):
    problem, plan = layered(4)
    (tmp_path / "problem.json").write_text(to_json(problem))
    (tmp_path / "plan.json").write_text(to_json(plan))
    (tmp_path / "snapshot.pickle").write_bytes(pickle.dumps(memory_snapshot(problem, plan)))
    return tmp_path


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return left.value.code, out, err


def event(action, address, size, name="f"):
    frames = [{"filename": "model.py", "line": 7, "name": name}]
    return {"action": action, "addr": address, "size": size, "frames": frames, "stream": 0}


def snapshot_of(*events, blocks=()):
    """``blocks``: sizes that are allocated in the end, from address 0 on."""
    held = [{"size": size, "state": "active_allocated", "frames": []} for size in blocks]
    total = sum(blocks)
    segment = {"device": 0, "address": 0, "total_size": total, "stream": 0, "blocks": held}
    return {"segments": [segment], "device_traces": [list(events)]}


def test_the_peak_of_a_snapshot_counts_what_was_there_before():
    found = measured_peak(
        snapshot_of(
            event("free_requested", 1000, 30),
            event("free_completed", 1000, 30),
            event("alloc", 2000, 50),
            event("alloc", 3000, 7, name="top"),
            event("free_requested", 2000, 50),
            event("free_completed", 2000, 50),
            event("alloc", 2000, 20),
            blocks=(100,),
        ),
        where="test",
    )
    assert found.peak_bytes == 100 + 50 + 7
    assert [block.size_bytes for block in found.blocks] == [100, 50, 7]
    assert found.blocks[2].frames == ("model.py:7 top",)


def test_the_peak_may_lie_before_the_first_event():
    found = measured_peak(
        snapshot_of(event("free_requested", 500, 40), event("alloc", 500, 10), blocks=(100,)),
        where="test",
    )
    assert found.peak_bytes == 140


def test_of_several_devices_the_highest_is_taken():
    snapshot = snapshot_of(event("alloc", 100, 10))
    snapshot["device_traces"].append([event("alloc", 100, 30)])
    assert measured_peak(snapshot, where="test").device == 1
    assert measured_peak(snapshot, device=0, where="test").peak_bytes == 10
    with pytest.raises(InputError, match=r"no events of device 3; there are of \[0, 1\]"):
        measured_peak(snapshot, device=3, where="test")


def test_compare_shows_the_peak_and_what_is_largest(capsys, dump):
    code, out, err = run(capsys, "compare", dump / "plan.json", dump / "snapshot.pickle", "--json")
    answer = json.loads(out)
    plan = layered(4)[1]
    assert (code, err) == (0, "")
    assert answer["holds"] is True
    assert answer["planned_peak_bytes"] == plan.peak_bytes
    constant = 4 * 60 * MIB + 16 * MIB
    assert answer["measured_peak_bytes"] == constant + plan.lower_bound_bytes + 512
    assert answer["largest"][0]["frames"] == ["memo:0 optimizer state"]
    code, out, _ = run(capsys, "compare", dump / "plan.json", dump / "snapshot.pickle")
    assert out.startswith("the plan holds: planned peak ")
    assert "memo:0 optimizer state" in out


class Evil:
    def __reduce__(self):
        return print, ("this must not run",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "not a memory snapshot"),
        (pickle.dumps([1, 2]), "expected a dict with segments and device_traces"),
        (pickle.dumps(snapshot_of()), "no events; call torch.cuda.memory._record_memory_history"),
        (pickle.dumps(snapshot_of({"action": "alloc"})), "KeyError.*in an event"),
        (pickle.dumps({"segments": [Evil()]}), "it asks for builtins.print"),
    ],
)
def test_what_is_no_snapshot_is_refused(capsys, dump, content, message):
    (dump / "bad.pickle").write_bytes(content)
    code, out, err = run(capsys, "compare", dump / "plan.json", dump / "bad.pickle")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith(f"memo: {dump / 'bad.pickle'}: ")
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(err)


def test_diff_names_numbers_decisions_and_offsets(capsys, dump):
    plan = layered(4)[1]
    decisions = (dataclasses.replace(plan.decisions[0], decision="SAVE"), *plan.decisions[1:])
    offsets = {**plan.offsets, "fwd@0/attn": 512}
    changed = dataclasses.replace(
        plan, offsets=offsets, decisions=decisions, peak_bytes=5, resident_bytes=()
    )
    (dump / "b.json").write_text(to_json(changed))
    code, out, _ = run(capsys, "diff", dump / "plan.json", dump / "b.json", "--json")
    answer = json.loads(out)
    assert code == 1
    assert (answer["equal"], answer["kind"], answer["parts"]) == (False, "plan", [])
    numbers = {number["what"]: number for number in answer["numbers"]}
    assert numbers["peak_bytes"] == {
        "what": "peak_bytes",
        "first": plan.peak_bytes,
        "second": 5,
    }
    assert any(name.startswith("resident_bytes[0] and ") for name in numbers)
    assert [offset["what"] for offset in answer["offsets"]] == ["fwd@0/attn"]
    (decision,) = answer["decisions"]
    assert decision["what"].endswith("attn.0 [1, 16384, 768]")
    assert decision["second"].startswith("SAVE")
    code, out, _ = run(capsys, "diff", dump / "plan.json", dump / "b.json")
    assert code == 1
    assert out.index("peak_bytes") < out.index("attn.0") < out.index("fwd@0/attn")


def test_diff_of_problems_names_calls_regions_and_order(capsys, dump):
    problem = layered(4)[0]
    (dump / "b.json").write_text(to_json(layered(5)[0]))
    _, out, _ = run(capsys, "diff", dump / "problem.json", dump / "b.json", "--json")
    parts = {part["what"] for part in json.loads(out)["parts"]}
    assert "call fwd@4" in parts
    calls = (problem.calls[1], problem.calls[0], *problem.calls[2:])
    (dump / "c.json").write_text(to_json(dataclasses.replace(problem, calls=calls)))
    code, out, _ = run(capsys, "diff", dump / "problem.json", dump / "c.json")
    assert code == 1
    assert "order of calls[0]" in out


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("problem.json", "expected a Plan like .*got a Problem"),
        ("none.json", "cannot be read: No such file"),
        ("snapshot.pickle", "not UTF-8 text"),
        ("other.json", "expected a plan.json or a problem.json of memo"),
        ("broken.json", "not JSON"),
        ("old.json", "expected schema 1, got 0"),
    ],
)
def test_diff_refuses_what_is_neither(capsys, dump, second, message):
    (dump / "other.json").write_text("[1]")
    (dump / "broken.json").write_text("{")
    old = to_json(layered(4)[1]).replace('"schema": 1', '"schema": 0')
    (dump / "old.json").write_text(old)
    code, out, err = run(capsys, "diff", dump / "plan.json", dump / second)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(err)


def test_replay_gives_the_same_plan(capsys, dump):
    code, out, _ = run(capsys, "replay", dump, "--solver", "greedy")
    assert code == 0
    assert "the plan equals plan.json" in out
    assert "simulation  skipped: the dump has no costs.json" in out
    assert "check       ok" in out


def test_replay_prints_the_step_program(capsys, dump):
    code, out, _ = run(capsys, "replay", dump, "--program")
    assert code == 0
    problem = from_json((dump / "problem.json").read_text(), Problem)
    assert out == program_text(problem)
    assert len(out.splitlines()) >= len(problem.calls)


def test_replay_simulates_and_draws(capsys, tmp_path):
    problem, plan = layered(4)
    seconds = {"tail": 0.002, **{k: v for k, v in SECONDS.items() if "2" not in k}}
    costs = StepCosts(
        region_s=seconds,
        d2h_bytes_per_s=ATTN / SECONDS["d2h"],
        h2d_bytes_per_s=ATTN / SECONDS["h2d"],
    )
    plan = dataclasses.replace(plan, timeline=simulate(problem, costs))
    write_pictures(tmp_path, problem, plan, costs)
    out_folder = tmp_path / "again"
    code, out, err = run(
        capsys, "replay", tmp_path, "--solver", "greedy", "--out", out_folder, "--json"
    )
    answer = json.loads(out)
    assert (code, answer["equal"]) == (0, True)
    assert answer["step_s"] == pytest.approx(plan.timeline.step_s)
    assert f"wrote {out_folder / 'report.html'}" in err
    assert (out_folder / "costs.json").is_file()


def test_replay_says_what_differs(capsys, dump):
    plan = layered(4)[1]
    wrong = dataclasses.replace(plan, arena_bytes=plan.arena_bytes + 512)
    (dump / "plan.json").write_text(to_json(wrong))
    code, out, _ = run(capsys, "replay", dump, "--solver", "greedy")
    assert code == 1
    assert "the plan differs from plan.json" in out
    assert "arena_bytes" in out


def test_replay_refuses_what_is_no_dump(capsys, dump):
    code, _, err = run(capsys, "replay", dump / "nowhere")
    assert (code, err.count("\n")) == (2, 1)
    assert "no such folder" in err
    (dump / "plan.json").unlink()
    code, _, err = run(capsys, "replay", dump)
    assert (code, err.count("\n")) == (2, 1)
    assert "plan.json: cannot be read" in err
    code, _, err = run(capsys, "replay", dump, "--solver", "luck")
    assert code == 2
