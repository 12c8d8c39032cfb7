"""What every example here does with its training run: once eagerly, once with memo, and compare.

Not a recipe: those are the other files of this folder. Models are small, made from configurations
in code, and nothing is downloaded.
"""

import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import memo_compile

TOLERANCE = 1e-4
"""Relative difference of two losses: rounding, amplified by a few optimizer steps."""
HALF_TOLERANCE = 2e-2
"""The same where products are in bfloat16."""
VOCABULARY = 128


def compare(
    train: Callable[[bool], Sequence[float]], *, tolerance: float = TOLERANCE, num_plans: int = 1
) -> None:
    """``train`` gives the losses of a run, without memo and with it; exit 1 where memo failed.

    It fails where losses differ by more than ``tolerance``, where fewer than ``num_plans`` plans
    stand or a step ran without one, and where a plan breaks its budget.
    """
    eager, ours = list(train(False)), list(train(True))
    report = memo_compile.report()
    worst = max(abs(a - b) / max(abs(a), 1e-6) for a, b in zip(eager, ours, strict=True))
    print(f"losses: {' '.join(f'{loss:.4f}' for loss in ours)}")
    print(f"{len(ours)} losses within {worst:.1e} of eager's")
    for plan in report.plans:
        bound = "no budget" if plan.budget_bytes is None else f"budget {plan.budget_bytes:,} B"
        print(f"{plan.name}: peak {plan.peak_bytes:,} B, {bound}, policy {plan.policy}")
    faults = [
        *([f"losses differ by {worst:.1e}: {eager}, {ours}"] if not worst <= tolerance else []),
        *([f"memo is not active: {report.notes}"] if not report.active else []),
        *([f"{report.unplanned_steps} steps without a plan"] if report.unplanned_steps else []),
        *([f"{len(report.plans)} plans"] if len(report.plans) < num_plans else []),
        *(
            f"{plan.name} breaks its budget"
            for plan in report.plans
            if plan.budget_bytes is not None and plan.peak_bytes > plan.budget_bytes
        ),
    ]
    for fault in faults:
        print(f"FAULT: {fault}")
    sys.exit(1 if faults else 0)


def small_llama(seed: int = 0, num_layers: int = 2) -> LlamaForCausalLM:
    """A Llama of 64 channels, the same for the same seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def sentences(count: int, tokens: int = 32, seed: int = 0) -> list[list[int]]:
    """``count`` sequences of ``tokens`` numbers; none is padding."""
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (count, tokens), generator=numbers).tolist()


def batches(count: int, size: int = 2, tokens: int = 32) -> Iterator[Tensor]:
    """``count`` batches of token numbers, the same in every call."""
    for number in range(count):
        yield torch.tensor(sentences(size, tokens, seed=number))


def small_tokenizer() -> PreTrainedTokenizerFast:
    """One word for each number of the vocabulary, as tools want a tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {"<pad>": 0, "<eos>": 1} | {f"w{n}": n for n in range(2, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<eos>"
    )


def as_text(numbers: Sequence[int]) -> str:
    """The words of a sequence."""
    return " ".join(f"w{number}" for number in numbers)
