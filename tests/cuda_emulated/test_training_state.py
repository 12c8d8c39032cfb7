"""A compiled model whose weights, gradients and state are on the host; kernels compute."""

import pytest
import torch
from memo_runtime.host_tensors import place_of

import memo_compile
from tests.cuda_emulated.computing import Computing, assert_close, ordered
from tests.cuda_emulated.training_scenarios import small_chunks


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=False)


@pytest.mark.parametrize("chance", [None, 0.0, 0.5])
@pytest.mark.parametrize("update", ["device", "host"])
def test_steps_are_those_of_the_plain_optimizer(update, chance):
    with small_chunks():
        steps = Computing(weights="host")
        optimizer = memo_compile.offload(sgd(steps.ours.parameters()), update=update)
        plain = sgd(steps.eager.parameters())
        steps.begin()
        for seed in range(1, 5):
            gradients = steps.wanted(seed)
            with ordered(chance, seed):
                steps.step(seed)
                optimizer.step()
            for parameter, gradient in zip(steps.eager.parameters(), gradients, strict=True):
                parameter.grad = gradient
            plain.step()
            ours, eager = [*steps.ours.parameters()], [*steps.eager.parameters()]
            assert_close([each.detach() for each in ours], [each.detach() for each in eager])
            at_home = [place_of(each.grad) is not None for each in ours]
            assert at_home == [update == "host"] * len(ours)
            assert any(place_of(each) is not None for each in ours)
    assert steps.is_planned()
