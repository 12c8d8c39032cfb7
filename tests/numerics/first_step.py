"""Prints the first steps of this process as JSON: run by ``test_first_step`` in one of its own.

No region was timed before, so the library that computes products has not made its buffers.
"""

import contextlib
import json
from typing import Any
from unittest import mock

import torch
from memo_runtime.arena import arena_of
from torch import nn
from torch.nn import functional

import memo_compile
from memo_compile.costs.measure import MemoryWatch, watch_memory
from memo_compile.driver import assemble

ROWS, HIDDEN, VOCABULARY = 1024, 384, 8192
OPTIONS = {
    "lowering": "aten",
    "strict": True,
    "costs": "roofline",
    "memory_budget": "1GiB",
    "optimizer_state_bytes_per_parameter": 0,
}


class WideHead(nn.Module):
    """Each product needs a larger buffer than those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(3 * HIDDEN, HIDDEN))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.layers(x)), y)


def main() -> None:
    """Two steps: what each added to what was held when its planned forward began."""
    torch.set_num_threads(1)
    model = WideHead()
    x, y = torch.randn(ROWS, HIDDEN), torch.randint(VOCABULARY, (ROWS,))
    held_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), x, y))
    compiled = torch.compile(model, backend="memo", options=OPTIONS)

    def step() -> dict[str, int]:
        model.zero_grad(set_to_none=True)
        with contextlib.ExitStack() as stack:
            watches = watches_of(stack)
            compiled(x, y).backward()
        plan = memo_compile.report().plans[-1]
        return {
            "before_bytes": watches[0].baseline_bytes,
            "grown_bytes": watches[0].growth_bytes,
            "planned_bytes": plan.peak_bytes - held_bytes,
        }

    print(json.dumps([step() for _ in range(2)]))


def watches_of(stack: contextlib.ExitStack) -> list[MemoryWatch]:
    """Filled when the first planned forward begins, until ``stack`` closes."""
    watches: list[MemoryWatch] = []
    run_forward = assemble.run_forward

    def watched(*args: Any) -> Any:
        if not watches:
            arena_of(torch.device("cpu")).release_pages()
            watches.append(stack.enter_context(watch_memory()))
        return run_forward(*args)

    stack.enter_context(mock.patch.object(assemble, "run_forward", watched))
    return watches


if __name__ == "__main__":
    main()
