"""What the numeric tests call equal: a small gradient that is wrong is seen beside large ones."""

import dataclasses

import pytest
import torch
from torch import nn

from tests.numerics.closeness import Reference, assert_equals_eager, eagerly
from tests.numerics.training import sgd, train


class Scales(nn.Module):
    """The gradient of ``small`` is a millionth of that of ``large``; that of ``lost`` cancels."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.randn(8, 8))
        self.small = nn.Parameter(torch.randn(8, 8))
        self.lost = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted = x @ self.large + 1e-6 * x.float() @ self.small + self.lost
        return (shifted - shifted.mean(0)).sin().sum()


def reference() -> Reference:
    x = torch.randn(16, 8)
    return Reference((Scales(), {"x": x}, lambda model, x: model(x)), [sgd], 2)


def test_eager_and_other_orders_of_summation_pass():
    found = reference()
    found.assert_close(found.eager)
    model, inputs, loss = found.case
    flipped = (model, {"x": inputs["x"].flip(0)}, loss)
    found.assert_close(train(flipped, eagerly, [sgd], 2, found.eager.starts))


@pytest.mark.parametrize("name", ["large", "small"])
def test_a_wrong_gradient_is_named_whatever_its_size(name):
    found = reference()
    last = dict(found.eager.gradients[1])
    last[name] = 1.001 * last[name]
    wrong = dataclasses.replace(found.eager, gradients=(found.eager.gradients[0], last))
    (fault,) = found.faults(wrong)
    assert fault.startswith(f"step 1: {name}: ")


def test_what_rounding_leaves_is_held_to_eagers_own_error():
    """A gradient that cancels has no digits, and may still not be anything."""
    found = reference()
    first = dict(found.eager.gradients[0])
    assert first["lost"].abs().max() < 1e-4
    first["lost"] = first["lost"] + 1e-3
    wrong = dataclasses.replace(found.eager, gradients=(first, found.eager.gradients[1]))
    assert [fault.split(":")[1] for fault in found.faults(wrong)] == [" lost"]


def test_models_side_by_side_are_compared_parameter_by_parameter():
    ours, eager = nn.Linear(2, 2), nn.Linear(2, 2)
    for model in (ours, eager):
        model.weight.grad, model.bias.grad = torch.ones(2, 2), torch.full((2,), 1e-7)
    assert_equals_eager(ours, eager)
    ours.bias.grad = ours.bias.grad * 1.001
    with pytest.raises(AssertionError, match="bias"):
        assert_equals_eager(ours, eager)
    ours.bias.grad = torch.full((2,), float("nan"))
    with pytest.raises(AssertionError, match="bias"):
        assert_equals_eager(ours, eager)
