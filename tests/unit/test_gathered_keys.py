"""Members of a group are told apart where FSDP2 gathers their parameters in one place."""

import torch

from memo_compile.driver.step_watch import key_of


def test_parameters_that_are_gathered_in_one_place_are_apart():
    memory, keys = torch.arange(8.0), []
    for _ in range(2):
        parameter = torch.nn.Parameter(torch.empty(8))
        keys.append((parameter, key_of(parameter)))
        parameter.untyped_storage().resize_(0)
    parameter, before = keys[0]
    parameter.untyped_storage().resize_(memory.nbytes)
    assert key_of(parameter) == before
    assert keys[0][1] != keys[1][1]


def test_parameters_in_one_buffer_are_apart():
    flat = torch.zeros(8)
    first, second = torch.nn.Parameter(flat[:4]), torch.nn.Parameter(flat[4:])
    assert key_of(first) != key_of(second)
