"""A graph is tried whole and in tiles, until it fits.

Tracing and planning a large model takes most of a minute, and every further try as much again. So
the try that will fit comes first, where that can be told before (``tile_order``).
"""

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import fx

from memo_compile.analysis.row_rules import is_attention
from memo_compile.config import MemoConfig
from memo_compile.driver.assumed import BlockInfeasible
from memo_compile.driver.facts import GraphFacts
from memo_compile.driver.left_whole import refused
from memo_compile.driver.tile_order import (
    Sizes,
    Tiles,
    first_of,
    order_of,
    where_weights_fit,
)
from memo_compile.errors import ConfigError, NumberNeeded
from memo_compile.torch_private import dynamo

T = TypeVar("T")

_PRODUCTS = (
    torch.nn.functional.linear,
    torch.matmul,
    torch.mm,
    torch.addmm,
    operator.matmul,
    "matmul",
    "mm",
    torch.ops.aten.linear.default,
    torch.ops.aten.matmul.default,
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
)
"""Calls in a Dynamo graph that make the widest activations; operators of ATen where the model was
exported before (a stage of torch's ``pipeline()``)."""


Attempt = Callable[[fx.GraphModule, MemoConfig], T]
"""Plans a Dynamo graph, which stays as it is, under options that name a number of tiles."""


def first_that_fits(
    gm: fx.GraphModule,
    facts: GraphFacts,
    config: MemoConfig,
    attempt: Attempt[T],
    device_bytes: int | None = None,
) -> T:
    """Returns what ``attempt`` makes of ``gm`` in the first tiles for which it does not fail.

    After a TooSlow the other tiles are tried; if all are slow, the fastest plan is taken. Where all
    fail, the error that tells most is raised. ``device_bytes`` is the memory of another device than
    the one that the tensors lie on.
    """

    def first(options: MemoConfig) -> T:
        """Tries the tiles in turn, with weights where ``options`` say."""
        if options.exact:
            return attempt(gm, replace(options, token_tiles=1))
        if options.token_tiles is not None and options.saved_dtype == "same":
            return attempt(gm, options)
        order = tile_order(gm, facts, options, device_bytes or facts.device_bytes())
        return first_of(order, options, lambda tiled: attempt(gm, tiled), ends_planning)

    try:
        return where_weights_fit(config, first)
    except BlockInfeasible as error:
        raise error.of_all() from None


def ends_planning(error: Exception) -> bool:
    """True for an error that no other plan mends: a wrong option, or torch is out of memory.

    The last two end it too, which are no errors: the graph is to be traced again.
    """
    if isinstance(error, refused()):
        return False
    ends = ConfigError | torch.OutOfMemoryError | dynamo.RestartAnalysis | NumberNeeded
    return isinstance(error, ends)


def tile_order(
    gm: fx.GraphModule, facts: GraphFacts, config: MemoConfig, device_bytes: int | None
) -> tuple[Tiles, ...]:
    """Returns the tiles to try, the more promising first, for a Dynamo graph under a budget."""
    sizes = sizes_of(gm, facts, config)
    return order_of(sizes, config, config.budget_bytes(device_bytes))


def sizes_of(gm: fx.GraphModule, facts: GraphFacts, config: MemoConfig) -> Sizes:
    """Returns what the order of tiles is made of, for a Dynamo graph."""
    # At least two entries.
    widest, second, *_ = sorted({0, -1, *products_bytes(gm)}, reverse=True)
    constant_bytes = facts.constant_bytes(config.optimizer_state_bytes_per_parameter)
    if config.weights != "device":  # but for embeddings and heads
        constant_bytes -= facts.parameter_bytes
    graphs = (part.graph for part in gm.modules() if isinstance(part, fx.GraphModule))
    has_attention = any(
        node.target is torch.nn.functional.scaled_dot_product_attention or is_attention(node)
        for graph in graphs
        for node in graph.nodes
    )
    return Sizes((widest, second), constant_bytes, has_attention)


def products_bytes(gm: fx.GraphModule) -> tuple[int, ...]:
    """Returns the bytes of the results of products in ``gm``, in its order."""
    values = (node.meta.get("example_value") for node in gm.graph.nodes if node.target in _PRODUCTS)
    return tuple(
        value.numel() * value.element_size()
        for value in values
        if isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)
    )
