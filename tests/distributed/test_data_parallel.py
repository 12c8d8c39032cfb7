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
    {"train": "plainly", "inside": True, "options": {"early_gradients": False}},
    {"train": "plainly", "arguments": {"static_graph": True}},
    {"train": "accumulating", "arguments": {"gradient_as_bucket_view": True}},
    {
        "train": "scaled",
        "arguments": {"find_unused_parameters": True},
        "options": {"policy": "full-recompute"},
    },
    {"train": "failing", "options": {"policy": "full-offload", "debug": ["poison"]}},
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    found = run_ranks("tests.distributed.data_parallel", folder, {"settings": SETTINGS})
    return [outcome.found for outcome in found]


@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=lambda at: str(SETTINGS[at]))
def test_training_is_that_of_one_process(outcomes, number):
    setting = SETTINGS[number]
    for found in (own[number] for own in outcomes):
        assert found["active"]
        assert (found["unplanned_steps"], found["num_plans"]) == (0, 1)
        assert not any("DistributedDataParallel" in note for note in found["notes"])
        wrong = {name: e for name, e in found["errors"].items() if math.isnan(e) or e > TOLERANCE}
        assert not wrong
        assert_events(setting, found["events"])


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
