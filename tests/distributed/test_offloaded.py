"""Gradients and updates on the host under DDP are the plain optimizer's."""

from tests.distributed.ranks import run_ranks

SETTINGS = [{}, {"gradient_as_bucket_view": True}]


def test_gradients_on_the_host_under_ddp(tmp_path, subtests):
    for rank in run_ranks("tests.distributed.offloaded", tmp_path, {"settings": SETTINGS}):
        for setting, found in zip(SETTINGS, rank.found, strict=True):
            with subtests.test(**setting):
                assert all(found["same"])
                assert found["active"]
                assert found["unplanned_steps"] == 0
                assert found["training_state"] == "host"
                # DDP itself puts its buckets' views in the place of reduced gradients.
                assert found["at_home"] == [not setting] * len(found["at_home"])
