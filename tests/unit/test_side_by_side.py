"""Which samples of a timed step count, and what a benchmark makes of them."""

from benchmarks import simulated
from benchmarks.simulated import Sample, Timed


def timed(*pairs: tuple[float, float]) -> Timed:
    return Timed(samples=tuple(Sample(seconds=s, others=o) for s, o in pairs))


def test_quiet_samples_count_where_there_are_enough():
    found = timed((1.0, 0.0), (1.2, 0.1), (1.1, 0.05), (9.0, 0.5))
    assert (found.is_quiet, found.median_s, found.counted) == (True, 1.1, (0, 1, 2))
    assert simulated.busy_note({"a": found.as_dict()}) is None


def test_on_a_busy_machine_all_count_and_it_is_said():
    found = timed((1.0, 0.0), (5.0, 0.4), (9.0, 0.5))
    assert (found.is_quiet, found.median_s, found.counted) == (False, 5.0, (0, 1, 2))
    assert "run again on a quiet machine: a" in simulated.busy_note({"a": found.as_dict()})


def test_a_simulated_step_may_be_ten_percent_off():
    rows = [{"name": "a", "ratio": ratio} for ratio in (0.95, 1.09, 0.8, 1.2)]
    assert len(simulated.judge(rows[:2])) == 0
    assert simulated.judge(rows[2:3]) == ["a: simulated / measured 0.800"]
    assert len(simulated.judge(rows[2:])) == 2
