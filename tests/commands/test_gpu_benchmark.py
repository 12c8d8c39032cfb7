"""The GPU benchmark's way through memory: on the CPU with a tiny model, and made-up results."""

import json

import pytest
import torch

from benchmarks import gpu, harness


def options(*flags: str):
    return gpu.arguments(["--dry-run", "--steps=1", "--max-lengths=2", *flags])


@pytest.mark.parametrize(
    ("arm", "tokens"),
    [
        pytest.param("memo", [128], marks=pytest.mark.full),  # compiles
        pytest.param(gpu.LORA, [128], marks=pytest.mark.full),
        pytest.param(gpu.STATE, [128], marks=pytest.mark.full),
        pytest.param(gpu.GRAPHS[0], [128], marks=pytest.mark.full),
        ("offloaded-checkpointing", [128, 256]),
    ],
)
def test_a_tiny_model_trains_at_growing_lengths(arm, tokens):
    flags = (f"--child={arm}", "--models=tiny", f"--max-lengths={len(tokens)}")
    found = gpu.run_child(options(*flags))
    assert [length["tokens"] for length in found["lengths"]] == tokens
    assert found["ended"] == "as many lengths as were asked for"
    for length in found["lengths"]:
        assert length["peak_bytes"] > 0
        assert length["tokens_per_s"] == pytest.approx(length["tokens"] / length["step_s"])
        assert ("planned_bytes" in length) == arm.startswith("memo")
        assert 0 < length["host_s"] <= length["step_s"]


class FakeTrainer:
    """Has memory for ``most`` tokens."""

    most = 0

    def __init__(self, _arm, shape, _options):
        self.shape = shape

    def try_length(self, tokens, rows):
        if tokens > self.most:
            return f"{tokens} tokens: out of memory"
        rows.append({"tokens": tokens})
        return None


@pytest.mark.parametrize(
    ("most", "lengths", "ended"),
    [
        (100, [], "128 tokens: out of memory"),
        (128, [128], "192 tokens: out of memory"),
        (600, [128, 256, 512], "768 tokens: out of memory"),
        (800, [128, 256, 512, 768], "1024 tokens: out of memory"),
    ],
)
def test_lengths_double_until_memory_ends_and_then_one_between_is_tried(
    monkeypatch, most, lengths, ended
):
    monkeypatch.setattr(gpu, "Trainer", FakeTrainer)
    monkeypatch.setattr(FakeTrainer, "most", most)
    found = gpu.run_child(options("--child=memo", "--models=tiny", "--max-lengths=9"))
    assert [length["tokens"] for length in found["lengths"]] == lengths
    assert found["ended"] == ended


def test_memory_that_ends_is_an_answer_and_other_failures_are_not(monkeypatch):
    trainer = gpu.Trainer("checkpointing", gpu.SHAPES["tiny"], options())

    def fail(error):
        def length(_tokens):
            raise error

        monkeypatch.setattr(trainer, "_length", length)

    rows = []
    fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
    assert trainer.try_length(64, rows) == "64 tokens: CUDA out of memory. Tried to allocate"
    fail(RuntimeError("a kernel failed"))
    with pytest.raises(RuntimeError, match="a kernel failed"):
        trainer.try_length(64, rows)
    assert rows == []


@pytest.mark.parametrize(
    ("what", "is_failure"), [("no result within 9 s", False), ("exit code -11", True)]
)
def test_lengths_before_the_one_that_is_stopped_are_kept(monkeypatch, what, is_failure):
    def run_arm(*_arguments, **_more):
        error = harness.ChildFailed(f"arm memo: {what}\nlast line")
        error.sent = {"lengths": [length()], "ended": "stopped"}
        raise error

    monkeypatch.setattr(harness, "run_arm", run_arm)
    chosen = gpu.arguments(["--models=1b", "--arms=memo", "--time-limit=100"])
    rows = []
    gpu.run_arms("fits", chosen, gpu.time.monotonic() + 100, rows, lambda: None)
    assert rows[0]["lengths"] == [length()]
    assert rows[0]["ended"] == ("stopped" if is_failure else f"arm memo: {what}")
    assert gpu.judge(rows) == (["1b memo: last line"] if is_failure else [])


