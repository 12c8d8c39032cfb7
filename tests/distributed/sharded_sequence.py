"""FSDP2 shards the weights over all ranks, and groups of them share each sequence by Ulysses."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memo_compile
from memo_compile.reporting import state
from tests.distributed.llama import VOCABULARY, Llama, gradient_errors, reported
from tests.distributed.one_sequence import Ulysses, lengths_of

NUM_TOKENS, STEPS = 35, 3


def main(*, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each setting's training gives, one after the other in the same processes."""
    return [trained(**setting) for setting in settings]


def trained(*, num_sequences: int, num_layers: int, **options: Any) -> dict[str, Any]:
    """Some steps of blocks compiled each by itself, beside one process; the errors after each."""
    torch._dynamo.reset()
    state.reset()
    torch.manual_seed(0)
    num_parts = dist.get_world_size() // num_sequences
    mesh = init_device_mesh("cpu", (num_sequences, num_parts), mesh_dim_names=("data", "tokens"))
    group, lengths = mesh["tokens"].get_group(), lengths_of(NUM_TOKENS, num_parts)
    ours, alone = Llama(num_layers), Llama(num_layers)
    alone.load_state_dict(ours.state_dict())
    for layer in ours.layers:
        layer.attention.core = Ulysses(lengths, group, causal=True)
        layer.compile(backend="memo", fullgraph=True, options={"strict": True, **options})
    for module in (*ours.layers, ours):
        fully_shard(module)
    errors = []
    for step in range(STEPS):
        drawn = torch.Generator().manual_seed(step)
        ids = torch.randint(VOCABULARY, (num_sequences, NUM_TOKENS), generator=drawn)
        sequence = ids[mesh["data"].get_local_rank()][None]
        mine = sequence.split(lengths, dim=1)[group.rank()].clone()
        ours.zero_grad()
        alone.zero_grad()
        share = lengths[group.rank()] * num_parts / NUM_TOKENS  # FSDP2 takes the ranks' mean
        (ours(mine) * share).backward()
        alone(ids).backward()
        errors.append(gradient_errors(ours, alone))
    (blocks,) = memo_compile.report().groups
    return {
        **reported(),
        "errors": errors,
        "num_instances": blocks.num_instances,
        "num_collectives": blocks.num_collectives,
        "offloaded_bytes": blocks.offloaded_bytes,
    }
