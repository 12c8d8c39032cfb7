"""Trains a Llama of eight layers and prints as JSON what its steps took: for ``test_whole_step``.

In a process of its own, since what is measured is the process's memory.
"""

import contextlib
import dataclasses
import gc
import json
import sys
from pathlib import Path

import pytest
import torch
from memo_runtime.host_tensors import place_of

import memo_compile
from memo_compile.errors import Infeasible
from tests.numerics.first_step import watches_of

VOCABULARY, TOKENS = 2000, 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """How the model is trained."""

    hidden: int = 512
    steps: int = 20
    microbatches: int = 4
    update: str | None = None
    """None: the plain optimizer."""
    weights: str = "device"
    over_floor: float | None = None
    """The budget, as a multiple of the smallest; None: no budget."""
    resumes: bool = False
    """Begins in the middle, with what the whole training has saved there."""


def main() -> None:
    """Arguments: a folder, ``Training`` as JSON. The last weights are in ``weights.pt`` there."""
    folder, training = Path(sys.argv[1]), Training(**json.loads(sys.argv[2]))
    torch.set_num_threads(1)
    model = llama(training.hidden)
    decayed = [each for each in model.parameters() if each.dim() > 1]
    rest = [each for each in model.parameters() if each.dim() == 1]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-3
    )
    if training.update is not None:
        optimizer = memo_compile.offload(optimizer, update=training.update)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    budget = None
    if training.over_floor is not None:
        budget = int(training.over_floor * floor_bytes(model, training))
    run = compiled(model, training, budget)
    middle, losses, peaks = training.steps // 2, [], []
    if training.resumes:
        saved = torch.load(folder / "middle.pt")
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for step in range(middle if training.resumes else 0, training.steps):
        if step == middle and not training.resumes:
            saved = {name: part.state_dict() for name, part in parts.items()}
            torch.save(saved, folder / "middle.pt")
            del saved
        gc.collect()
        with contextlib.ExitStack() as stack:
            watches = watches_of(stack)
            for part in range(training.microbatches):
                ids = tokens(step * training.microbatches + part)
                loss = run(input_ids=ids, labels=ids).loss
                loss.backward()
                losses.append(loss.item())
                del loss
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        held = sum(each.nbytes for each in model.parameters() if place_of(each) is None)
        peaks.append(held + ids.nbytes + watches[0].growth_bytes)
    torch.save(model.state_dict(), folder / "weights.pt")
    (plan,) = memo_compile.report().plans[-1:]
    state = dataclasses.asdict(plan.training_state)
    print(
        json.dumps(
            {
                **{"losses": losses, "peaks": peaks, "budget": budget, "state": state},
                **{"planned": plan.peak_bytes, "unplanned": memo_compile.report().unplanned_steps},
            }
        )
    )


def llama(hidden: int) -> torch.nn.Module:
    """Eight layers in float32, 97 MiB with the default width."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden,
            intermediate_size=hidden * 43 // 16,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=VOCABULARY,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )


def compiled(model: torch.nn.Module, training: Training, budget: int | None) -> torch.nn.Module:
    """``exact``, so that numbers are the same to the last bit whatever the budget."""
    torch._dynamo.reset()
    options = {"lowering": "aten", "strict": True, "costs": "roofline", "exact": True}
    options |= {"weights": training.weights, "memory_budget": budget}
    return torch.compile(model, backend="memo", options=options)


def floor_bytes(model: torch.nn.Module, training: Training) -> int:
    """The smallest budget for which there is a plan, also where gradients add up."""
    ids = tokens(0)
    if training.update == "device":
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(Infeasible) as refused:
        compiled(model, training, 1)(input_ids=ids, labels=ids)
    model.zero_grad()
    assert refused.value.floor_bytes is not None
    return refused.value.floor_bytes


def tokens(seed: int) -> torch.Tensor:
    """One sequence."""
    return torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(seed))


if __name__ == "__main__":
    main()
