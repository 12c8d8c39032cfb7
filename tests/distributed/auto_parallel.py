"""transformers' Llama, parallel by its own plan (``tp_plan="auto"``), under memo and in eager."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import memo_compile
from memo_compile.reporting import state
from tests.distributed.llama import gradient_errors

VOCABULARY = 96


def main(*, settings: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """What each setting's training gives, one after the other in the same processes."""
    path = Path(folder) / "model"
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
            use_cache=False,
        )
        LlamaForCausalLM(config).double().save_pretrained(path)
    dist.barrier()
    return [trained(path, **setting) for setting in settings]


def trained(path: Path, **options: Any) -> dict[str, Any]:
    """Two fresh steps and one accumulated; the errors after each."""
    torch._dynamo.reset()
    state.reset()
    tensor_parallel = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    ours = LlamaForCausalLM.from_pretrained(
        path, dtype=torch.float64, distributed_config=tensor_parallel
    )
    eager = LlamaForCausalLM.from_pretrained(path, dtype=torch.float64)
    compiled = torch.compile(ours, backend="memo", options={"strict": True, **options})
    ids = torch.randint(VOCABULARY, (3, 2, 16), generator=torch.Generator().manual_seed(3))
    errors = []
    for step, batch in enumerate(ids):
        if step < 2:
            ours.zero_grad()
            eager.zero_grad()
        compiled(input_ids=batch, labels=batch).loss.backward()
        eager(input_ids=batch, labels=batch).loss.backward()
        errors.append(gradient_errors(ours, eager))
    report = memo_compile.report()
    return {
        "errors": errors,
        "num_collectives": report.plans[-1].num_collectives,
        "active": report.active,
        "unplanned_steps": report.unplanned_steps,
        "notes": list(report.notes),
        "num_unwaited": torch._C._distributed_c10d._get_work_registry_size(),
    }
