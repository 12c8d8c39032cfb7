"""LoRA with PEFT: only the adapters train, and their optimizer state is all that counts.

python examples/tools/lora.py
"""

import torch
from beside_eager import batches, compare, small_llama
from peft import LoraConfig, get_peft_model


def train(with_memo: bool) -> list[float]:
    """The losses of four updates of the adapters."""
    torch.manual_seed(0)
    wanted = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = get_peft_model(small_llama(), wanted)
    if with_memo:
        model.compile(backend="memo", options={"memory_budget": "1.4MiB"})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for ids in batches(4, tokens=64):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


if __name__ == "__main__":
    compare(train)
