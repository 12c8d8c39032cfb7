"""Weights, gradients, optimizer state and activations of a step together stay below one budget.

Twenty steps of four micro-batches each, with two parameter groups, clipping and a schedule, from
the smallest budget up, on a CPU: losses and weights are the plain optimizer's to the last bit.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.full

MOST_OVER_BUDGET = 1.005
HEAP_BYTES = 3 * 2**19
"""Free heap that kernels of a backward and of an update on the host may use beside a budget: more
than the part above where budgets are small (docs/limits.md)."""
STATE_BYTES = 3 * 97 * 2**20
"""Less than what gradients and AdamW's state of the model take."""


def trained(folder: Path, **training: Any) -> dict[str, Any]:
    """What ``whole_step`` prints of one training, and its last weights."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.numerics.whole_step", str(folder), json.dumps(training)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["runtime", "."])},
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "weights": torch.load(folder / "weights.pt")}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The plain optimizer, without a budget."""
    return trained(tmp_path_factory.mktemp("plain"))


def assert_same_weights(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["weights"].keys() == theirs["weights"].keys()
    for name, weight in theirs["weights"].items():
        assert torch.equal(ours["weights"][name], weight), name


@pytest.mark.parametrize(
    ("update", "weights", "over_floor"),
    [
        ("device", "device", 1.0),
        ("device", "device", 2.0),
        ("host", "device", 1.0),
        ("host", "device", 1.3),
        ("host", "host", 1.0),
    ],
)
def test_a_whole_step_stays_below_its_budget(
    update: str, weights: str, over_floor: float, plain: dict[str, Any], tmp_path: Path
) -> None:
    training = {"update": update, "weights": weights, "over_floor": over_floor}
    ours = trained(tmp_path, **training)
    assert ours["unplanned"] == 0
    assert ours["planned"] <= ours["budget"]
    assert ours["state"]["optimizer_state"]["device_bytes"] == 0
    assert (ours["budget"] < STATE_BYTES) == (over_floor < 2)
    assert ours["losses"] == plain["losses"]
    assert_same_weights(ours, plain)
    most_bytes = max(MOST_OVER_BUDGET * ours["budget"], ours["budget"] + HEAP_BYTES)
    assert max(ours["peaks"]) <= most_bytes, [peak / ours["budget"] for peak in ours["peaks"]]
    resumed = trained(tmp_path, **training, resumes=True)
    assert resumed["losses"] == ours["losses"][len(ours["losses"]) // 2 :]
    assert_same_weights(resumed, plain)
