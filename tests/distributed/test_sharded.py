"""FSDP2: blocks that share a graph are one group, and the numbers are those of one process."""

import math

import pytest

from tests.distributed.ranks import run_ranks

TOLERANCE = 3e-5
"""float32 sums in another order."""

ANY = {"memory_budget": "100MiB", "policy": "full-offload"}
SETTINGS = [
    {"num_layers": 4, "options": ANY},
    {
        "num_layers": 8,
        "accumulates": True,
        "reshard": False,
        "options": {**ANY, "debug": ["poison", "copies-late"]},
    },
]
MORE_SETTINGS = [
    {"num_layers": 8, "options": {**ANY, "debug": ["poison", "copies-early"]}},
    {"num_layers": 16, "options": {**ANY, "debug": ["poison", "copies-late"]}},
    {"num_layers": 3, "by_block": False, "options": ANY},
]


def test_every_block_is_planned_and_right(tmp_path, subtests):
    assert_right(tmp_path, subtests, SETTINGS)


@pytest.mark.full
def test_more_blocks_and_a_model_compiled_whole(tmp_path, subtests):
    assert_right(tmp_path, subtests, MORE_SETTINGS)


def assert_right(folder, subtests, settings):
    for rank in run_ranks("tests.distributed.sharded", folder, {"settings": settings}):
        for setting, found in zip(settings, rank.found, strict=True):
            with subtests.test(**setting):
                assert found["active"]
                assert found["unplanned"] == [setting["num_layers"] - 1] * 3, (
                    "but in the first step"
                )
                for errors in found["errors"]:
                    assert not {n: e for n, e in errors.items() if math.isnan(e) or e > TOLERANCE}
                (group,) = found["groups"]
                assert group["num_instances"] == setting["num_layers"]
                assert group["offloaded_bytes"] > 0
        first, second = (found["groups"][0]["arena_bytes"] for found in rank.found[:2])
        assert second <= 1.05 * first, "a frame holds what one block needs, whatever their number"
