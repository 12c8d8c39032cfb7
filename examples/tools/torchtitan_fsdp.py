"""torchtitan's own Llama and ``parallelize_llama`` on two ranks: FSDP2, blocks compiled one by one.

python examples/tools/torchtitan_fsdp.py

In torchtitan's configuration memo is ``[compile] enable = true, backend = "memo"``; options come
from ``MEMO_*`` variables or ``memo_compile.configure``. Activation checkpointing is off, since memo
decides what is kept. What a machine without a GPU needs beside that is marked below.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torchtitan.distributed.parallel_dims
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import JobConfig
from torchtitan.models.llama3.infra.parallelize import parallelize_llama
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer

import memo_compile

RANKS, LAYERS, TOKENS, VOCABULARY, STEPS = 2, 4, 64, 256, 4
BUDGET = "24MiB"
"""Of one rank, from the second step on: it bounds all blocks, and what runs between them."""
TOLERANCE = 1e-4


def configured(backend: str) -> JobConfig:
    """What a ``.toml`` file of torchtitan says."""
    config = JobConfig()
    config.training.seq_len = TOKENS
    config.training.mixed_precision_param = "float32"
    config.activation_checkpoint.mode = "none"
    config.compile.enable = backend != "eager"
    config.compile.components = ["model"]
    config.compile.backend = backend
    return config


def parallel_llama(backend: str) -> nn.Module:
    """The model over all ranks."""
    torch.manual_seed(0)
    sizes = {"dim": 64, "n_layers": LAYERS, "n_heads": 4, "multiple_of": 32}
    model = Transformer(TransformerModelArgs(vocab_size=VOCABULARY, max_seq_len=TOKENS, **sizes))
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    torchtitan.distributed.parallel_dims.device_type = "cpu"  # it takes CUDA where there is no GPU
    dims = torchtitan.distributed.parallel_dims.ParallelDims(
        dp_replicate=1, dp_shard=RANKS, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=RANKS
    )
    parallelize_llama(model, dims, configured(backend))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo sums, and scales nothing
    return model


def train(backend: str) -> list[float]:
    """This rank's losses."""
    model = parallel_llama(backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        numbers = torch.Generator().manual_seed(RANKS * step + dist.get_rank())
        ids = torch.randint(VOCABULARY, (4, TOKENS + 1), generator=numbers)
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def run(rank: int, folder: str) -> None:
    """One rank: without memo, with it, and what came of that; raises where memo failed."""
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=RANKS)
    memo_compile.configure(memory_budget=BUDGET, optimizer_state_bytes_per_parameter=8)
    eager, ours = train("eager"), train("memo")
    worst = max(abs(a - b) / abs(a) for a, b in zip(eager, ours, strict=True))
    report = memo_compile.report()
    (group,) = report.groups
    assert worst <= TOLERANCE, (eager, ours)
    assert report.active
    assert report.unplanned_steps < LAYERS, "only the first step learns which blocks are a group"
    assert group.num_instances == LAYERS
    assert group.peak_bytes <= group.budget_bytes
    if rank == 0:
        print(f"losses: {' '.join(f'{loss:.4f}' for loss in ours)}")
        print(f"{STEPS} losses within {worst:.1e} of eager's")
        print(f"{LAYERS} blocks: peak {group.peak_bytes:,} B, budget {group.budget_bytes:,} B")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        torch.multiprocessing.spawn(run, (str(Path(made)),), nprocs=RANKS)
    sys.exit(0)
