"""transformers' Llama, parallel by its own plan (``tp_plan="auto"``), under memo and in eager."""

from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import memo_compile
from memo_compile.reporting import state
from tests.distributed.llama import gradient_errors

VOCABULARY = 96


def main(*, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each setting's training gives, one after the other in the same processes."""
    return [trained(**setting) for setting in settings]


def llama() -> LlamaForCausalLM:
    """The same weights on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=max(2, dist.get_world_size()),
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config).double()


def parallel(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """What ``from_pretrained`` does with the model's plan, which needs accelerate for the rest."""
    given = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    config, _, mesh = type(model).prepare_distribute_model(given)
    return type(model).maybe_distribute_model(model, config, mesh)


def trained(**options: Any) -> dict[str, Any]:
    """Two fresh steps and one accumulated; the errors after each."""
    torch._dynamo.reset()
    state.reset()
    ours, eager = parallel(llama()), llama()
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
