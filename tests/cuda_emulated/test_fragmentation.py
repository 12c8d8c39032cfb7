"""What torch's allocator holds beside the arena, with segments that grow and with usual ones."""

import gc

import pytest
import torch

import memo_compile
from memo_compile.driver import out_of_memory
from memo_compile.reporting import state
from tests import models
from tests.cuda_emulated.test_memory import Training, require_as_planned, workspaces

__all__ = ["workspaces"]  # a fixture

LENGTHS = (512, 2048, 1024, 4096)


@pytest.fixture
def growing():
    """Segments are addresses that are filled as they are needed."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    yield
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@pytest.mark.parametrize("policy", ["auto", "full-offload"])
def test_steps_take_what_was_planned_in_segments_that_grow(growing, policy):
    require_as_planned(models.llama, "aten", policy)


def unused_after_lengths() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for length in LENGTHS:
        training = Training(lambda seq, length=length: models.llama(seq=length), lowering="aten")
        training.step()
        training.step()
        del training
    return out_of_memory.unused_bytes(torch.device("cuda"))


def test_arenas_of_many_lengths_leave_fewer_pieces_in_segments_that_grow(growing):
    grown = unused_after_lengths()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    usual = unused_after_lengths()
    assert grown < usual / 2


def test_pieces_are_named(monkeypatch):
    monkeypatch.setattr(out_of_memory, "FRAGMENTED", 0.0)
    state.reset()
    training = Training(models.llama, lowering="aten")
    training.step()
    training.step()
    assert "lie in pieces" in "".join(memo_compile.report().notes)
