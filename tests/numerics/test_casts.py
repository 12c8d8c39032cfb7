"""Operators on a CPU that copy into another dtype or layout: what they allocate counts."""

import copy

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import memo_compile
from memo_compile.lowering.aten import _out_overload
from memo_compile.lowering.workspace import CAST, cast_workspace
from tests.numerics.test_fourier import empty_like, most_bytes
from tests.numerics.training import ATEN, INDUCTOR

aten = torch.ops.aten
ROWS, COLUMNS, PLACES = 256, 192, 320
SMALL_BYTES = 2**14
"""Of rows, or alignment, beside what counts."""


def numbers(dtype, *shape):
    return torch.zeros(shape or (ROWS, COLUMNS), dtype=dtype)


def places():
    """An index of ``PLACES`` of the columns, for each row."""
    return torch.arange(PLACES).remainder(COLUMNS).expand(ROWS, PLACES).contiguous()


def scattered(dtype):
    return numbers(dtype), places(), numbers(dtype, ROWS, PLACES)


CASES = {
    "gather": lambda dtype: (aten.gather.default, numbers(dtype), 1, places()),
    "scatter": lambda dtype: (
        lambda x, at, new: aten.scatter.src(x, 1, at, new),
        *scattered(dtype),
    ),
    "scatter a number": lambda dtype: (aten.scatter.value, numbers(dtype), 1, places(), 1.0),
    "scatter_add": lambda dtype: (
        lambda x, at, new: aten.scatter_add.default(x, 1, at, new),
        *scattered(dtype),
    ),
    "scatter_reduce": lambda dtype: (
        lambda x, at, new: aten.scatter_reduce.two(x, 1, at, new, "amax"),
        *scattered(dtype),
    ),
    "scatter_reduce to means": lambda dtype: (
        lambda x, at, new: aten.scatter_reduce.two(x, 1, at, new, "mean"),
        *scattered(dtype),
    ),
    "mean": lambda dtype: (aten.mean.dim, numbers(dtype), [1]),
    "mean of all": lambda dtype: (aten.mean.default, numbers(dtype)),
    "any": lambda dtype: (aten.any.dim, numbers(dtype), 1),
    "any of all": lambda dtype: (aten.any.default, numbers(dtype)),
    "abs": lambda dtype: (aten.abs.default, numbers(dtype)),
    "bilinear": lambda dtype: (
        lambda x: aten.upsample_bilinear2d.default(x, [64, 64], False),
        numbers(dtype, 4, 16, 32, 32),
    ),
    "bilinear with channels last": lambda dtype: (
        lambda x: aten.upsample_bilinear2d.default(x, [64, 64], False),
        numbers(dtype, 4, 16, 32, 32).to(memory_format=torch.channels_last),
    ),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PAIRS = [(name, dtype) for name in CASES for dtype in DTYPES]
PAIRS += [("abs", torch.complex64), ("any", torch.bool), ("any of all", torch.uint8)]


@pytest.mark.parametrize(("name", "dtype"), PAIRS, ids=lambda part: str(part).split(".")[-1])
def test_what_an_operator_takes_is_counted_and_no_more(name, dtype):
    operator, *arguments = CASES[name](dtype)
    tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
    graph = make_fx(
        lambda *given: operator(*_filled(arguments, given)), tracing_mode="fake"
    )(*tensors).graph  # fmt: skip
    (node,) = (node for node in graph.nodes if node.op == "call_function")
    found = cast_workspace(node, 3)
    counted = 0 if found is None else found.size_bytes
    result = empty_like(node.meta["val"])
    into = _out_overload(node)
    if into is None:
        taken = most_bytes(lambda *_: operator(*arguments)) - result.nbytes
    else:
        taken = most_bytes(lambda *_: _run(into, node, tensors, result))
    assert counted - SMALL_BYTES <= taken <= counted + SMALL_BYTES
    assert found is None or (found.kind, found.start, found.end) == (CAST, 3, 4)


def _filled(arguments, given):
    """``arguments`` with their tensors replaced by ``given``, in order."""
    given = iter(given)
    return [next(given) if isinstance(value, torch.Tensor) else value for value in arguments]


def _run(into, node, tensors, result):
    """The overload ``into`` with the arguments that ``node`` has, on real tensors."""
    given = iter(tensors)
    real = {name: next(given) for name in dict.fromkeys(node.all_input_nodes)}
    args = torch.fx.node.map_arg(node.args, real.__getitem__)
    return into(*args, **node.kwargs, out=result)


class Routed(nn.Module):
    """Rows go where an index says, and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(COLUMNS, COLUMNS)

    def forward(self, x, at):
        made = torch.zeros_like(x).scatter_add(0, at, self.linear(x))
        return x + made.gather(0, at)


class TwoRouted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Routed(), Routed()])

    def forward(self, x, at):
        for layer in self.layers:
            x = layer(x, at)
        return x.float().square().mean()


@pytest.mark.parametrize("options", [ATEN, INDUCTOR], ids=["aten", "inductor"])
def test_rows_that_are_scattered_in_sixteen_bits_count_in_a_plan(options):
    """Inductor calls torch's own scatter where there are several threads."""
    torch.manual_seed(0)
    model = TwoRouted().bfloat16()
    x, at = torch.randn(ROWS, COLUMNS).bfloat16(), torch.randperm(ROWS)[:, None]
    at = at.expand(ROWS, COLUMNS).contiguous()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        ours = torch.compile(copy.deepcopy(model), backend="memo", options=options)
        for _ in range(2):
            expected, found = model(x, at), ours(x, at)
            expected.backward(), found.backward()
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    finally:
        torch.set_num_threads(threads)
    for own, theirs in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own.grad, theirs.grad, rtol=5e-2, atol=1e-2)
    (plan,) = memo_compile.report().plans
    assert plan.outside_bytes_by_kind[CAST] >= 4 * ROWS * COLUMNS
