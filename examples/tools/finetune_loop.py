"""A loop as torchtune writes it: loss compiled with the model, accumulation, clipping, a schedule.

    python examples/tools/finetune_loop.py

The compiled function returns nothing but the loss, so that logits never exist as a whole.
"""

import torch
from beside_eager import batches, compare, small_llama
from torch import Tensor

ACCUMULATED = 2


def loss_of(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """The mean loss of a batch; what else the model returns goes at once."""
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def train(with_memo: bool) -> list[float]:
    """The losses of the micro-batches of three updates."""
    model, step = small_llama(), loss_of
    if with_memo:
        options = {"memory_budget": "2.6MiB", "gradients": "accumulated"}
        step = torch.compile(loss_of, backend="memo", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 1.0 / (1 + at))
    losses = []
    for number, ids in enumerate(batches(3 * ACCUMULATED, tokens=64), start=1):
        loss = step(model, ids) / ACCUMULATED
        loss.backward()
        losses.append(float(loss.detach()) * ACCUMULATED)
        if number % ACCUMULATED == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
    return losses


if __name__ == "__main__":
    compare(train)
