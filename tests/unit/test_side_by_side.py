"""Which samples of a timed step count, and what two benchmarks make of them."""

import time

import pytest

from benchmarks import overlap, side_by_side, simulated
from benchmarks.side_by_side import Sample, Timed


def timed(*pairs: tuple[float, float]) -> Timed:
    return Timed(samples=tuple(Sample(seconds=s, others=o) for s, o in pairs))


def test_quiet_samples_count_where_there_are_enough():
    found = timed((1.0, 0.0), (1.2, 0.1), (1.1, 0.05), (9.0, 0.5))
    assert (found.is_quiet, found.median_s, found.counted) == (True, 1.1, (0, 1, 2))
    assert side_by_side.busy_note({"a": found.as_dict()}) is None


def test_on_a_busy_machine_all_count_and_it_is_said():
    found = timed((1.0, 0.0), (5.0, 0.4), (9.0, 0.5))
    assert (found.is_quiet, found.median_s, found.counted) == (False, 5.0, (0, 1, 2))
    assert "run again on a quiet machine: a" in side_by_side.busy_note({"a": found.as_dict()})


def test_a_sample_does_not_count_this_process_as_another():
    def spin():
        end = time.perf_counter() + 0.3
        while time.perf_counter() < end:
            pass

    found = side_by_side.sample(spin)
    assert found.seconds >= 0.3
    assert 0.0 <= found.others <= 1.1


def overlap_result(overlapped: float, serial: float, layer_s: float = 0.1) -> dict:
    steps = {"save": 1.0, "overlapped": overlapped, "serial": serial}
    return {
        "layer": {"fwd_s": layer_s, "bwd_s": 2 * layer_s, "bytes": 8.0},
        "offloaded_bytes": 16,
        "steps": {name: {"median_s": seconds} for name, seconds in steps.items()},
    }


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (overlap_result(1.1, 1.6), []),
        (overlap_result(1.2, 1.6), ["with copies 1.200 x, at most 1.1"]),
        (overlap_result(1.0, 1.5), ["without overlap 1.500 x, over 1.5"]),
        (overlap_result(1.0, 1.6, 0.01), ["a layer takes 0.010 s; make the model larger"]),
        ({**overlap_result(1.0, 1.6), "offloaded_bytes": 0}, ["nothing was offloaded"]),
    ],
)
def test_overlap_is_judged(result, said):
    assert overlap.judge(result) == said


def test_a_layers_copy_takes_its_part_of_each_half():
    layer = {"bytes": 80.0, "fwd_s": 1.0, "bwd_s": 2.0}
    assert overlap.copy_speeds(layer, 0.8) == (100.0, 50.0)


def test_a_simulated_step_may_be_ten_percent_off():
    rows = [{"name": "a", "ratio": ratio} for ratio in (0.95, 1.09, 0.8, 1.2)]
    assert len(simulated.judge(rows[:2])) == 0
    assert simulated.judge(rows[2:3]) == ["a: simulated / measured 0.800"]
    assert len(simulated.judge(rows[2:])) == 2
