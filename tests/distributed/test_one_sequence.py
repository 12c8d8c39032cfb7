"""Ulysses and ring attention: one sequence over several ranks has the gradients of one process."""

import itertools
import math

import pytest

from tests.distributed.ranks import run_ranks

TOLERANCE = 1e-6
"""float32 sums in another order, relative to each gradient's largest."""

LATE = "poison,collectives-late,copies-late"
EARLY = "poison,collectives-early,copies-early"

SETTINGS = [
    {"kind": kind, "memory_budget": 270_000, "lowering": "aten", "costs": "roofline", "debug": LATE}
    for kind in ("ulysses", "ring")
]
"""35 tokens: the first rank has one more. Without a budget a step takes 290 KB."""

MEASURED = {
    "kind": "ring",
    "lowering": "aten",
    "num_tokens": 8192,
    "num_layers": 4,
    "memory_budget": 16_000_000,
    "host_budget": 0,
}

HEAP_BYTES = 3 * 2**19
"""What kernels of a layer's backward use of the free heap on a CPU (docs/limits.md)."""

COLLECTIVES = {"ulysses": lambda num_ranks: 8, "ring": lambda num_ranks: 3 * num_ranks - 2}
"""Of a layer: q, k, v and the result, each way; keys with values go around but for the last step,
in both halves, and their gradients all the way home."""

REDUCTIONS = 2 + 5
"""Of a tensor parallel layer, forwards and backwards."""


def test_gradients_are_those_of_one_process(tmp_path, subtests):
    assert_right(tmp_path, subtests, SETTINGS, 2)


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("lowering", ["aten", "inductor"])
@pytest.mark.parametrize("kind", ["ulysses", "ring"])
@pytest.mark.parametrize(
    "varied",
    [
        {"num_tokens": 37, "debug": LATE},
        {"num_tokens": 37, "causal": False, "debug": EARLY},
        {"num_tokens": 32, "debug": EARLY},
    ],
    ids=["causal", "all see all", "lengths that divide"],
)
def test_three_budgets_from_the_floor(kind, lowering, num_ranks, varied, tmp_path, subtests):
    settings = [{"kind": kind, "lowering": lowering, "above": [1.04, 1.12], **varied}]
    assert_right(tmp_path, subtests, settings, num_ranks)


@pytest.mark.full
def test_ulysses_of_tensor_parallel_layers(tmp_path, subtests):
    """Two pairs of ranks: a pair shares each layer's weights, and the pairs share the tokens."""
    setting = {**SETTINGS[0], "num_tensor": 2, "memory_budget": 200_000}
    assert_right(tmp_path, subtests, [setting], 4)


@pytest.mark.full
def test_each_rank_of_a_ring_keeps_its_budget(tmp_path, subtests):
    """Without copies to the host, which on a CPU would be memory as well."""
    for outcome in assert_right(tmp_path, subtests, [MEASURED], 2):
        for found in outcome.found[0]:
            most_bytes = found["budget_bytes"] + HEAP_BYTES
            assert max(found["measured_bytes"]) <= most_bytes, found


def assert_right(folder, subtests, settings, num_ranks):
    given = {"settings": settings}
    outcomes = run_ranks("tests.distributed.one_sequence", folder, given, num_ranks)
    for (rank, outcome), (number, setting) in itertools.product(
        enumerate(outcomes), enumerate(settings)
    ):
        for found in outcome.found[number]:
            with subtests.test(rank=rank, budget=found["budget_bytes"], **setting):
                assert found["active"]
                assert found["unplanned_steps"] == found["num_unwaited"] == 0
                (num_layers,) = found["layers"]
                per_layer = COLLECTIVES[setting["kind"]](num_ranks)
                per_layer += REDUCTIONS if "num_tensor" in setting else 0
                assert found["num_collectives"] == num_layers * per_layer
                assert found["peak_bytes"] <= found["budget_bytes"]
                for errors in found["errors"]:
                    wrong = {n: e for n, e in errors.items() if math.isnan(e) or e > TOLERANCE}
                    assert not wrong
    return outcomes
