"""Without the emulated device these tests are skipped: ``make cuda-emulated`` runs them."""

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
IS_EMULATED = "EMULATED_CUDA" in os.environ


CALLS_THE_DEVICE = [
    *("test_attention.py", "test_budget.py", "test_cuda_graphs.py", "test_fragmentation.py"),
    *("test_host_pool.py", "test_launches.py", "test_memory.py", "test_offline.py"),
    *("test_order.py", "test_overlap.py", "test_refusals.py", "test_survival.py"),
    "test_training_state.py",
]
collect_ignore = [] if IS_EMULATED else CALLS_THE_DEVICE
"""What calls the emulated device itself does not even import without it."""


@pytest.fixture(autouse=True)
def readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure prints tensors: the device would never find out which entries to print."""
    print_tensor = torch.Tensor.__repr__
    monkeypatch.setattr(
        torch.Tensor, "__repr__", lambda tensor, **how: print_tensor(tensor.cpu(), **how)
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if IS_EMULATED:  # after a capture torch takes no workspace for cuBLAS again: captures come last
        items.sort(key=lambda item: item.path.name == "test_cuda_graphs.py")
        return
    reason = "needs torch's CUDA build and the emulated device: make cuda-emulated"
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
