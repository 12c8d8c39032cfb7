"""A preference loss (DPO's) in plain PyTorch: two forwards of one compiled policy are live at once.

    python examples/tools/preference_loss.py

``max_inflight=2`` plans both together. Without it the second one is refused under a budget, and
runs in ordinary memory without.
"""

import torch
from beside_eager import batches, compare, small_llama
from torch import Tensor
from torch.nn import functional

BETA = 0.1


def answer_logp(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """Log-probability of each sequence ``(B, T)``."""
    logits = model(input_ids=ids).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).sum((1, 2))


def train(with_memo: bool) -> list[float]:
    """The losses of four updates."""
    policy, reference = small_llama(), small_llama(seed=1).requires_grad_(False)
    logp = answer_logp
    if with_memo:
        options = {"max_inflight": 2, "memory_budget": "2.1MiB"}
        logp = torch.compile(answer_logp, backend="memo", options=options)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    losses = []
    for ids in batches(4, size=4, tokens=16):
        chosen, rejected = ids[:2], ids[2:]
        with torch.no_grad():
            margin = answer_logp(reference, chosen) - answer_logp(reference, rejected)
        better = logp(policy, chosen) - logp(policy, rejected) - margin
        loss = -functional.logsigmoid(BETA * better).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


if __name__ == "__main__":
    compare(train)
