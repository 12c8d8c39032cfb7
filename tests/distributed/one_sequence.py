"""One sequence split over the ranks: attention by Ulysses or as a ring, beside one process."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

import memo_compile
from memo_compile.backends.entry import large_blocks_leave_the_heap
from memo_compile.errors import MemoError
from memo_compile.reporting import state
from tests.distributed.llama import (
    LAYERS,
    VOCABULARY,
    Core,
    Llama,
    gradient_errors,
    parallelize,
    reported,
)
from tests.numerics.first_step import watches_of


def lengths_of(num_tokens: int, num_ranks: int) -> list[int]:
    """The tokens of each rank: as equal as they can be."""
    return [num_tokens // num_ranks + (rank < num_tokens % num_ranks) for rank in range(num_ranks)]


class Ulysses(nn.Module):
    """Attention of a rank's tokens: before and after it all-to-alls swap tokens for heads."""

    def __init__(self, lengths: list[int], group: dist.ProcessGroup, *, causal: bool) -> None:
        super().__init__()
        self.lengths, self.causal, self.group = lengths, causal, group
        self.tokens = lengths[group.rank()]

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = map(self.all_tokens, (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.all_heads(y)

    def all_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """[1, heads, tokens here, width] -> [1, heads here, all tokens, width]."""
        num_ranks, (_, heads, tokens, width) = len(self.lengths), x.shape
        rows = x.view(num_ranks, heads // num_ranks, tokens, width).transpose(1, 2)
        swapped = self.exchange(rows.flatten(0, 1), self.lengths, [tokens] * num_ranks)
        return swapped.transpose(0, 1).unsqueeze(0)

    def all_heads(self, y: torch.Tensor) -> torch.Tensor:
        """[1, heads here, all tokens, width] -> [1, heads, tokens here, width]."""
        num_ranks, tokens = len(self.lengths), self.tokens
        rows = y.squeeze(0).transpose(0, 1)
        swapped = self.exchange(rows, [tokens] * num_ranks, self.lengths)
        heads = swapped.view(num_ranks, tokens, *rows.shape[1:]).transpose(1, 2)
        return heads.reshape(1, -1, tokens, y.shape[-1])

    def exchange(self, rows: torch.Tensor, arriving: list[int], leaving: list[int]) -> torch.Tensor:
        return functional_collectives.all_to_all_single_autograd(
            rows.contiguous(), arriving, leaving, self.group
        )


class Ring(nn.Module):
    """Attention of a rank's queries to all keys and values, which go around all ranks."""

    def __init__(self, lengths: list[int], _: dist.ProcessGroup, *, causal: bool) -> None:
        super().__init__()
        self.lengths, self.causal = lengths, causal

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return RingAttention.apply(q, k, v, self.lengths, self.causal)


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, lengths, causal):
        rank, num_ranks = dist.get_rank(), len(lengths)
        keys_and_values, y, lse = torch.stack((k, v)), None, None
        for step in range(num_ranks):
            owner = (rank - step) % num_ranks
            if step < num_ranks - 1:
                coming = rotated(keys_and_values, owner, lengths)
            if not causal or owner <= rank:
                part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    q, *keys_and_values, 0.0, causal and owner == rank
                )
                part_lse = part_lse.unsqueeze(-1)
                if y is None:
                    y, lse = part, part_lse
                else:
                    y = y - torch.sigmoid(part_lse - lse) * (y - part)
                    lse = torch.logaddexp(lse, part_lse)
            if step < num_ranks - 1:
                keys_and_values = functional_collectives.wait_tensor(coming)
        ctx.save_for_backward(q, k, v, y, lse.squeeze(-1))
        ctx.lengths, ctx.causal = lengths, causal
        return y

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, y, lse = ctx.saved_tensors
        lengths, causal = ctx.lengths, ctx.causal
        rank, num_ranks = dist.get_rank(), len(lengths)
        keys_and_values, of_q = torch.stack((k, v)), torch.zeros_like(q)
        of_both = torch.zeros_like(keys_and_values)
        for step in range(num_ranks):
            owner = (rank - step) % num_ranks
            if step < num_ranks - 1:
                coming = rotated(keys_and_values, owner, lengths)
            if not causal or owner <= rank:
                backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
                to_q, *to_both = backward(
                    gradient, q, *keys_and_values, y, lse, 0.0, causal and owner == rank
                )
                of_q, of_both = of_q + to_q, of_both + torch.stack(to_both)
            of_both = functional_collectives.wait_tensor(rotated(of_both, owner, lengths))
            if step < num_ranks - 1:
                keys_and_values = functional_collectives.wait_tensor(coming)
        return of_q, *of_both, None, None


def rotated(both: torch.Tensor, owner: int, lengths: list[int]) -> torch.Tensor:
    """Sends what is of the tokens of ``owner`` to the next rank; returns what comes, in flight."""
    rank, num_ranks = dist.get_rank(), len(lengths)
    before = (owner - 1) % num_ranks
    leaving, arriving = [0] * num_ranks, [0] * num_ranks
    shape = list(both.shape)
    shape[-2] = lengths[before]
    leaving[(rank + 1) % num_ranks] = both.numel()
    arriving[(rank - 1) % num_ranks] = both.numel() // lengths[owner] * lengths[before]
    flat = both.contiguous().flatten()
    return functional_collectives.all_to_all_single(flat, arriving, leaving, dist.group.WORLD).view(
        shape
    )


KINDS = {"ulysses": Ulysses, "ring": Ring}


def main(*, settings: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What each setting's training gives, one after the other in the same processes."""
    large_blocks_leave_the_heap()
    return [at_budgets(**setting) for setting in settings]


def at_budgets(*, above: Sequence[float] = (), **setting: Any) -> list[dict[str, Any]]:
    """Trains at the rank's floor, and at so many times the floor; or as the setting says."""
    if not above:
        return [trained(**setting)]
    floor_bytes, at_floor = 1, None
    while at_floor is None:
        try:
            at_floor = trained(**setting, memory_budget=floor_bytes)
        except BackendCompilerFailed as failed:  # the other ranks raise as well
            error = failed.inner_exception
            assert isinstance(error, MemoError), error
            floor_bytes = getattr(error, "floor_bytes", None) or floor_bytes
    budgets = [int(times * floor_bytes) for times in above]
    return [at_floor, *(trained(**setting, memory_budget=budget) for budget in budgets)]


def trained(
    *,
    kind: str,
    causal: bool = True,
    num_tokens: int = 35,
    num_layers: int = LAYERS,
    num_tensor: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Two steps of both; the errors and the most memory of each.

    ``num_tensor`` neighbouring ranks have the same tokens, and share each layer's weights.
    """
    torch._dynamo.reset()
    state.reset()
    torch.manual_seed(0)
    num_parts = dist.get_world_size() // num_tensor
    mesh = init_device_mesh("cpu", (num_parts, num_tensor), mesh_dim_names=("tokens", "tensor"))
    group, lengths = mesh["tokens"].get_group(), lengths_of(num_tokens, num_parts)
    rank = group.rank()
    ours, alone = Llama(num_layers), Llama(num_layers)
    alone.load_state_dict(ours.state_dict())
    if num_tensor > 1:
        parallelize(ours, mesh["tensor"], sequence=False)
    for layer in ours.layers:
        layer.attention.core = KINDS[kind](lengths, group, causal=causal)
    for layer in alone.layers:
        layer.attention.core = Core(causal=causal)
    given = {"strict": True, "optimizer_state_bytes_per_parameter": 0, **options}
    compiled = torch.compile(ours, backend="memo", fullgraph=True, options=given)
    errors, peaks, seconds = [], [], []
    for step in range(2):
        drawn = torch.Generator().manual_seed(step)
        ids = torch.randint(VOCABULARY, (1, num_tokens), generator=drawn)
        mine = ids.split(lengths, dim=1)[rank].clone()
        ours.zero_grad()
        alone.zero_grad()
        begin_s = time.perf_counter()
        with ExitStack() as stack:
            watches = watches_of(stack)
            (compiled(mine) * (lengths[rank] / num_tokens)).backward()
        seconds.append(time.perf_counter() - begin_s)
        held_bytes = sum(tensor.nbytes for tensor in (*ours.parameters(), mine))
        peaks.append(held_bytes + watches[0].growth_bytes)
        for parameter in ours.parameters():
            is_part = isinstance(parameter.grad, DTensor)
            dist.all_reduce(parameter.grad.to_local() if is_part else parameter.grad, group=group)
        alone(ids).backward()
        errors.append(gradient_errors(ours, alone))
    plan = memo_compile.report().plans[-1]
    return {
        **reported(),
        "errors": errors,
        "measured_bytes": peaks,
        "seconds": seconds,
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "num_collectives": plan.num_collectives,
        "layers": [cls.num_layers for cls in plan.layer_classes],
    }
