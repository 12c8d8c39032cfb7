"""Operators that memo runs in its own way in eager: the same numbers, and memory of their own."""

from collections.abc import Callable

import pytest
import torch
import torch._inductor.inductor_prims  # the table of operators names its own

from memo_compile.lowering.eager_ops import (
    PIECE,
    _bits,
    _in_pieces,
    _normal,
    _uniform,
    runnable,
)

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


def test_numbers_of_a_seed_on_a_device_are_splitmix64_s():
    """The generator's published results of this seed; by the device's operators, on a CPU."""
    seed = torch.tensor(1234567)
    wanted = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431)
    assert tuple(bits % 2**64 for bits in _bits(seed, 0, 4).tolist()) == wanted
    assert torch.equal(_bits(seed, 2, 4), _bits(seed, 0, 4)[2:])


@pytest.mark.parametrize("made", [_uniform, _normal])
def test_random_numbers_of_a_device(made):
    """Large enough for several pieces; a distribution's moments within five deviations."""
    numbers = _in_pieces((3, PIECE // 2), torch.tensor(7), torch.float32, made).double()
    centre, spread, fourth = (0.5, 1 / 12, 1 / 80) if made is _uniform else (0.0, 1.0, 3.0)
    apart = numbers - centre
    size = numbers.numel()
    assert abs(apart.mean()) < 5 * (spread / size) ** 0.5
    for power, wanted in ((2, spread), (4, fourth)):
        assert (
            abs(apart.pow(power).mean() - wanted) < 5 * (apart.pow(2 * power).mean() / size) ** 0.5
        )
    lagged = (apart[0, 1:] * apart[0, :-1]).mean()
    assert abs(lagged) < 5 * spread / apart[0].numel() ** 0.5
    assert numbers.unique().numel() > 0.9 * min(size, 2**24)


def test_a_number_of_the_host_is_written_without_a_copy():
    """Of any type that the copy would make of it."""
    copied = runnable(aten.copy.default)
    for number, dtype in ((300, torch.uint8), (-1.5, torch.int64), (2, torch.bool)):
        base, source = torch.zeros(3, dtype=dtype), torch.tensor(number)
        assert torch.equal(copied(base, source), aten.copy(base, source))


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


def test_what_an_operator_writes_is_copied_without_the_arena():
    """Torch's wrapper of one that writes copies from where the storage begins."""
    library = torch.library.Library("memo_tests", "FRAGMENT")
    library.define("add_into(Tensor(a!) out, Tensor value) -> ()")
    library.impl("add_into", lambda out, value: out.add_(value) and None, "CPU")
    wrapped = torch.ops.higher_order.auto_functionalized_v2
    base = torch.arange(1000.0)[100:101]
    given = {"value": torch.ones(1), "_out_base_index": 0, "_out_alias": True}
    for call in (wrapped, runnable(wrapped)):
        operator = torch.ops.memo_tests.add_into.default
        *_, result = call(operator, _all_bases=[base], **given)
        assert (result.item(), base.item()) == (101, 100)
    assert result.untyped_storage().nbytes() == base.nbytes
