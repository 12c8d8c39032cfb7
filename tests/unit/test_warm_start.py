"""What the benchmark of a second process judges: its ratio, and that the plan is the first's."""

from typing import Any

import pytest

from benchmarks import warm_start


def _results(inductor_s: float, memo_s: float) -> dict[str, list[dict[str, Any]]]:
    """Depth 8: the first processes take so long that only the second ones can pass."""
    found = {"num_regions": 6, "num_hits": 6, "num_recalled": 1, "gradient_error": 1e-6}
    return {
        "inductor-8": [{"first_step_cpu_s": 1.0}, {"first_step_cpu_s": inductor_s}],
        "memo-8": [{"first_step_cpu_s": 1000.0}, {"first_step_cpu_s": memo_s, **found}],
    }


def test_the_second_process_is_judged() -> None:
    assert warm_start.judge(_results(10.0, 10.0), [8]) == []
    (failure,) = warm_start.judge(_results(10.0, 21.0), [8])
    assert failure == "8 layers: the second process's first step is 2.10 x Inductor's"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("num_recalled", 0, "the second process traced the step again"),
        ("num_hits", 5, "5 of 6 regions came from the cache"),
        ("gradient_error", 0.1, "gradients differ by 0.1"),
        ("gradient_error", float("nan"), "gradients differ by nan"),
    ],
)
def test_regions_made_anew_and_wrong_gradients_are_failures(field, value, said) -> None:
    results = _results(10.0, 10.0)
    results["memo-8"][1][field] = value
    assert warm_start.judge(results, [8]) == [f"8 layers: {said}"]


def test_every_round_needs_the_first_process_s_plan() -> None:
    same, other = {"plan_sha256": "a"}, {"plan_sha256": "b"}
    pairs = {"inductor-8": [({}, {})], "memo-8": [(same, same), (same, other)]}
    assert warm_start.changed_plans(pairs) == [
        "memo-8, round 2: the second process made another plan"
    ]


def test_a_plan_s_digest_leaves_out_only_how_long_it_took() -> None:
    plan = {"lowering_s": 1.0, "planning_s": 2.0, "peak_bytes": 64, "buffers": [{"offset": 0}]}
    digest = warm_start.digest(plan)
    assert warm_start.digest({**plan, "lowering_s": 9.0, "planning_s": 9.0}) == digest
    assert warm_start.digest({**plan, "buffers": [{"offset": 64}]}) != digest
    assert warm_start.digest({**plan, "peak_bytes": 128}) != digest
