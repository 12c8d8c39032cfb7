"""Region calls whose buffers or inputs are views of other values."""

import dataclasses

import pytest
import torch
from memo_runtime.instructions import view_inside
from memo_runtime.run_step import RunHalf, StepPlan, run_forward

from tests.steps.moving import (
    CPU,
    DOUBLE,
    NUM,
    NUM_BYTES,
    SHIFT,
    TOTAL,
    call,
    forward,
    step,
    values,
)


def into_ordinary(offset_bytes: int) -> StepPlan:
    """``b`` is written into the middle of an ordinary tensor that the constants hold."""
    plan = step((DOUBLE, dataclasses.replace(SHIFT, into=((0, 5, offset_bytes),)), TOTAL))
    plan.forward.num_registers = 6
    plan.forward.constants = ((5, torch.zeros(3 * NUM)),)
    return plan


def test_a_buffer_can_lie_in_an_ordinary_tensor():
    plan = into_ordinary(NUM_BYTES)
    ordinary = plan.forward.constants[0][1]
    x = values(0)
    loss, handle = forward(plan, x)
    assert torch.equal(loss, (2 * x + 1).sum())
    assert torch.equal(ordinary.view(3, NUM), torch.stack([0 * x, 2 * x + 1, 0 * x]))
    del handle


@pytest.mark.parametrize("offset_bytes", [2, 3 * NUM_BYTES, 2 * NUM_BYTES + 4])
def test_a_buffer_outside_its_value_is_an_error(offset_bytes):
    with pytest.raises(AssertionError, match=rf"inside {3 * NUM_BYTES} B, aligned to 4 B"):
        forward(into_ordinary(offset_bytes), values(0))


def test_a_view_inside_counts_from_the_storage_and_keeps_strides():
    value = torch.arange(12.0)[2:]
    like = torch.empty_strided((2, 3), (1, 2))
    inside = view_inside(value, like, 8)
    assert inside.stride() == (1, 2)
    assert inside.tolist() == [[2.0, 4.0, 6.0], [3.0, 5.0, 7.0]]
    assert view_inside(value, torch.empty(0), 48).numel() == 0


@pytest.mark.parametrize(
    ("of_view", "expected"), [((0, (2,), (2,), 0), [3.0, 5.0]), ((0, (2,), (2,), 1), [4.0, 6.0])]
)
def test_an_input_is_read_as_a_view_from_where_its_value_starts(of_view, expected):
    seen = []

    def look(args):
        seen.append(args[0].tolist())
        return [args[0]]

    plan = StepPlan(
        key=99_999_999,
        device=CPU,
        arena_bytes=512,
        table=[[]],
        forward=RunHalf(
            num_registers=3,
            constants=(),
            arguments=(0,),
            calls=(call(look, 0, (0,), (1,), views=(of_view,)),),
            results=(1,),
            leased=(),
            handle=2,
        ),
        backward=RunHalf(
            num_registers=1, constants=(), arguments=(0,), calls=(), results=(), leased=(), handle=0
        ),
    )
    run_forward(plan, [torch.arange(10.0)[3:]])
    assert seen == [expected]
