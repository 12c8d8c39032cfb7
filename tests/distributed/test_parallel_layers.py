"""Tensor and sequence parallel layers: collectives inside a planned step.

What a collective returns belongs to it until it has been waited for. Copied before, it gave
gradients that were wrong by 0.8 of the largest, and NaN.
"""

import math

import pytest

from memo_compile.config import POLICIES
from tests.distributed.ranks import run_ranks
from tests.numerics.training import in_ci

TOLERANCE = 1e-11
"""float64 sums in another order."""

ROUNDED = 1e-6
"""The same in float32."""


LATE = "poison,collectives-late,copies-late"
"""A collective's output holds NaN until its wait."""

MOVING = {"costs": "roofline", "comm_bytes_per_s": 1e6, "token_granule": 4}
"""The same plan everywhere, whose recomputations hide."""

SETTINGS = [
    {"sequence": False, "lowering": "aten", "debug": LATE, "policy": "full-recompute"},
    {"sequence": True, "lowering": "aten", "debug": LATE},
    {"sequence": True, "lowering": "aten", "debug": LATE, "token_tiles": 2},
    {
        "shards": True,
        "lowering": "aten",
        "debug": LATE,
        "policy": "full-recompute",
        "num_layers": 4,
        "memory_budget": 1_150_000,
        "host_budget": 0,
        "costs": "roofline",
    },
]
"""Tensor parallel layers; with ``sequence`` the tokens between them are split as well. With
``shards`` each rank has rows of every parameter, and the layers gather them: under a budget that
kept weights do not fit operator by operator, for the backward once more. In tiles fewer collectives
run beside computation."""

FAILING = [{**setting, "fails": True} for setting in SETTINGS]
"""Steps raise at each of their calls before the last one."""

OTHERS = [
    {"sequence": False, "lowering": "aten", "comm_windows": False},
    {"sequence": True, "lowering": "aten", "debug": "poison,collectives-early,copies-early"},
    {
        "sequence": True,
        "lowering": "aten",
        "debug": LATE,
        "policy": "full-recompute",
        "fails": True,
    },
    {"sequence": True, "lowering": "aten", "debug": LATE, "policy": "full-offload"},
    {"sequence": False, "lowering": "aten", "debug": LATE, "policy": "full-offload"},
    {"shards": True, "lowering": "aten", "debug": "poison,collectives-early", "costs": "roofline"},
    {"shards": True, "lowering": "aten", "debug": LATE, "comm_windows": False},
]

NAMED = [
    {
        "sequence": bool(number % 2),
        "lowering": "aten",
        "debug": LATE,
        "policy": policy,
        "fails": True,
        **MOVING,
    }
    for number, policy in enumerate(POLICIES)
]
"""Under each policy, tensor and sequence parallel in turns."""

COMPILED = [{**setting, "lowering": "inductor"} for setting in FAILING]

COLLECTIVES = {False: 2 * 2 + 2 * 5, True: 2 * 4 + 2 * 4 + 5}
"""Two layers: two reductions forward and five backward; gathered and scattered twice each way, and
around the layers."""


def collectives(setting):
    """How many a step may have. Of nine parameters of a layer and three more each is gathered and
    scattered, and may be gathered again."""
    if "shards" not in setting:
        return (COLLECTIVES[setting["sequence"]],)
    num_layers = setting.get("num_layers", 2)
    kept, again = 2 * (9 * num_layers + 3), 9 * num_layers
    if "memory_budget" not in setting:
        return (kept,)
    return (kept + again,) if setting["lowering"] == "aten" else (kept, kept + again)


@pytest.mark.parametrize(
    ("settings", "num_ranks"),
    in_ci(
        [(SETTINGS, 2), (OTHERS, 2), (COMPILED, 2), (FAILING, 4), (NAMED, 4), (COMPILED, 4)],
        (SETTINGS, 2),
    ),
    ids=["aten", "others", "inductor", "four ranks", "policies", "four ranks, inductor"],
)
def test_gradients_are_those_of_one_process(settings, num_ranks, tmp_path, subtests):
    given = {"settings": settings}
    for outcome in run_ranks("tests.distributed.llama", tmp_path, given, num_ranks):
        for setting, found in zip(settings, outcome.found, strict=True):
            with subtests.test(**setting):
                assert_right(found, ROUNDED if "shards" in setting else TOLERANCE)
                assert found["num_collectives"] in collectives(setting)
                assert found["tiles"] == setting.get("token_tiles", found["tiles"])
                if setting.get("fails"):
                    assert found["num_failed"] > 2 * found["num_collectives"]
                is_fused_shards = "shards" in setting and setting["lowering"] == "inductor"
                if setting.get("policy") == "full-recompute" and not is_fused_shards:
                    assert found["window_recompute_s"] > 0


@pytest.mark.full
@pytest.mark.parametrize(("lowering", "num_ranks"), [("aten", 2), ("inductor", 2), ("aten", 4)])
def test_a_model_that_transformers_parallelizes(lowering, num_ranks, tmp_path, subtests):
    """``tp_plan="auto"``, which every rank reads from the model's own configuration."""
    pytest.importorskip("transformers.distributed.mixin")
    policies = ("auto", "full-recompute", "full-offload", "lynx-opt")
    settings = [{"policy": policy, "lowering": lowering, "debug": LATE} for policy in policies]
    given = {"settings": [{**setting, **MOVING} for setting in settings]}
    for outcome in run_ranks("tests.distributed.auto_parallel", tmp_path, given, num_ranks):
        for setting, found in zip(settings, outcome.found, strict=True):
            with subtests.test(**setting):
                assert_right(found, tolerance=1e-6)  # its norms compute in float32
                assert found["num_collectives"] > 0


def assert_right(found, tolerance=TOLERANCE):
    assert found["active"]
    assert found["num_unwaited"] == 0
    assert found["unplanned_steps"] == 0
    assert not any("FSDP" in note for note in found["notes"])
    for errors in found["errors"]:
        wrong = {
            name: error for name, error in errors.items() if math.isnan(error) or error > tolerance
        }
        assert not wrong
