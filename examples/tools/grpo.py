"""TRL's GRPOTrainer: answers are sampled, rewarded, and trained on beside a reference model.

    python examples/tools/grpo.py

The policy is compiled before. Sampling calls it once for each token, with one more each time, and
without gradients: it runs eagerly, so that nothing is compiled for lengths that never train.
"""

import tempfile

import torch
from beside_eager import as_text, compare, sentences, small_llama, small_tokenizer
from datasets import Dataset
from transformers import LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

ANSWER_TOKENS = 8


def reward(completions: list[str], **_: object) -> list[float]:
    """The share of words with even numbers."""
    words = [text.replace("<pad>", "").split() for text in completions]
    return [sum(int(word[1:]) % 2 == 0 for word in row if word[0] == "w") / 8 for row in words]


def samples_eagerly(policy: torch.nn.Module) -> None:
    """``policy.generate`` leaves compiled code alone."""
    generate = policy.generate

    def eagerly(*args: object, **kwargs: object) -> object:
        with torch.compiler.set_stance("force_eager"):
            return generate(*args, **kwargs)

    policy.generate = eagerly


def train(with_memo: bool) -> list[float]:
    """The losses of four updates, two for each batch of answers."""
    with tempfile.TemporaryDirectory() as folder:
        small_llama().save_pretrained(folder)  # from where the trainer loads the reference
        policy = LlamaForCausalLM.from_pretrained(folder)
        if with_memo:
            samples_eagerly(policy)
            policy.compile(backend="memo", options={"memory_budget": "1.75MiB"})
        arguments = GRPOConfig(
            output_dir=folder,
            max_steps=4,
            per_device_train_batch_size=4,
            num_generations=4,
            num_iterations=2,
            beta=0.1,
            max_completion_length=ANSWER_TOKENS,
            generation_kwargs={"min_new_tokens": ANSWER_TOKENS},
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            seed=0,
        )
        trainer = GRPOTrainer(
            model=policy,
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": list(map(as_text, sentences(8, 8)))}),
            processing_class=small_tokenizer(),
        )
        trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    compare(train)