def test_arms_share_the_time_and_a_dead_one_is_a_row(monkeypatch):
    asked = []

    def run_arm(_module, arm, *, timeout_s):
        asked.append((arm.name, timeout_s))
        if arm.name == "inductor":
            raise harness.ChildFailed("arm inductor: exit code 1\nlast line")
        return {"lengths": [length()], "ended": "out of time"}

    monkeypatch.setattr(harness, "run_arm", run_arm)
    chosen = gpu.arguments(["--models=1b", "--arms=memo,inductor", "--time-limit=100"])
    rows, late, saved = [], [], []
    gpu.run_arms("fits", chosen, gpu.time.monotonic() + 100, rows, lambda: saved.append(len(rows)))
    assert saved == [1, 2]
    assert [call[0] for call in asked] == ["memo", "inductor"]
    assert rows[0]["lengths"] == [length()]
    assert rows[1]["failure"] == "last line"
    gpu.run_arms("fits", chosen, gpu.time.monotonic() + 10, late, lambda: None)
    assert [row["failure"] for row in late] == ["out of time"] * 2
    gpu.show("fits", [*rows, *late])


def length(peak: int = 1000, budget: int = 1100) -> dict:
    return {
        "tokens": 8192,
        "peak_bytes": peak,
        "planned_bytes": 1000,
        "budget_bytes": budget,
        "tokens_per_s": 5.0,
        "first_step_s": 2.0,
    }


@pytest.mark.parametrize(
    ("peak", "budget", "said"),
    [
        (1000, 1100, []),
        (1005, 1001, ["1b memo, 8192 tokens: 1005 over budget 1001"]),
        (1020, 1100, ["1b memo, 8192 tokens: 1020, planned 1000"]),
        (900, 1100, ["1b memo, 8192 tokens: 900, planned 1000"]),
    ],
)
def test_memo_is_held_to_its_budget_and_its_plan(peak, budget, said):
    row = {"model": "1b", "arm": "memo", "lengths": [length(peak, budget)]}
    assert gpu.judge([row]) == said
    assert gpu.judge([{**row, "arm": "inductor"}]) == []
    dead = {"model": "1b", "arm": "inductor", "lengths": [], "failure": "no result"}
    assert gpu.judge([dead]) == []
    assert gpu.judge([dead], every_arm=True) == ["1b inductor: no result"]


def test_what_was_measured_by_this_code_is_not_measured_again(monkeypatch, tmp_path):
    """Of the result that lies there; what failed is tried again."""
    monkeypatch.setattr(harness, "results_path", lambda *_: tmp_path / "result.json")
    asked = []

    def run_arm(_module, arm, *, timeout_s):
        asked.append(arm.name)
        return {"lengths": [length()], "ended": "out of time"}

    monkeypatch.setattr(harness, "run_arm", run_arm)
    at_start = {"hardware": {"gpus": ["NVIDIA H200"]}, "code": "abc"}
    done, failed = (
        {"model": "1b", "arm": arm, "lengths": [], **more}
        for arm, more in (("memo", {"ended": ""}), ("inductor", {"failure": "out of time"}))
    )
    known = {**at_start, "rows": [done, failed]}
    (tmp_path / "result.json").write_text(json.dumps(known))
    rows = gpu.kept_rows("fits", at_start)
    assert rows == [done]
    assert gpu.kept_rows("fits", {**at_start, "code": "abd"}) == []
    chosen = gpu.arguments(["--models=1b", "--arms=memo,inductor"])
    gpu.run_arms("fits", chosen, gpu.time.monotonic() + 100, rows, lambda: None)
    assert asked == ["inductor"]


def test_a_quarter_of_an_hour_begins_with_what_tells_most():
    assert sum(gpu.LIMITS_S[part] for part in gpu.USUAL) <= 800  # a machine has to start as well
    chosen = gpu.arguments([])
    assert chosen.part.split(",") == [*gpu.USUAL]
    speed = gpu.jobs_of("speed", chosen)
    assert speed[:3] == [("1b", f"memo:{budget}", 16384) for budget in gpu.SPEED_BUDGETS]
    assert len(speed) == 2 * 2 * (len(gpu.ARMS) + 2) == len(set(speed))
    assert gpu.jobs_of("longest", chosen) == [("8b", arm, None) for arm in (gpu.LORA, gpu.STATE)]
    assert [job[:2] for job in gpu.jobs_of("graphs", chosen)] == [
        ("small", arm) for arm in gpu.GRAPHS
    ]


@pytest.mark.parametrize(
    ("copies", "kernels", "hidden"),
    [
        ([(0, 10)], [], 0),
        ([(0, 10)], [(2, 4), (3, 6), (9, 20)], 5),
        ([(0, 4), (4, 8)], [(2, 6)], 4),
        ([], [(0, 4)], 0),
    ],
)
def test_copies_beside_kernels(copies, kernels, hidden):
    assert gpu.overlap_us(copies, kernels) == hidden
