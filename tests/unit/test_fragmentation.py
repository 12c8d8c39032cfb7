"""What torch's allocator keeps in pieces beside the arena is said, with what to change."""

import pytest
import torch

from memo_compile.driver import out_of_memory
from memo_compile.driver.out_of_memory import OutOfMemory, explanation
from memo_compile.reporting import state
from tests.steps.small import planned, two_layers

pytestmark = pytest.mark.usefixtures("fresh_report")

CUDA, GIB = torch.device("cuda"), 2**30


@pytest.fixture
def allocator(monkeypatch):
    """An allocator that has taken 60 of 100 GiB, of which 50 were in use at one time."""
    found = {"reserved": 60 * GIB, "allocated": 50 * GIB}
    device = type("Properties", (), {"total_memory": 100 * GIB})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: found["reserved"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: found["allocated"])
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return found


def notes_after(num_steps: int, device: torch.device = CUDA) -> list[str]:
    memory = OutOfMemory(dump=None)
    for _ in range(num_steps):
        memory.step_ended(device)
    return list(state.report().notes)


def test_pieces_are_named_once_from_the_second_step_on(allocator):
    assert notes_after(1) == []
    (note,) = notes_after(9)
    assert "10.00 GiB of the device (10%)" in note
    assert "expandable_segments:True" in note


def test_few_pieces_and_a_cpu_s_memory_are_not_named(allocator):
    assert notes_after(4, torch.device("cpu")) == []
    allocator["reserved"] = allocator["allocated"] + GIB
    assert notes_after(4) == []


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_is_set_is_not_suggested(allocator, monkeypatch, variable):
    monkeypatch.setenv(variable, "max_split_size_mb:512, expandable_segments: True")
    (note,) = notes_after(2)
    assert "expandable_segments" not in note
    assert "10.00 GiB" in note


def test_the_explanation_of_memory_that_ran_out_names_pieces(allocator):
    plan = planned(two_layers())
    text = explanation(plan, None, out_of_memory.unused_bytes(CUDA))
    assert (
        f"10.00 GiB of the device lie in pieces that nothing uses: {out_of_memory.EXPAND}" in text
    )
    assert "pieces" not in explanation(plan, None)
