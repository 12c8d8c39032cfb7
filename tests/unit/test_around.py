"""Finding the model around a block, among all objects of the process."""

import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from memo_compile.driver.around import (
    local_bytes,
    parameters_around,
    sharded_around,
)
from memo_compile.driver.owners import owned, with_owners


def test_a_thread_that_makes_tuples_is_left_alone():
    """A list of all objects would hold a tuple in the making, and Python raise SystemError."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
    failures, is_over, interval_s = [], [], sys.getswitchinterval()

    def work() -> None:
        while not is_over:
            try:
                tuple(number for number in range(100))
            except SystemError as error:
                failures.append(error)

    thread = threading.Thread(target=work)
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        for _ in range(3):
            assert parameters_around([*model[0].parameters()]) == [model[1].weight]
    finally:
        sys.setswitchinterval(interval_s)
        is_over.append(True)
        thread.join()
    assert failures == []


@pytest.fixture
def ranks():
    """This process is the first of four ranks; collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("is_gathered", [False, True])
@pytest.mark.parametrize("num_tensor", [1, 2])
def test_a_gathered_parameter_counts_as_a_shard_and_as_gathered(ranks, is_gathered, num_tensor):
    """Also where all of a model are gathered (``reshard_after_forward=False``, an evaluation)."""
    mesh = init_device_mesh("cpu", (4 // num_tensor, num_tensor), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    if num_tensor > 1:
        parallelize_module(model[0], mesh["tensor"], ColwiseParallel())
        parallelize_module(model[1], mesh["tensor"], ColwiseParallel())
    for module in (*model, model):
        fully_shard(module, mesh=mesh["data"], reshard_after_forward=False)
    model[0].unshard()
    if is_gathered:
        model[1].unshard()
    whole = 8 * 8 * 4
    found = sharded_around([model[0].weight])
    assert found is not None
    assert found.held == sum(map(local_bytes, found.trained)) == 2 * whole // 4
    assert found.gathered == whole // num_tensor


def test_a_tensor_that_is_made_of_others_takes_what_they_take(ranks):
    mesh = init_device_mesh("cpu", (4,))
    whole = distribute_tensor(torch.zeros(8, 6), mesh, [Shard(0)])
    assert local_bytes(whole) == 2 * 6 * 4
    assert local_bytes(torch.zeros(8, 6)) == 8 * 6 * 4


def test_what_is_inside_a_parameter_is_known_while_it_is_called_with(ranks):
    mesh = init_device_mesh("cpu", (4,))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(8, 6), mesh, [Shard(0)]))
    plain, inside = torch.zeros(3), parameter._local_tensor
    seen = []
    run = with_owners(lambda *args: seen.append(owned([plain, inside])), [plain, parameter])
    run(plain, parameter)
    assert seen[0][0] is plain
    assert seen[0][1] is parameter
    assert owned([inside])[0] is inside
    untold = seen.append
    assert with_owners(untold, [plain]) is untold
