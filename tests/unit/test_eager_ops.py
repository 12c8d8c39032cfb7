"""Operators that memo runs in its own way in eager: the same numbers, and memory of their own."""

from collections.abc import Callable

import pytest
import torch
import torch._inductor.inductor_prims  # the table of operators names its own

from memo_compile.lowering.eager_ops import runnable

aten = torch.ops.aten

CALLS: dict[str, tuple[Callable[..., torch.Tensor], torch.Tensor, tuple[object, ...]]] = {
    "copy": (aten.copy.default, torch.ones(4), ()),
    "slice_scatter": (aten.slice_scatter.default, torch.ones(2, 4), (0, 0, 2)),
    "select_scatter": (aten.select_scatter.default, torch.ones(3), (1, 2)),
    "diagonal_scatter": (aten.diagonal_scatter.default, torch.ones(3), ()),
    "as_strided_scatter": (aten.as_strided_scatter.default, torch.ones(2), ((2,), (5,), 102)),
    "as_strided_scatter_beside": (
        aten.as_strided_scatter.default,
        torch.ones(2),
        ((2,), (7,), 97),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_result_of_what_lies_in_the_arena_holds_no_copy_of_the_arena(name: str):
    operator, source, rest = CALLS[name]
    base = torch.arange(1000.0)[100:112].view(3, 4)
    result = runnable(operator)(base, source, *rest)
    expected = operator(base, source, *rest)
    assert torch.equal(result, expected)
    assert result.stride() == expected.stride()
    assert result.untyped_storage().nbytes() <= base.nbytes + 12  # what is beside ``base``


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int64])
def test_counting_in_types_that_only_inductor_counts_in(dtype: torch.dtype):
    """``torch.eye(256)`` compares ranges of uint16."""
    settings = {"dtype": dtype, "device": torch.device("cpu"), "requires_grad": False}
    counted = runnable(torch.ops.prims.iota.default)(300, start=2, step=3, **settings)
    assert counted.dtype is dtype
    assert torch.equal(counted.to(torch.int64), torch.arange(2, 902, 3))
