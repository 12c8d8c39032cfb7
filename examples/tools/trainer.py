"""transformers' Trainer with memo: by the backend's name, or compiled before.

    python examples/tools/trainer.py [--spelling name|compiled] [--bf16] [--offload]

Two micro-batches are accumulated for each update, sequences of two lengths are padded to a
multiple, the model is evaluated and saved on the way, and memo's numbers are in the Trainer's logs.
With ``--offload`` optimizer state and gradients lie on the host, where parameters are updated.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from beside_eager import HALF_TOLERANCE, TOLERANCE, compare, sentences, small_llama
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from transformers.data.data_collator import DataCollatorForLanguageModeling

import memo_compile
import memo_compile.huggingface

BUDGET = "2.6MiB"
"""Below what the step takes without a budget, 2.73 MiB: something has to move."""


def main() -> None:
    """Compare the losses of both runs, evaluation included."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spelling", choices=("name", "compiled"), default="name")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--offload", action="store_true")
    wanted = parser.parse_args()
    tolerance = HALF_TOLERANCE if wanted.bf16 else TOLERANCE
    compare(
        lambda with_memo: train(with_memo, wanted.spelling, bf16=wanted.bf16), tolerance=tolerance
    )


def train(with_memo: bool, spelling: str, *, bf16: bool) -> list[float]:
    """The losses of eight updates, and of two evaluations."""
    model = small_llama()
    named: dict[str, object] = {}
    if with_memo and spelling == "name":
        enabled = memo_compile.huggingface.enable(memory_budget=BUDGET, gradients="accumulated")
        print(enabled)
        named = {"torch_compile": True, "torch_compile_backend": "memo"}
    elif with_memo:
        options = {"memory_budget": BUDGET, "gradients": "accumulated"}
        model.compile(backend="memo", options=options)
    optimizer = _optimizer(model, offloads=with_memo) if "--offload" in sys.argv else None
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=2,
            save_steps=2,
            bf16=bf16,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            **named,
        )
        rows = [{"input_ids": row} for row in (*sentences(16, 28), *sentences(16, 60))]
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=rows,
            eval_dataset=rows[:4],
            data_collator=_collator(),
            optimizers=(optimizer, None),
        )
        memo_compile.huggingface.log_metrics(trainer)
        trainer.train()
        saved = LlamaForCausalLM.from_pretrained(Path(folder) / "checkpoint-4")
        assert sum(p.sum() for p in saved.parameters()) == sum(p.sum() for p in model.parameters())
    if with_memo:
        assert all(
            "memo/planned_peak_bytes" in row for row in trainer.state.log_history if "loss" in row
        )
    names = ("loss", "eval_loss")
    return [row[name] for row in trainer.state.log_history for name in names if name in row]


def _optimizer(model: LlamaForCausalLM, *, offloads: bool) -> torch.optim.Optimizer:
    """AdamW in place of the Trainer's own."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return memo_compile.offload(optimizer, update="host") if offloads else optimizer


def _collator() -> DataCollatorForLanguageModeling:
    """Lengths that are multiples of 32, so that there are few shapes to plan for."""
    from beside_eager import small_tokenizer

    return DataCollatorForLanguageModeling(small_tokenizer(), mlm=False, pad_to_multiple_of=32)


if __name__ == "__main__":
    main()
