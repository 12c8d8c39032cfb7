"""Lightning's ``Trainer.fit`` with a module inside that is compiled.

python examples/tools/lightning_fit.py [--offload]

With ``--offload`` optimizer state and gradients lie on the host, where parameters are updated.
"""

import sys

import lightning
import torch
from beside_eager import compare, sentences, small_llama
from torch import Tensor
from torch.utils.data import DataLoader

import memo_compile


class LanguageModel(lightning.LightningModule):
    """A Llama with its loss."""

    def __init__(self, *, with_memo: bool) -> None:
        super().__init__()
        self.model = small_llama()
        self.losses: list[float] = []
        self.offloads = with_memo and "--offload" in sys.argv
        if with_memo:
            self.model.compile(backend="memo", options={"memory_budget": "2.6MiB"})

    def training_step(self, ids: Tensor, _index: int) -> Tensor:
        """The loss of a batch."""
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW of all parameters."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return memo_compile.offload(optimizer, update="host") if self.offloads else optimizer


def train(with_memo: bool) -> list[float]:
    """The losses of four updates."""
    module = LanguageModel(with_memo=with_memo)
    loader = DataLoader([torch.tensor(row) for row in sentences(8, 64)], batch_size=2)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
    )
    trainer.fit(module, loader)
    return module.losses


if __name__ == "__main__":
    compare(train)
