"""TRL's DPOTrainer: the policy's loss beside a reference model's, which is only evaluated.

    python examples/tools/dpo.py

The policy is compiled before; ``max_inflight`` is there for losses that keep two forwards of one
graph alive (here the trainer runs the chosen and the rejected answers in one).
"""

import tempfile

import torch
from beside_eager import as_text, compare, sentences, small_llama, small_tokenizer
from datasets import Dataset
from trl import DPOConfig, DPOTrainer


def train(with_memo: bool) -> list[float]:
    """The losses of three updates."""
    policy, reference = small_llama(), small_llama(seed=1)
    if with_memo:
        policy.compile(backend="memo", options={"memory_budget": "8MiB"})
    torch.manual_seed(0)
    parts = ("prompt", "chosen", "rejected")
    rows = [
        dict(zip(parts, map(as_text, sentences(3, 8, seed=seed)), strict=True)) for seed in range(8)
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = DPOConfig(
            output_dir=folder,
            max_steps=3,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        )
        trainer = DPOTrainer(
            model=policy,
            ref_model=reference,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=small_tokenizer(),
        )
        trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    compare(train)
