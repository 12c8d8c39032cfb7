import functools
import itertools
import sys
import textwrap

import pytest

from benchmarks import harness
from benchmarks.harness import Arm, ChildFailed, run_arm, run_in_turns
from benchmarks.step import judge, step_ratio


@pytest.fixture
def module(tmp_path):
    """Write a module that a child can run; returns the arm's environment."""

    def write(source):
        (tmp_path / "benched.py").write_text(textwrap.dedent(source))
        return {"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}"}

    return write


def test_an_arm_runs_in_a_process_of_its_own_with_empty_caches(module):
    environment = module("""
        import os, sys
        from benchmarks.harness import send_result
        folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
        print("noise on stdout")
        send_result({"argv": sys.argv[1:], "extra": os.environ["EXTRA"], "folder": folder,
                     "compiled": [n for n in os.listdir(folder) if n not in ("log",)]})
    """)
    arm = Arm(name="one", arguments=("--x=1", "y"), environment={**environment, "EXTRA": "7"})
    first, second = run_arm("benched", arm), run_arm("benched", arm)
    assert (first["argv"], first["extra"], first["compiled"]) == (["--x=1", "y"], "7", [])
    assert first["folder"] != second["folder"]


def test_a_child_that_dies_is_named_with_its_last_lines(module):
    environment = module("raise ValueError('no such kernel')")
    with pytest.raises(ChildFailed, match=r"(?s)arm dead: exit code 1.*no such kernel"):
        run_arm("benched", Arm(name="dead", environment=environment))


def test_what_a_child_sent_before_it_hangs_is_kept(module):
    environment = module("""
        import time
        from benchmarks.harness import send_result
        for number in (1, 2):
            send_result({"lengths": list(range(number))})
        time.sleep(60)
    """)
    with pytest.raises(ChildFailed, match="arm slow: no result within") as stopped:
        run_arm("benched", Arm(name="slow", environment=environment), timeout_s=8.0)
    assert stopped.value.sent == {"lengths": [0, 1]}


TURNS = """
    import sys, time
    from pathlib import Path
    from benchmarks.harness import send_result, wait_turn
    spans = []
    for _ in range(int(sys.argv[1])):
        wait_turn()
        begin = time.monotonic()
        time.sleep(0.05)
        spans.append((begin, time.monotonic()))
    send_result({"spans": spans})
"""


def test_arms_in_turns_are_awake_one_at_a_time(module):
    environment = module(TURNS)
    arms = [
        Arm(name=name, arguments=(number,), environment=environment)
        for name, number in (("long", "4"), ("short", "2"))
    ]
    found = run_in_turns("benched", arms)
    spans = [(*span, name) for name, step in found.items() for span in step["spans"]]
    spans.sort()
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))
    assert [name for *_, name in spans] == ["long", "short", "long", "short", "long", "long"]


def test_the_step_ratio_is_that_of_neighbouring_steps():
    """The second pair ran while the machine was three times slower."""
    rounds = {
        "inductor": [{"steps_s": [1.0, 3.0]}, {"steps_s": [1.0]}],
        "memo": [{"steps_s": [1.1, 3.3]}, {"steps_s": [2.0]}],
    }
    assert step_ratio(rounds) == pytest.approx(1.1)
    assert step_ratio({"memo": rounds["memo"]}) is None


def results(**memo):
    good = {"step_s": 1.0, "peak_bytes": 100, "losses": [2.0, 1.0]}
    return {"eager": good, "inductor": good, "memo": {**good, **memo}}


@pytest.mark.parametrize(
    ("change", "ratio", "failure"),
    [
        ({}, 1.0, None),
        ({"peak_bytes": 101, "losses": [2.0, 1.0009]}, 1.05, None),
        ({}, 1.06, "memo: its step is 1.060 x inductor's, at most 1.05"),
        ({"peak_bytes": 102}, 1.0, "memo: its peak is 1.020 x inductor's, at most 1.01"),
        ({"losses": [2.0, 1.002]}, 1.0, "memo: loss 1.002 of step 2, eager has 1.0"),
        ({"losses": [2.0, float("nan")]}, None, "memo: loss nan of step 2, eager has 1.0"),
    ],
)
def test_step_benchmark_judges_memo(change, ratio, failure):
    assert judge(results(**change), ratio) == ([failure] if failure else [])


def test_a_result_is_written_and_its_failures_end_the_benchmark(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        harness, "write_results", functools.partial(harness.write_results, folder=tmp_path)
    )
    payload = {"hardware": {"date": "2026-01-02"}, "failures": [], "note": None}
    assert harness.conclude("some", payload, save=True) == 0
    assert (tmp_path / "some-2026-01-02.json").exists()
    payload = {**payload, "failures": ["too slow"], "note": "busy"}
    assert harness.conclude("other", payload, save=False) == 1
    assert not (tmp_path / "other-2026-01-02.json").exists()
    said = capsys.readouterr().err
    assert "FAILED: too slow" in said
    assert "NOT QUIET: busy" in said
