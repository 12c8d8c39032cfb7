"""``memo_compile.group``: blocks that are compiled one by one, and planned together."""

from collections.abc import Iterable
from typing import Any

import torch

from memo_compile.config import resolve
from memo_compile.driver.declared import declare
from memo_compile.errors import ConfigError


def group(
    modules: Iterable[torch.nn.Module], *, memory_budget: int | str | None = None, **options: Any
) -> None:
    """Compiles every module in place; all of them are planned as one step, from the first one on.

    ``modules`` are the repeated blocks of a model in the order in which a step calls them:
    ``memo_compile.group(model.layers, memory_budget="40GiB")``. They must be compiled to one graph,
    as blocks of one class are. ``memory_budget`` bounds the whole step; ``options`` are those of
    ``torch.compile(..., backend="memo", options=...)``.

    Raises ConfigError: an option is unknown or cannot be used, or there are fewer than two modules.
    """
    blocks = tuple(modules)
    if len(blocks) < 2:
        raise ConfigError(f"group: expected at least 2 modules, got {len(blocks)}")
    for block in blocks:
        if not isinstance(block, torch.nn.Module):
            raise ConfigError(f"group: expected modules, got {type(block).__name__}")
    if memory_budget is not None:
        options["memory_budget"] = memory_budget
    resolve(options, None)  # which refuses before anything is compiled
    declare(blocks)
    for block in blocks:
        block.compile(backend="memo", options=dict(options))
