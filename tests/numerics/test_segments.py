"""Models without repeating layers under a budget: cut into segments, they equal eager and fit."""

import functools

import pytest
import torch
from torch import nn

import memo_compile
from memo_compile.config import resolve
from memo_compile.driver.plan_step import plan_step
from memo_compile.driver.stages import PlanRequest
from memo_compile.errors import Infeasible
from memo_compile.reporting import state
from memo_compile.step.plans import Plan
from tests import models
from tests.numerics.closeness import Reference
from tests.numerics.small import Pair
from tests.numerics.traced import Options, TracedStep
from tests.numerics.training import ATEN, Run, assert_planned, in_ci, sgd

OPTIONS = {**ATEN, "costs": "roofline", "optimizer_state_bytes_per_parameter": 0}
MODELS = {
    "resnet": functools.partial(models.resnet, depths=(1, 1, 1, 1)),
    "unet": models.unet,
}
PLENTY = 2**40
"""Bytes: under any budget a step is cut into segments."""
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


@functools.cache
def reference(name: str) -> Reference:
    return Reference(build(name), [sgd])


def traced(name: str) -> TracedStep:
    """The model's step, traced and cut once; its first run keeps everything."""

    def training(options: Options) -> Run:
        return reference(name).train(
            functools.partial(torch.compile, backend="memo", options=options)
        )

    return TracedStep(training, {**OPTIONS, "memory_budget": PLENTY})


def floor_bytes(step: TracedStep) -> int:
    """What the error of a budget of one byte names."""
    assembly = step.assembly
    config = resolve({**OPTIONS, "memory_budget": 1}, None)
    with pytest.raises(Infeasible) as raised:
        plan_step(assembly.lowered, config, PlanRequest(), assembly.known)
    assert raised.value.floor_bytes is not None
    return raised.value.floor_bytes


def constant_bytes(plan: Plan) -> int:
    """What is no activation.

    What a convolution takes for itself is in every plan, and large in so small a model.
    """
    fixed = plan.fixed
    constant = fixed.parameters + fixed.buffers + fixed.gradients + fixed.inputs + fixed.outputs
    return constant + plan.outside_bytes


SHARES = {0.0: "poison,copies-early", 0.5: "poison,copies-late"}
"""Of the way from the floor to the unbounded peak, and the schedule of that run's copies."""
POLICIES = ("full-recompute", "full-offload")
KEPT_AT_FLOOR = ("resnet",)
"""Its peak is the first convolution's work space in the backward, where all that is saved is dead:
what keeps everything fits there, once it lies beneath that."""


@pytest.mark.parametrize("name", in_ci(MODELS, "unet"))
def test_steps_under_a_budget_equal_eager(name, subtests):
    """The floor is well below the unbounded peak, and budgets and policies are kept to."""
    step = traced(name)
    reference(name).assert_close(step.first[0])
    plan = step.first[1]
    constant, floor, unbounded = constant_bytes(plan), floor_bytes(step), plan.peak_bytes
    assert floor - constant <= MOST_OF_ACTIVATIONS * (unbounded - constant)
    for share, schedule in SHARES.items():
        with subtests.test(f"{share} of the way"):
            budget = floor + int(share * (unbounded - floor))
            ours, plan = step.run({**OPTIONS, "memory_budget": budget, "debug": schedule})
            reference(name).assert_close(ours)
            assert plan.peak_bytes <= budget
            moved_bytes = plan.offloaded_bytes + plan.recomputed_bytes
            assert (moved_bytes == 0) == (name in KEPT_AT_FLOOR)
    for policy in POLICIES:
        with subtests.test(policy):
            ours, plan = step.run({**OPTIONS, "memory_budget": PLENTY, "policy": policy})
            reference(name).assert_close(ours)
            assert plan.recomputed_bytes if policy == "full-recompute" else plan.offloaded_bytes


class Multiplied(nn.Module):
    """Parts of several widths; what the first makes is read behind each of the others."""

    def __init__(self, narrow: int = 16, widths: tuple[int, ...] = (64, 72, 80, 88)) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(narrow, wide), nn.Tanh(), nn.Linear(wide, narrow), nn.Tanh())
            for wide in widths
        )

    def forward(self, x):
        x = kept = self.parts[0](x)
        for part in self.parts[1:]:
            x = part(x) * kept
        return x.pow(2).mean()


@pytest.mark.full
@pytest.mark.parametrize("policy", ["full-offload", "full-recompute"])
def test_what_several_segments_read_moves_with_the_last_of_them(policy):
    torch.manual_seed(0)
    options = {**OPTIONS, "policy": policy, "memory_budget": PLENTY, "debug": "poison,copies-late"}
    pair = Pair(Multiplied(), **options)
    for _ in range(2):
        pair.zero_grad()
        pair.each(lambda run: run(torch.linspace(-1, 1, 512 * 16).view(512, 16)).backward())
        pair.assert_equal()
    (plan,) = memo_compile.report().plans
    (row,) = (row for row in plan.decisions if row.tensor.startswith("tanh_1 "))
    assert row.layer_class == "epilogue_fwd", "the last reader"
    assert row.decision == ("SAVE" if policy == "full-recompute" else "OFFLOAD")


@pytest.mark.full
def test_inductor_under_a_budget_equals_eager():
    """Half-way from the floor, which torch.compile's error names, to what keeps everything."""

    def peak_under(budget: int) -> int:
        torch._dynamo.reset()
        state.reset()
        options = {**OPTIONS, "lowering": "inductor", "memory_budget": budget}
        compiled = functools.partial(torch.compile, backend="memo", options=options)
        reference("unet").assert_close(reference("unet").train(compiled))
        assert_planned()
        return memo_compile.report().plans[-1].peak_bytes

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        peak_under(1)
    error = raised.value.inner_exception
    assert isinstance(error, Infeasible)
    assert error.floor_bytes is not None
    budget = (error.floor_bytes + peak_under(PLENTY)) // 2
    assert peak_under(budget) <= budget
