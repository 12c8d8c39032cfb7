"""Whether the process of another rank has ended, as far as its connection shows."""

import datetime
import gc
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from memo_compile.torch_private import distributed


@pytest.fixture
def ranks(monkeypatch):
    """Two ranks in one process, and the world of the first one."""
    store, made = dist.HashStore(), {}

    def join(rank):
        made[rank] = dist.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=30))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    world = SimpleNamespace(_get_backend=lambda device: made[0])
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: world)
    yield made
    made.clear()


def test_a_rank_is_gone_once_its_connection_is_closed(ranks):
    for _ in range(5):
        assert not distributed.is_gone(1)
    del ranks[1]
    gc.collect()
    end_s = time.monotonic() + 20
    while not distributed.is_gone(1):
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_messages_that_nobody_asks_for_disturb_no_others(ranks):
    assert not distributed.is_gone(1)
    sent, received = torch.arange(4.0), torch.zeros(4)
    work = ranks[1].recv([received], 0, 0)
    ranks[0].send([sent], 1, 0).wait()
    work.wait()
    assert torch.equal(sent, received)


@pytest.mark.parametrize("name", ["nccl", ""])
def test_other_backends_are_not_asked(monkeypatch, name):
    def backend(device):
        if not name:
            raise RuntimeError("No backend type associated with device type cpu")
        return SimpleNamespace(name=lambda: name, send=None)

    world = SimpleNamespace(_get_backend=backend)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: world)
    assert not distributed.is_gone(1)
