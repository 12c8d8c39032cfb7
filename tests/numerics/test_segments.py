"""Models without repeating layers under a budget: cut into segments, they equal eager and fit."""

import functools

import pytest
import torch

import memo_compile
from memo_compile.errors import Infeasible
from tests import models
from tests.numerics.closeness import Reference
from tests.numerics.training import ATEN, assert_planned, sgd

OPTIONS = {**ATEN, "costs": "roofline", "optimizer_state_bytes_per_parameter": 0}
MODELS = {
    "resnet": functools.partial(models.resnet, depths=(1, 1, 1, 1)),
    "unet": models.unet,
}
MOST_OF_ACTIVATIONS = 0.7
"""What a floor may take of the unbounded activations."""


@functools.cache
def build(name: str) -> models.ModelCase:
    torch.manual_seed(0)
    model, inputs, loss = MODELS[name]()
    wide = {
        key: value.double() if value.is_floating_point() else value for key, value in inputs.items()
    }
    return model.double(), wide, loss


class WithLoss(torch.nn.Module):
    """A step as one module, for planning without running."""

    def __init__(self, case: models.ModelCase) -> None:
        super().__init__()
        self.model, _, self.loss = case

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model, **inputs)


def sizes(name: str) -> tuple[int, int, int]:
    """Bytes: what is no activation, the floor, the unbounded peak.

    What a convolution takes for itself is in every plan, and large in so small a model.
    """
    case = build(name)
    step = WithLoss(case)
    unbounded = memo_compile.plan(step, **case[1], options=OPTIONS)
    fixed = unbounded.fixed
    constant = fixed.parameters + fixed.buffers + fixed.gradients + fixed.inputs + fixed.outputs
    constant += unbounded.outside_bytes
    with pytest.raises(Infeasible) as raised:
        memo_compile.plan(step, **case[1], options={**OPTIONS, "memory_budget": 1})
    assert raised.value.floor_bytes is not None
    return constant, raised.value.floor_bytes, unbounded.peak_bytes


RUNS = (
    (0.0, {"debug": "poison,copies-early"}),
    (0.5, {"debug": "poison,copies-late"}),
    (0.5, {"lowering": "inductor"}),
)
"""Share of the way from the floor to the unbounded peak, and what else a run is given."""


@pytest.mark.parametrize("name", MODELS)
def test_steps_under_a_budget_equal_eager(name, subtests):
    """The floor, well below the unbounded peak, is found once for all runs of a model."""
    constant, floor, unbounded = sizes(name)
    assert floor - constant <= MOST_OF_ACTIVATIONS * (unbounded - constant)
    for share, more in RUNS if name == "unet" else RUNS[:2]:
        budget = floor + int(share * (unbounded - floor))
        with subtests.test(f"{share} {more}"):
            torch._dynamo.reset()
            assert_equals_eager(build(name), {**OPTIONS, "memory_budget": budget, **more})
            plan = memo_compile.report().plans[-1]
            assert plan.peak_bytes <= budget
            assert plan.offloaded_bytes + plan.recomputed_bytes > 0 or "lowering" in more


@pytest.mark.parametrize(
    ("name", "policy"),
    [("unet", "full-recompute"), ("unet", "full-offload"), ("resnet", "full-offload")],
)
def test_named_policies_equal_eager(name, policy):
    """A segment with a batch norm, which the step overwrites, is not computed a second time."""
    options = {**OPTIONS, "memory_budget": 2**40, "policy": policy}
    assert_equals_eager(build(name), options)
    (plan,) = memo_compile.report().plans
    assert plan.recomputed_bytes if policy == "full-recompute" else plan.offloaded_bytes


def assert_equals_eager(case: models.ModelCase, options: dict) -> None:
    reference = Reference(case, [sgd])
    reference.assert_close(
        reference.train(functools.partial(torch.compile, backend="memo", options=options))
    )
    assert_planned()
