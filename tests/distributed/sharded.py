"""FSDP2 around blocks under memo, block by block or whole, beside one process in eager."""

import copy
import dataclasses
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
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


def main(
    *, settings: list[dict[str, Any]], optimizer: str | None = None
) -> list[dict[str, Any]] | dict[str, Any]:
    """What each setting's training gives, one after the other in the same processes.

    With ``optimizer``: what comes of state on the host.
    """
    if optimizer is not None:
        return state_on_host(getattr(torch.optim, optimizer))
    return [trained(**setting) for setting in settings]


def state_on_host(kind: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """Shards whose optimizer state is on the host, beside the plain optimizer; and a resume.

    Three ranks share 64 rows, so that one of them has less of each weight.
    """
    plain, _ = _trained_with(kind, offloads=False)
    ours, saved = _trained_with(kind, offloads=True)
    report = memo_compile.report()
    resumed, _ = _trained_with(kind, offloads=True, saved=saved)
    own = _trained_with(kind, offloads=False, saved=saved)[0]  # the plain optimizer goes on too
    return {
        "same": [
            torch.equal(weights[name], plain[name])
            for weights in (ours, resumed, own)
            for name in plain
        ],
        "state": dataclasses.asdict(report.training_state.optimizer_state),
        "shards": sum(weight.nbytes for weight in ours.values()),
        "active": report.active,
    }


def _trained_with(
    kind: type[torch.optim.Optimizer], *, offloads: bool, saved: Any = None
) -> tuple[dict[str, torch.Tensor], Any]:
    """This rank's weights after some steps, and a checkpoint made after two of them."""
    torch._dynamo.reset()
    state.reset()
    torch.manual_seed(0)
    model = Blocks(2)
    for module in (*model.layers, model):
        if isinstance(module, Block):
            module.compile(backend="memo", options={"lowering": "aten", "strict": True})
        fully_shard(module)
    decayed = [each for each in model.parameters() if each.dim() > 1]
    rest = [each for each in model.parameters() if each.dim() == 1]
    optimizer = kind([{"params": decayed, "weight_decay": 0.1}, {"params": rest}], lr=0.01)
    if offloads:
        optimizer = memo_compile.offload(optimizer)
    if saved is not None:  # a copy: an optimizer counts on in the steps that it is given
        saved = copy.deepcopy(saved)
        dcp.set_state_dict(model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
    for step in range(2 if saved is not None else 0, STEPS + 1):
        if step == 2 and saved is None:
            saved = copy.deepcopy(dcp.get_state_dict(model, optimizer))
        drawn = torch.Generator().manual_seed(2 * step + dist.get_rank())
        model(torch.randn(ROWS, HIDDEN, generator=drawn)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return {name: each.to_local().clone() for name, each in model.named_parameters()}, saved


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
