"""One thread, and nothing left of one test in the next."""

import gc

import pytest
import torch

from memo_compile.reporting import state


@pytest.fixture(autouse=True)
def fresh_compiler():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    state.reset()
    torch.manual_seed(0)
    gc.collect()
    gc.freeze()  # tests that collect garbage need not walk what others left in the process
    yield
    torch._dynamo.reset()
    state.reset()
    gc.collect()
    torch.set_num_threads(threads)
