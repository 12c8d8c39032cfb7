"""One thread, and nothing left of one test in the next."""

import gc

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # collections during compilations need not walk what others left in the process
    yield
    gc.collect()
    torch.set_num_threads(threads)
