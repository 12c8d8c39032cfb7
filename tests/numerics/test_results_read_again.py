"""A backward that recomputes from a result of the forward: the user holds it, and may write to it.

The weights in front of each activation are frozen, so that plain training keeps what they make and
not the layer's input. Recomputation reads that input again, and it is among the results.
"""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional

import memo_compile
from tests.numerics.small import Pair, leased_slabs, rows
from tests.numerics.training import assert_planned


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden).requires_grad_(False)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class Features(nn.Module):
    """Returns the loss, and what every layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(32, 32)
        self.layers = nn.ModuleList(Layer(32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.entry(x)
        states = []
        for layer in self.layers:
            states.append(x)
            x = layer(x)
        return (x.pow(2).mean(), *states)


def _recomputing(model: nn.Module) -> Pair:
    torch.manual_seed(0)
    return Pair(model, policy="full-recompute")


def _step(model: nn.Module) -> None:
    model(rows(1, num_rows=16))[0].backward()


def _assert_next_step(pair: Pair) -> None:
    """A fresh step is right, in its plan, and its backward recomputed."""
    pair.zero_grad()
    pair.each(_step)
    pair.assert_equal()
    assert_planned(1)
    assert memo_compile.report().plans[-1].recomputed_bytes > 0
    assert leased_slabs() == 0


def test_writing_into_a_result_that_is_read_again():
    """Row 26: what is recomputed from it would be wrong; the step says so instead."""
    pair = _recomputing(Features())
    loss, *states = pair.compiled(rows(1, num_rows=16))
    with torch.no_grad():
        states[1].mul_(3)
    with pytest.raises(RuntimeError, match="a result of the step was written in place"):
        loss.backward()
    del loss, states
    gc.collect()
    _assert_next_step(pair)


def test_writing_into_a_view_that_nothing_reads_again():
    """As in eager, and as plain Inductor allows."""

    class Views(Features):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            loss, *_ = super().forward(x)
            return loss, (self.entry(x) * 2).t()

    pair = _recomputing(Views())

    def step(model: nn.Module) -> None:
        loss, view = model(rows(1, num_rows=16))
        view.mul_(3)
        (loss + view.sum()).backward()

    pair.each(step)
    pair.assert_equal()
    _assert_next_step(pair)


def test_a_dropped_forward_gives_the_frame_back():
    """Row 3: a lease holds no result, and so not the graph that holds the lease."""
    pair = _recomputing(Features())
    _step(pair.compiled)
    for seed in range(2):
        results = pair.compiled(rows(seed, num_rows=16))
        assert leased_slabs() == 1
        del results
        gc.collect()
        assert leased_slabs() == 0
    _assert_next_step(pair)
