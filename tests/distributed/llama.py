"""A small Llama whose layers are parallel over the ranks, under memo and in eager execution."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from memo_runtime.leases import leases
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.utils import parametrize

import memo_compile
from memo_compile.reporting import state
from tests.numerics.small import leased_slabs, watched_calls

HIDDEN, HEADS, WIDE, VOCABULARY, LAYERS = 32, 4, 64, 96, 2


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (HIDDEN,), self.weight)


class Core(nn.Module):
    """Attention itself, between the projections."""

    def __init__(self, *, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = Core()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            linear(x).view(batch, tokens, -1, HIDDEN // HEADS).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        y = self.core(q, k, v)
        return self.o(y.transpose(1, 2).reshape(batch, tokens, -1))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, WIDE, bias=False)
        self.up = nn.Linear(HIDDEN, WIDE, bias=False)
        self.down = nn.Linear(WIDE, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = Norm(), Attention()
        self.norm2, self.mlp = Norm(), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, num_layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.norm = Norm()
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def parallelize(model: Llama, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Tensor parallel layers; with ``sequence`` the tokens between them are split as well."""
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan: dict[str, Any] = {
        **{f"attention.{name}": columns for name in "qkv"},
        **{"mlp.gate": columns, "mlp.up": columns, "attention.o": rows, "mlp.down": rows},
    }
    if sequence:
        gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        scatter = RowwiseParallel(output_layouts=Shard(1))
        plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
        plan |= {"attention": gather, "mlp": gather, "attention.o": scatter, "mlp.down": scatter}
    for block in model.layers:
        parallelize_module(block, mesh, plan)
    if sequence:
        outer = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, outer)


class Whole(nn.Module):
    """A sharded parameter where it is used: converted, gathered, its gradient summed."""

    def forward(self, shard: torch.Tensor) -> torch.Tensor:
        whole = shard.to(torch.float64).redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial()])


def shard(model: Llama, mesh: DeviceMesh) -> None:
    """Every rank has rows of each parameter, in float32; the model itself gathers them."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            rows = distribute_tensor(parameter.detach().float(), mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(rows))
            parametrize.register_parametrization(module, name, Whole(), unsafe=True)


def gradient_errors(ours: nn.Module, eager: nn.Module) -> dict[str, float]:
    """Each parameter's largest error, relative to the largest of its own gradient."""
    errors = {}
    of_eager = dict(eager.named_parameters())
    for name, mine in ours.named_parameters():
        theirs = of_eager[name.replace("parametrizations.", "").replace(".original", "")]
        found = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
        errors[name] = float((found - theirs.grad).abs().max() / theirs.grad.abs().max())
    return errors


def main(*, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each setting's training gives, one after the other in the same processes."""
    return [trained(**setting) for setting in settings]


def trained(
    *,
    sequence: bool = False,
    shards: bool = False,
    num_layers: int = LAYERS,
    fails: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Two fresh steps and one accumulated, with memo's ``options``; the errors after each.

    Where it ``fails``, steps that raise at each of their calls come before the last one. In
    float64, so that sums in another order differ by little.
    """
    torch._dynamo.reset()
    state.reset()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    ours = Llama(num_layers).double()
    eager = copy.deepcopy(ours)
    if shards:  # every rank has all rows of the batch: its loss counts as often as there are ranks
        eager.load_state_dict({name: own.float() for name, own in ours.state_dict().items()})
        shard(ours, mesh)
    else:
        parallelize(ours, mesh, sequence=sequence)
    scale = 1 / dist.get_world_size() if shards else 1.0
    given = {"strict": True, **options}
    compiled = torch.compile(ours, backend="memo", fullgraph=True, options=given)
    ids = torch.randint(VOCABULARY, (3, 2, 16), generator=torch.Generator().manual_seed(3))
    errors, num_failed = [], 0
    for step, batch in enumerate(ids):
        if step == 2 and fails:
            kept = {parameter: parameter.grad.clone() for parameter in ours.parameters()}
            num_failed = fail_everywhere(compiled, batch)
            for parameter, gradient in kept.items():
                parameter.grad = gradient
        if step < 2:
            ours.zero_grad()
            eager.zero_grad()
        compiled(batch).mul(scale).backward()
        eager(batch).backward()
        errors.append(gradient_errors(ours, eager))
    plan = memo_compile.report().plans[-1]
    return {
        **reported(),
        "errors": errors,
        "num_failed": num_failed,
        "num_collectives": plan.num_collectives,
        "window_recompute_s": plan.window_recompute_s,
        "num_regions": plan.num_regions,
        "tiles": max(plan.tiles.values(), default=1),
    }


def reported() -> dict[str, Any]:
    """Whether memo has planned all steps, what it notes, and the collectives not waited for."""
    report = memo_compile.report()
    return {
        "active": report.active,
        "unplanned_steps": report.unplanned_steps,
        "notes": list(report.notes),
        "num_unwaited": torch._C._distributed_c10d._get_work_registry_size(),
    }


def fail_everywhere(compiled: Any, batch: torch.Tensor) -> int:
    """How many calls a step has; at each of them a step has raised on all ranks, and is gone."""
    with pytest.MonkeyPatch.context() as patch:
        calls = watched_calls(patch)
        compiled(batch).backward()
        total = calls.count
        for number in range(total):
            calls.count, calls.fail_at = 0, number
            with pytest.raises(ValueError, match="injected"):
                compiled(batch).backward()
            assert not leases.any_live(), f"a lease is left after call {number}"
            assert leased_slabs() == 0, f"a frame is left after call {number}"
    return total
