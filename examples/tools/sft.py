"""TRL's SFTTrainer with memo by its name, bfloat16 and LoRA adapters.

python examples/tools/sft.py
"""

import tempfile

import torch
from beside_eager import HALF_TOLERANCE, as_text, compare, sentences, small_llama, small_tokenizer
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

import memo_compile.huggingface


def train(with_memo: bool) -> list[float]:
    """The losses of three updates."""
    named: dict[str, object] = {}
    if with_memo:
        memo_compile.huggingface.enable(memory_budget="8MiB")
        named = {"torch_compile": True, "torch_compile_backend": "memo"}
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            max_steps=3,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            bf16=True,
            use_cpu=True,
            gradient_checkpointing=False,
            disable_tqdm=True,
            max_length=32,
            **named,
        )
        trainer = SFTTrainer(
            model=small_llama(),
            args=arguments,
            train_dataset=Dataset.from_dict({"text": [as_text(row) for row in sentences(8, 40)]}),
            processing_class=small_tokenizer(),
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0),
        )
        trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    compare(train, tolerance=HALF_TOLERANCE)
