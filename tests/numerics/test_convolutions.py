"""Convolutions on a CPU: what oneDNN allocates for itself counts, and budgets hold with it."""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from memo_runtime.pages import trim_heap
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import memo_compile
from memo_compile.backends.entry import large_blocks_leave_the_heap
from memo_compile.errors import Infeasible
from memo_compile.lowering.workspace import Convolution, convolution_bytes, convolution_of
from tests.numerics.first_step import watches_of
from tests.numerics.training import in_ci

MOST_OVER_BUDGET = 1.005
ROUNDING_BYTES = 2**16
"""Pages that the allocator begins, and the process's other small blocks."""
SHAPES = [
    # batch, channels, results, kernel, size, stride, dilation, groups, transposed, channels last
    (2, 64, 64, 3, (48, 48), 1, 1, 1, False, False),
    (1, 128, 64, 3, (96, 96), 2, 1, 1, False, False),
    (2, 3, 64, 7, (96, 96), 2, 1, 1, False, False),
    (2, 96, 96, 7, (48, 48), 1, 1, 96, False, False),
    (2, 20, 36, 3, (63, 63), 1, 1, 1, False, False),
    (1, 256, 512, 3, (14, 14), 1, 1, 1, False, False),
    (2, 128, 32, 1, (48, 48), 1, 1, 1, False, False),
    (1, 96, 64, 4, (48, 48), 2, 1, 1, True, False),
    (2, 48, 16, 3, (16, 16, 16), 1, 1, 1, False, False),
    (2, 96, 128, 3, (2048,), 1, 1, 1, False, False),
    (1, 16, 8, 3, (32, 32, 32), 1, 1, 1, False, False),  # torch unfolds it, in float32 too
    (4, 384, 384, 7, (8, 8), 1, 1, 384, False, True),  # ConvNeXt's
    (2, 96, 96, 5, (32, 32), 1, 2, 96, False, True),
    (2, 48, 48, 3, (48, 48), 2, 1, 4, False, True),
    (1, 96, 32, 7, (24, 24), 2, 3, 1, True, False),
]
MASK = (True, True, False)
OPTIONS = {"strict": True, "costs": "roofline", "optimizer_state_bytes_per_parameter": 0}

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads and resets /proc")


def _kib_of_status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field + ":")))


def _extra_bytes(counted: int, operator: Any, *args: Any) -> int:
    """The most memory of a call beside its results, once its kernels are there.

    The lesser of two calls where one takes more than is ``counted``: what other threads of the
    process take meanwhile is there by chance.
    """
    operator(*args)
    extra = _grown_bytes(operator, *args)
    return extra if extra <= counted else min(extra, _grown_bytes(operator, *args))


def _grown_bytes(operator: Any, *args: Any) -> int:
    trim_heap()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = _kib_of_status("VmRSS")
    results = operator(*args)
    grown = (_kib_of_status("VmHWM") - before) * 1024
    results = results if isinstance(results, tuple) else (results,)
    return grown - sum(result.nbytes for result in results if result is not None)


def convolutions(x: torch.Tensor, weight: torch.Tensor, rest: Sequence[Any]) -> list[Convolution]:
    """Forward and backward as they stand in a graph."""

    def both(x: torch.Tensor, weight: torch.Tensor) -> Any:
        y = torch.ops.aten.convolution(x, weight, None, *rest)
        return torch.ops.aten.convolution_backward(y, x, weight, None, *rest, MASK)

    with FakeTensorMode() as mode:
        fakes = map(mode.from_tensor, (x, weight))
        return list(filter(None, map(convolution_of, make_fx(both)(*fakes).graph.nodes)))


@needs_linux
@pytest.mark.parametrize(
    "dtype",
    in_ci([torch.float32, torch.bfloat16, torch.float64], torch.float32, torch.bfloat16),
)
def test_what_a_convolution_allocates_is_at_most_what_is_counted(dtype):
    large_blocks_leave_the_heap()
    shares = []
    for batch, channels, results, kernel, size, stride, dilation, groups, *kind in SHAPES:
        transposed, channels_last = kind
        x = torch.randn(batch, channels, *size, dtype=dtype)
        if channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        ends = (channels, results) if transposed else (results, channels)
        weight = torch.randn(ends[0], ends[1] // groups, *[kernel] * len(size), dtype=dtype)
        lists = (stride, dilation * (kernel // 2), dilation)
        rest = (*([each] * len(size) for each in lists), transposed, [0] * len(size), groups)
        y = torch.ops.aten.convolution(x, weight, None, *rest)
        calls = (
            (torch.ops.aten.convolution, x, weight, None, *rest),
            (torch.ops.aten.convolution_backward, torch.ones_like(y), x, weight, None, *rest, MASK),
        )
        for call, found in zip(calls, convolutions(x, weight, rest), strict=True):
            counted = convolution_bytes(found)
            extra = _extra_bytes(counted + ROUNDING_BYTES, *call)
            assert extra <= counted + ROUNDING_BYTES, found
            shares.append(extra / counted)
    assert max(shares) > 0.4, "nothing was measured"


class Stack(nn.Module):
    """Blocks of two convolutions, wide at first, narrow at the end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        wide = [nn.Conv2d(3, width, 3, padding=1)]
        wide += [nn.Conv2d(width, width, 3, padding=1) for _ in range(3)]
        self.layers = nn.ModuleList(wide)
        self.last = nn.ConvTranspose2d(width, 4, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.last(x).square().mean()


def ratios_at_the_floor(model: nn.Module, x: torch.Tensor, *, lowering: str) -> list[float]:
    """Measured bytes over a budget that is the named floor, for each of three steps."""
    held = sum(tensor.nbytes for tensor in (*model.parameters(), x))

    def compiled(budget: int) -> Any:
        torch._dynamo.reset()
        options = {**OPTIONS, "lowering": lowering, "memory_budget": budget}
        return torch.compile(model, backend="memo", options=options)

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        compiled(1)(x)
    error = raised.value.inner_exception
    assert isinstance(error, Infeasible)
    assert error.floor_bytes is not None
    budget, ratios = error.floor_bytes, []
    run = compiled(budget)
    for _ in range(3):
        model.zero_grad()
        with contextlib.ExitStack() as stack:
            watches = watches_of(stack)
            run(x).backward()
        ratios.append((held + watches[0].growth_bytes) / budget)
    return ratios


@needs_linux
@pytest.mark.parametrize(
    ("lowering", "dtype", "width"),
    in_ci(
        [
            ("aten", torch.float32, 40),
            ("aten", torch.bfloat16, 24),
            ("inductor", torch.float32, 24),
        ],
        ("aten", torch.bfloat16, 24),
    ),
)
def test_a_budget_holds_in_every_step(lowering, dtype, width):
    model, x = Stack(width).to(dtype), torch.randn(2, 3, 96, 96, dtype=dtype)
    ratios = ratios_at_the_floor(model, x, lowering=lowering)
    assert max(ratios) <= MOST_OVER_BUDGET, ratios
    assert "convolution workspace" in memo_compile.report().plans[-1].outside_bytes_by_kind


class Pooled(nn.Module):
    """Maxima of an image, then of those; next to nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = functional.max_pool2d((x * scale).tanh(), 2)
        return x.square().mean()


@needs_linux
def test_what_pooling_takes_op_by_op_is_in_the_floor():
    model, x = Pooled(), torch.randn(4, 32, 128, 128)
    ratios = ratios_at_the_floor(model, x, lowering="aten")
    assert max(ratios) <= MOST_OVER_BUDGET, ratios
    assert "pooling workspace" in memo_compile.report().plans[-1].outside_bytes_by_kind
