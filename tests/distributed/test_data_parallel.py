"""DistributedDataParallel: gradients reach its buckets while the backward runs; budgets hold."""

import collections
import math

import pytest

from tests.distributed.data_parallel import LAYERS
from tests.distributed.ranks import run_ranks

TOLERANCE = 3e-5
"""float32 sums in another order."""

SETTINGS = [
    {"train": "plainly"},
    {"train": "accumulating", "arguments": {"gradient_as_bucket_view": True}},
    {"train": "failing", "options": {"policy": "full-offload", "debug": ["poison"]}},
    {
        "train": "plainly",
        "optimize_ddp": True,
        "options": {
            "memory_budget": "100MiB",
            "policy": "full-offload",
            "debug": ["poison", "copies-late"],
        },
    },
]

MORE_SETTINGS = [
    {"train": "plainly", "arguments": {"static_graph": True}},
    {"train": "plainly", "inside": True, "options": {"early_gradients": False}},
    {
        "train": "scaled",
        "arguments": {"find_unused_parameters": True},
        "options": {"policy": "full-recompute"},
    },
    {
        "train": "accumulating",
        "optimize_ddp": True,
        "options": {"memory_budget": "100MiB", "debug": ["poison", "copies-early"]},
    },
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Per setting what each rank found; several settings run in the same processes."""
    known = {}

    def found(settings):
        key = id(settings)
        if key not in known:
            folder = tmp_path_factory.mktemp("ranks")
            ranks = run_ranks("tests.distributed.data_parallel", folder, {"settings": settings})
            known[key] = [rank.found for rank in ranks]
        return known[key]

    return found


@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=lambda at: str(SETTINGS[at]))
def test_training_is_that_of_one_process(ran, number):
    for rank in ran(SETTINGS):
        assert_right(SETTINGS[number], rank[number])


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(MORE_SETTINGS)), ids=lambda at: str(MORE_SETTINGS[at]))
def test_more_training_is_that_of_one_process(ran, number):
    for rank in ran(MORE_SETTINGS):
        assert_right(MORE_SETTINGS[number], rank[number])


def assert_right(setting, found):
    is_cut = setting.get("optimize_ddp", False)
    assert found["active"]
    assert found["unplanned_steps"] == 0
    assert (found["num_plans"] > 1) == is_cut
    assert any("DistributedDataParallel cuts" in note for note in found["notes"]) == is_cut
    assert not any("FSDP2" in note for note in found["notes"])
    wrong = {name: e for name, e in found["errors"].items() if math.isnan(e) or e > TOLERANCE}
    assert not wrong
    assert_events(setting, found["events"])
    if is_cut:
        assert_one_step(found)


def assert_one_step(found):
    """All graphs have one frame, smaller than their own ones together."""
    (group,) = found["groups"]
    assert group["num_instances"] == found["num_plans"]
    assert group["peak_bytes"] <= group["budget_bytes"]
    assert group["peak_bytes"] < found["sum_of_peaks"]


def assert_events(setting, events):
    """Every hook runs once in each backward, and every bucket once in each step that reduces."""
    reducing = {"accumulating": 2}.get(setting["train"], 3)
    backwards = {"accumulating": 6, "failing": 3}.get(setting["train"], 3)
    if setting["train"] == "failing":
        at = events.index("failed")
        begun = max(i for i, event in enumerate(events[:at]) if event.startswith("bucket"))
        assert "layer" in events[begun:at]
        events = events[: begun + 1] + events[at + 1 :]
    counts = collections.Counter(events)
    hooks = {name: count for name, count in counts.items() if name.startswith("layers.")}
    assert hooks == dict.fromkeys(hooks, backwards)
    assert len(hooks) == 6 * LAYERS
    assert counts["layer"] == (LAYERS - 1) * backwards  # the input has no gradient
    assert counts["bucket 0"] == reducing
    last = events[-1 - events[::-1].index("bucket 0") :]
    assert "bucket 1" in last
    is_early = setting.get("options", {}).get("early_gradients", True)
    assert ("layer" in last) == is_early, "buckets leave while layers are still to come"
