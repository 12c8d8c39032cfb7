"""Whether a graph is first tried whole or in tiles of tokens.

Tracing and planning a large model takes most of a minute, and is done again when the first try
does not fit: where it can be told before, the try that will fit comes first.
"""

import operator

import torch
from torch import fx

from memo_compile.config import MemoConfig
from memo_compile.driver.facts import GraphFacts

TOKEN_TILES = 8
"""Where tiles are wanted: an eighth of the widest tensors is below a layer's other transients."""

REST = 0.1
"""Of the budget: the layers need that much beside parameters and logits."""

_PRODUCTS = (
    torch.nn.functional.linear,
    torch.matmul,
    torch.mm,
    torch.addmm,
    operator.matmul,
    "matmul",
    "mm",
)
"""What makes the widest activations, as it stands in a Dynamo graph."""


def tile_order(
    gm: fx.GraphModule, facts: GraphFacts, config: MemoConfig, device_bytes: int | None
) -> tuple[int, int]:
    """Numbers of tiles (1: whole), the more promising first, for a Dynamo graph under a budget.

    The loss head's logits and their gradient exist at one time when they are not in tiles. That
    alone with parameters, gradients and optimizer state may be more than the budget. It is an
    estimate: a step that would just have fitted whole may run in tiles, which is a little slower.
    """
    budget = config.budget_bytes(device_bytes)
    least = facts.constant_bytes(config.optimizer_state_bytes_per_parameter)
    if budget is not None and least + 2 * _widest_bytes(gm) > budget * (1 - REST):
        return TOKEN_TILES, 1
    return 1, TOKEN_TILES


def _widest_bytes(gm: fx.GraphModule) -> int:
    """Bytes of the largest result of a product in ``gm``."""
    sizes = [0]
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if node.target in _PRODUCTS and isinstance(value, torch.Tensor):
            if all(isinstance(size, int) for size in value.shape):
                sizes.append(value.numel() * value.element_size())
    return max(sizes)
