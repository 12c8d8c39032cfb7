"""FSDP2 around blocks under memo, block by block or whole, beside one process in eager."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import memo_compile
from memo_compile.reporting import state
from tests.numerics.small import Block

HIDDEN, ROWS, STEPS = 64, 256, 3

TENSOR = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCE = {
    "norm": SequenceParallel(sequence_dim=0),
    "up": ColwiseParallel(input_layouts=Shard(0)),
    "down": RowwiseParallel(output_layouts=Shard(0)),
}
AROUND = {
    "entry": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
    "head": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
}
"""Of a model whose blocks are ``SEQUENCE`` parallel."""


class Blocks(nn.Module):
    """An entry, blocks, a head; returns the loss."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.entry, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(Block(HIDDEN) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).pow(2).mean()


def main(*, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each setting's training gives, one after the other in the same processes."""
    return [trained(**setting) for setting in settings]


def trained(
    *,
    by_block: bool = True,
    num_layers: int = 4,
    accumulates: bool = False,
    reshard: bool = True,
    num_tensor: int = 1,
    num_steps: int = STEPS,
    mixed: bool = False,
    sequence: bool = False,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Some steps of both, with an optimizer; the errors after each.

    Blocks are tensor parallel over ``num_tensor`` neighbouring ranks; the others shard them. With
    ``sequence`` the rows between them are split among those ranks, so that the first block is given
    what a collective brings. With ``mixed`` they compute in bfloat16, and eager does all that
    without memo.
    """
    torch._dynamo.reset()
    state.reset()
    num_batches = dist.get_world_size() // num_tensor
    both = init_device_mesh("cpu", (num_batches, num_tensor), mesh_dim_names=("data", "tensor"))
    mesh = both["data"]
    torch.manual_seed(0)
    ours = Blocks(num_layers)
    eager = copy.deepcopy(ours)
    chosen = {"lowering": "aten", "strict": True, "costs": "roofline", **(options or {})}
    for layer in ours.layers:
        if num_tensor > 1:
            parallelize_module(layer, both["tensor"], SEQUENCE if sequence else TENSOR)
        if by_block:
            layer.compile(backend="memo", options=chosen)
    if sequence:
        parallelize_module(ours, both["tensor"], AROUND)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharding = {"mesh": mesh, "reshard_after_forward": reshard}
    for model in (ours, eager) if mixed else (ours,):
        for module in (*model.layers, model):
            fully_shard(module, **sharding, **({"mp_policy": policy} if mixed else {}))
    run = ours if by_block else torch.compile(ours, backend="memo", options=chosen)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, eager)]
    errors, unplanned = [], []
    for step in range(num_steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in range(2 if accumulates else 1):
            drawn = torch.Generator().manual_seed(10 * step + part)
            batch = torch.randn(num_batches * ROWS, HIDDEN, generator=drawn)
            own = batch[mesh.get_local_rank() :: num_batches]
            for model in (ours, eager) if mixed else (ours,):
                model.set_requires_gradient_sync(not accumulates or part == 1)
            run(own).backward()
            eager(own if mixed else batch).backward()
        errors.append(dict(_errors(ours, eager)))
        for optimizer in optimizers:
            optimizer.step()
        unplanned.append(memo_compile.report().unplanned_steps)
    report = memo_compile.report()
    return {
        "errors": errors,
        "active": report.active,
        "unplanned": unplanned,
        "num_plans": len(report.plans),
        "groups": [
            {
                "num_instances": group.num_instances,
                "arena_bytes": group.arena_bytes,
                "peak_bytes": group.peak_bytes,
                "budget_bytes": group.budget_bytes,
                "offloaded_bytes": group.offloaded_bytes,
                "num_collectives": group.num_collectives,
            }
            for group in report.groups
        ],
        "notes": list(report.notes),
    }


def _errors(ours: nn.Module, eager: nn.Module) -> Any:
    for (name, mine), theirs in zip(ours.named_parameters(), eager.parameters(), strict=True):
        found, expected = _whole(mine.grad), _whole(theirs.grad)
        yield name, float((found - expected).abs().max() / expected.abs().max())


def _whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
