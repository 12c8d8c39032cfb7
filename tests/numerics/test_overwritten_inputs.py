"""What reads a buffer that the forward overwrites has the old value in the backward as well.

And what the backward itself writes over, a saved activation that it reads last, nobody misses.
"""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import memo_compile
from memo_compile.driver import pipeline
from memo_compile.driver.donation import wrongly_taken
from tests.numerics.closeness import assert_equals_eager
from tests.numerics.small import Pair, Stack, rows
from tests.numerics.training import ATEN, assert_planned, in_ci, memo_compiled

WIDTH = 16
WIDE = 2 * WIDTH


class Block(nn.Module):
    """``x + down(inside(block, up(x)))``; ``inside`` reads and overwrites ``state``."""

    def __init__(self, inside: Callable, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.inside = inside
        self.up, self.down = nn.Linear(WIDTH, WIDE, bias=False), nn.Linear(WIDE, WIDTH)
        self.norm = nn.BatchNorm1d(WIDE)
        self.register_buffer("state", torch.randn(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.inside(self, self.up(x)))


class Blocks(nn.Module):
    def __init__(self, inside: Callable, shape: tuple[int, ...], shares: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(inside, shape) for _ in range(3))
        for layer in self.layers[1:] if shares else ():
            layer.state = self.layers[0].state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _scaled_after(block, h):
    y = functional.gelu(h + block.state)
    block.state.mul_(1.5)
    return y


def _copied_into(block, h):
    y = functional.gelu(h + block.state)
    block.state.copy_(h.detach().mean(0))
    return y


def _running_average(block, h):
    state = block.state.clone()
    block.state.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return torch.tanh(h * state) * state


def _written_at_indices(block, h):
    y = torch.sigmoid(h * block.state.clone())
    block.state[torch.tensor([1, 3])] = h.detach()[0, :2]
    return y


def _written_in_part(block, h):
    y = torch.tanh(h + block.state)
    block.state[:4].mul_(1.5)
    return y


def _written_twice(block, h):
    first = torch.tanh(h + block.state)
    block.state.add_(1.0)
    second = torch.tanh(h + block.state)
    block.state.mul_(0.5)
    return first * second + block.state


def _seen_through_views(block, h):
    y = torch.tanh(h + block.state[0] + block.state.t()[:, 1] * h.detach())
    block.state.mul_(1.5)
    return y


def _times_ones(block, h):
    """Inductor drops the ones: the backward reads the buffer itself."""
    y = h * (block.state * torch.ones(WIDE))
    block.state.mul_(1.5)
    return y


def _statistics(block, h):
    variance, mean = torch.var_mean(block.state)
    block.state.mul_(1.5)
    return torch.tanh((h - mean) * variance)


def _weight_of_a_product(block, h):
    y = functional.linear(h, block.state * 1.0)
    block.state.mul_(1.5)
    return functional.gelu(y)


def _running_statistics(block, h):
    norm = block.norm
    before = (h - norm.running_mean) * (norm.running_var + 1).rsqrt()
    return functional.gelu(before) * norm(h)


TILED, RECOMPUTED = {"token_tiles": 2}, {"policy": "full-recompute"}

CASES = {
    function.__name__.strip("_"): (function, shape)
    for function, shape in (
        (_scaled_after, (WIDE,)),
        (_copied_into, (WIDE,)),
        (_running_average, (WIDE,)),
        (_written_at_indices, (WIDE,)),
        (_written_in_part, (WIDE,)),
        (_written_twice, (WIDE,)),
        (_seen_through_views, (WIDE, WIDE)),
        (_times_ones, (WIDE,)),
        (_statistics, (WIDE,)),
        (_weight_of_a_product, (WIDE, WIDE)),
        (_running_statistics, (1,)),
    )
}


IN_CI = (
    *("copied_into", "written_at_indices", "written_twice", "seen_through_views"),
    *("times_ones", "running_statistics"),
)


def _assert_trains_as_eager(model: nn.Module, **options: object) -> None:
    twin = copy.deepcopy(model)
    planned = memo_compiled(model, **options)
    x = rows(1, 32, WIDTH)
    for _ in range(2):
        for run, owner in ((planned, model), (twin, twin)):
            owner.zero_grad()
            run(x).backward()
        assert_equals_eager(model, twin)
        for (name, ours), theirs in zip(model.named_buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, msg=name)
    assert_planned()


@pytest.mark.parametrize(
    ("name", "options"),
    in_ci(
        itertools.product(CASES, (TILED, RECOMPUTED)),
        *zip(IN_CI, itertools.cycle((RECOMPUTED, TILED)), strict=False),
    ),
    ids=str,
)
def test_the_backward_has_the_old_value(name, options):
    _assert_trains_as_eager(Blocks(*CASES[name], shares=False), **options)


def test_what_a_batch_norm_makes_is_made_again():
    """All but its running averages, which the step overwrites."""
    blocks = Blocks(lambda block, h: torch.tanh(block.norm(h)), (1,), shares=False)
    _assert_trains_as_eager(blocks, policy="full-recompute")
    (plan,) = memo_compile.report().plans
    assert plan.recomputed_bytes > 0


@pytest.mark.parametrize(
    "name", in_ci(["scaled_after", "copied_into", "written_twice"], "scaled_after")
)
def test_one_buffer_of_all_layers(name):
    _assert_trains_as_eager(Blocks(*CASES[name], shares=True), policy="full-recompute")


@pytest.mark.parametrize("name", in_ci(["scaled_after", "running_average", "times_ones"]))
def test_the_backward_has_the_old_value_through_inductor(name):
    _assert_trains_as_eager(Blocks(*CASES[name], shares=False), lowering="inductor")


def test_only_one_layers_buffer_is_overwritten():
    """Its layer must not be taken for one of the others, whose forward may run again."""

    class Last(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = super().forward(x)
            self.layers[1].state.mul_(1.5)
            return loss

    def reads(block, h):
        return functional.gelu(h + block.state)

    for options in ({}, {"policy": "full-recompute"}):
        _assert_trains_as_eager(Last(reads, (WIDE,), shares=False), **options)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo
@pytest.mark.parametrize("options", [{}, {"policy": "full-recompute"}], ids=str)
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_an_input_that_the_step_overwrites(needs_gradient, options):
    """AOTAutograd writes an input that needs a gradient itself, after the graph."""

    def forward(x, shift, w):
        h = x @ w
        for _ in range(3):
            h = h + functional.gelu(h @ w + shift)
        shift.mul_(1.5)
        return h.square().mean()

    weight, other = 0.1 * torch.randn(WIDTH, WIDTH), torch.randn(WIDTH)
    found = []
    for run in (memo_compiled(forward, **options), forward):
        w, leaf = weight.clone().requires_grad_(), other.clone().requires_grad_(needs_gradient)
        shift = leaf * 1.0
        run(rows(1, 32, WIDTH), shift, w).backward()
        found.append((w.grad, shift.detach(), leaf.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


def _placed_inputs(num_rows: int, place: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two inputs: in memory of their own, beside each other in one buffer, or half overlapping."""
    buffer = torch.randn(3 * num_rows, WIDTH, generator=torch.Generator().manual_seed(num_rows))
    if place == "apart":
        return buffer[:num_rows].clone(), buffer[num_rows : 2 * num_rows].clone()
    start = num_rows if place == "beside" else num_rows // 2
    return buffer[:num_rows], buffer[start : start + num_rows]


def test_a_written_input_that_shares_memory_with_another_at_times():
    """AOTAutograd compiles for one way to share; only Dynamo's guards would see another."""

    class Halved(nn.Linear):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x.mul_(0.5)
            return super().forward(y * 1.0).square().mean() + super().forward(x * 2.0).mean()

    model = Halved(WIDTH, WIDTH)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="memo", options=ATEN, dynamic=True)
    for case in ("6 apart", "6 overlapping", "8 overlapping", "8 apart", "8 beside", "6 apart"):
        num_rows, place = case.split()
        inputs = []
        for run in (compiled, eager):
            run.zero_grad()
            inputs.append(_placed_inputs(int(num_rows), place))
            run(*inputs[-1]).backward()
        assert_equals_eager(model, eager)
        torch.testing.assert_close(inputs[0], inputs[1], msg=case)


NUM_ROWS = 32
MOVING = {"costs": "roofline", "token_granule": 4, "token_tiles": 1}
MOVES = (
    {**MOVING, "policy": "memo", "alpha": 0.5},
    {**MOVING, "policy": "full-offload"},
    {**MOVING, "policy": "full-recompute"},
    {"policy": "save"},
)


class Gated(nn.Module):
    """Saves two tensors of which its backward makes two as large; the gradient of ``scale`` is as
    large as the residual."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(NUM_ROWS, hidden))
        self.gate, self.up = (nn.Linear(hidden, 4 * hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        gated = functional.silu(self.gate(value)) * self.up(value)
        return (value + self.down(gated)) * self.scale


@pytest.mark.parametrize(
    ("options", "schedule"),
    in_ci(itertools.product(MOVES, ("copies-late", "copies-early")), (MOVES[0], "copies-late")),
)
def test_a_backward_writes_over_what_it_reads_last(options, schedule, monkeypatch):
    """Also in a graph that is retained; gradients stay the user's."""
    taken: list[str] = []

    def watched(problem):
        taken.extend(name for name, region in problem.regions.items() if region.overwrites)
        return wrongly_taken(problem)

    monkeypatch.setattr(pipeline, "wrongly_taken", watched)
    model = Stack(num_layers=0)
    model.layers = nn.ModuleList(Gated(32) for _ in range(3))
    pair = Pair(model, **options, debug=f"poison,{schedule}", lowering="inductor")

    def twice(model):
        loss = model(rows(1, NUM_ROWS))
        loss.backward(retain_graph=True)
        loss.backward()

    pair.each(twice)
    pair.each(lambda model: model(rows(2, NUM_ROWS)).backward())
    pair.assert_equal()
    assert "layer0_bwd" in taken
    assert_planned(1)
