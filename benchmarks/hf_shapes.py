"""Unmodified transformers models at published sizes, on fakes, for ``memo plan MODULE:FUNCTION``.

Each function gives a model that returns its loss alone, and its inputs.
"""

from typing import Any

import torch
from torch import nn


class _LossAlone(nn.Module):
    """The logits are no result of the step, so that they need not exist at once."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(**inputs).loss
        return loss


def gemma_7b(seq: int, batch: int, dtype: torch.dtype) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Gemma 7B: 28 layers, heads wider than the hidden size, a vocabulary of 256,000."""
    from transformers import GemmaConfig

    return causal(GemmaConfig(), seq, batch, dtype)


def mixtral_8x7b(
    seq: int, batch: int, dtype: torch.dtype
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The shape of Mixtral 8x7B with 4 layers, whose parameters and states fit on one device.

    Two of eight experts see each token.
    """
    from transformers import MixtralConfig

    config = MixtralConfig(num_hidden_layers=4, experts_implementation="grouped_mm")
    return causal(config, seq, batch, dtype)


def causal(
    config: Any, seq: int, batch: int, dtype: torch.dtype
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model of ``config`` that trains, and its inputs."""
    from transformers import AutoModelForCausalLM

    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    ids = torch.ones(batch, seq, dtype=torch.long)
    return _LossAlone(model.train()), {"input_ids": ids, "labels": ids}
