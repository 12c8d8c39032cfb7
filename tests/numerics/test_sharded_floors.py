"""FSDP2 under budgets: one floor, which holds, and is not above the peak without a budget.

A group of one rank: what shards and gathers is FSDP2's own. Several ranks: tests/distributed.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memo_compile
from memo_compile.errors import Infeasible
from memo_compile.reporting import state
from tests.numerics.small import Stack, rows
from tests.numerics.training import in_ci

HIDDEN, LAYERS = 16, 3

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"  # Dynamo hides it by a filter
)


@pytest.fixture(autouse=True)
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    torch._dynamo.reset()
    dist.destroy_process_group()


def trained(budget=None, *, freezes=False, evaluates=False, reshard=True, num_steps=3):
    """Blocks are compiled one by one; the gradients of all steps, and the report."""
    torch._dynamo.reset()
    state.reset()
    torch.manual_seed(0)
    model = Stack(HIDDEN, LAYERS)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not freezes or "layers" not in name or "up.bias" in name)
    model.entry.requires_grad_(not freezes)
    if budget != "eager":
        options = {"lowering": "aten", "memory_budget": budget, "debug": ("poison",)}
        for layer in model.layers:
            layer.compile(backend="memo", options=options)
    mesh = init_device_mesh("cpu", (1,))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    found = []
    for step in range(num_steps):
        model.zero_grad()
        model(rows(step, 8, HIDDEN)).backward()
        found += [own.grad.to_local() for own in model.parameters() if own.requires_grad]
        if evaluates:
            with torch.no_grad():
                model(rows(step, 8, HIDDEN))
    return found, memo_compile.report()


FROZEN, EVALUATED = {"freezes": True}, {"evaluates": True, "reshard": False}


@pytest.mark.parametrize("setting", in_ci([FROZEN, EVALUATED], FROZEN), ids=["frozen", "eval"])
def test_a_floor_is_one_number_that_holds(setting):
    """The first block of a frozen model makes no gradient of its input: it has another graph."""
    expected, _ = trained("eager", **setting)
    with pytest.raises(Infeasible) as refused:
        trained(1, **setting)
    floor = refused.value.floor_bytes
    found, report = trained(floor, **setting)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    (planned,) = report.groups
    assert planned.num_instances == LAYERS
    assert planned.peak_bytes <= floor
    if "freezes" not in setting:  # else the first block has a plan of its own without a budget
        _, free = trained(**setting)
        assert floor <= free.groups[0].peak_bytes


def test_a_block_that_stays_alone_keeps_the_budget_from_its_second_step_on():
    """It was taken for one of several."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Stack(HIDDEN, 1))
    model[1].layers[0].compile(backend="memo", options={"lowering": "aten", "memory_budget": 1})
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    model(rows(0, 8, HIDDEN)).backward()
    with pytest.raises(Infeasible):
        model(rows(1, 8, HIDDEN))


def test_a_model_that_is_not_sharded_is_refused_beside_one_that_is():
    """The process uses ``fully_shard()``, for another model."""
    fully_shard(nn.Sequential(nn.Linear(HIDDEN, HIDDEN)), mesh=init_device_mesh("cpu", (1,)))
    model = Stack(HIDDEN, LAYERS)
    run = torch.compile(model, backend="memo", options={"lowering": "aten", "memory_budget": 1})
    with pytest.raises(Infeasible):
        run(rows(0, 8, HIDDEN))
    for layer in model.layers:
        layer.compile(backend="memo", options={"lowering": "aten", "memory_budget": 1})
    torch._dynamo.reset()
    with pytest.raises(Infeasible, match=f"the floor of {LAYERS} blocks"):
        model(rows(0, 8, HIDDEN))
