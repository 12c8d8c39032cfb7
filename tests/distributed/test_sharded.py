"""FSDP2: blocks that share a graph are one group, and the numbers are those of one process."""

import math

import pytest

from tests.distributed.ranks import run_ranks

TOLERANCE = 3e-5
"""float32 sums in another order."""
MIXED_TOLERANCE = 0.04
"""Of bfloat16 under torch's decompositions: AOTAutograd's ``aot_eager_decomp_partition`` and
Inductor differ from eager by the same 0.02, and all three by 0.005 from float32."""

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


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_mixed_precision(num_ranks, tmp_path, subtests):
    """Parameters are gathered in bfloat16, and gradients reduced in float32."""
    late = {**ANY, "debug": ["poison", "copies-late"]}
    settings = [
        {"mixed": True, "options": ANY},
        {"mixed": True, "accumulates": True, "reshard": False, "options": late},
        {"mixed": True, "by_block": False, "options": late},
    ]
    assert_right(tmp_path, subtests, settings, num_ranks)


@pytest.mark.full
def test_blocks_that_are_tensor_parallel_too(tmp_path, subtests):
    """Two pairs of ranks: each pair shares the work of a batch, and the two shard its halves.

    Dynamo compiles the second block anew, and the first one's graph is not used any more: the group
    of all blocks is planned when it has come twice.
    """
    late = {**ANY, "debug": ["poison", "collectives-late", "copies-late"]}
    sizes = {"num_layers": 4, "num_tensor": 2, "num_steps": 5}
    settings = [
        {**sizes, "options": {"policy": "full-offload"}},
        {**sizes, "accumulates": True, "options": late},
    ]
    assert_right(tmp_path, subtests, settings, num_ranks=4)


def test_blocks_that_are_sequence_parallel_too(tmp_path, subtests):
    """All their parameters are of parts of tensors, and the first block's input is still to come.

    Its graph is another one than that of the blocks behind it, which are a group.
    """
    sizes = {"num_layers": 3, "num_tensor": 2, "num_steps": 4, "sequence": True}
    settings = [{**sizes, "options": {"policy": "full-offload"}}]
    for rank in run_ranks("tests.distributed.sharded", tmp_path, {"settings": settings}):
        (found,) = rank.found
        assert found["active"]
        assert found["unplanned"][-2] == found["unplanned"][-1] < sizes["num_layers"]
        for errors in found["errors"]:
            assert not {n: e for n, e in errors.items() if math.isnan(e) or e > TOLERANCE}
        (group,) = found["groups"]
        assert group["num_instances"] == 2
        assert group["offloaded_bytes"] > 0


@pytest.mark.parametrize(
    ("num_ranks", "num_sequences"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.full)]
)
def test_blocks_whose_attention_swaps_tokens_for_heads(num_ranks, num_sequences, tmp_path):
    """Two ranks share each sequence, and all of them the weights."""
    debug = ["poison", "collectives-late", "copies-late"]
    options = {"lowering": "aten", "costs": "roofline", "policy": "full-offload", "debug": debug}
    arguments = {"settings": [{"num_sequences": num_sequences, "num_layers": 3, **options}]}
    for rank in run_ranks("tests.distributed.sharded_sequence", tmp_path, arguments, num_ranks):
        (outcome,) = rank.found
        assert outcome["active"]
        assert outcome["unplanned_steps"] == 2, "of the first step, before the blocks are a group"
        assert outcome["num_unwaited"] == 0
        assert outcome["num_instances"] == 3
        assert outcome["num_collectives"] == 3 * 8, "q, k, v and the result, each way"
        assert outcome["offloaded_bytes"] > 0
        for errors in outcome["errors"]:
            assert not {n: e for n, e in errors.items() if math.isnan(e) or e > 1e-6}


@pytest.mark.parametrize("optimizer", ["AdamW", pytest.param("RAdam", marks=pytest.mark.full)])
def test_state_of_shards_lies_on_the_host(optimizer, tmp_path):
    """Weights are the plain optimizer's, also after a resume from either's checkpoint."""
    arguments = {"settings": [], "optimizer": optimizer}
    for rank in run_ranks("tests.distributed.sharded", tmp_path, arguments, 3):
        assert all(rank.found["same"])
        assert rank.found["active"]
        assert rank.found["state"]["device_bytes"] == 0
        assert rank.found["state"]["host_bytes"] == 2 * rank.found["shards"]


def assert_right(folder, subtests, settings, num_ranks=2):
    for rank in run_ranks("tests.distributed.sharded", folder, {"settings": settings}, num_ranks):
        for setting, found in zip(settings, rank.found, strict=True):
            num_layers = setting.get("num_layers", 4)
            with subtests.test(**setting):
                assert found["active"]
                first, *later = found["unplanned"]
                if "num_tensor" in setting:
                    assert later[-2] == later[-1] <= num_layers
                else:
                    assert first == later[-1] == num_layers - 1
                most = MIXED_TOLERANCE if "mixed" in setting else TOLERANCE
                for errors in found["errors"]:
                    assert not {n: e for n, e in errors.items() if math.isnan(e) or e > most}
                (group,) = found["groups"]
                assert group["num_instances"] == num_layers
                assert group["offloaded_bytes"] > 0
                talks = 2 if setting.get("num_tensor") else 0
                assert group["num_collectives"] == talks * num_layers
        first, second = (found["groups"][0]["arena_bytes"] for found in rank.found[:2])
        assert second <= 1.05 * first, "a frame holds what one block needs, whatever their number"
