"""A second loss is seen in the gradients that a backward is given, whatever their type."""

import pytest
import torch

from memo_compile.driver.user_outputs import LossWatch

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_only_gradients_that_are_not_zero_are_a_loss(dtype):
    zeros = torch.zeros(6, 7).to(dtype)
    watch = LossWatch((1,))
    watch.look([torch.ones(3), zeros])
    assert not watch.is_seen()
    some = torch.zeros(6, 7)
    some[5, 6] = 1.0
    watch.look([zeros, some.to(dtype)])
    watch.look([zeros, zeros])
    assert watch.is_seen()


def test_no_number_is_a_loss_too():
    watch = LossWatch((0,))
    watch.look([torch.full((2,), torch.nan)])
    assert watch.is_seen()


def test_the_default_device_does_not_matter():
    watch = LossWatch((0,))
    gradient = torch.ones(3)
    with torch.device("meta"):
        watch.look([gradient])
    assert watch.is_seen()
