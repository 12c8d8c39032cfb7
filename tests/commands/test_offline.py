"""Plans made without running: equal to the backend's, on real and on fake tensors; refusals."""

import contextlib
import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional

import memo_compile
from memo_compile.config import resolve
from memo_compile.costs.hardware import find_hardware
from memo_compile.errors import ConfigError, Infeasible, UnsupportedGraph
from memo_compile.offline import plan_offline as offline
from memo_compile.reporting import state
from memo_compile.step.simulate import simulate
from tests.numerics.small import Stack, rows
from tests.numerics.training import in_ci


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        q, k, v = (
            p(normed).unflatten(-1, (4, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2)
        return x + self.down(functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width: int = 64, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


@pytest.fixture(autouse=True)
def _forget():
    torch._dynamo.reset()
    state.reset()
    yield
    torch._dynamo.reset()
    state.reset()


def inputs(fake: bool = False):
    with FakeTensorMode() if fake else contextlib.nullcontext():
        return Model(), torch.empty(2, 256, 64) if fake else torch.randn(2, 256, 64)


def planned_by_the_backend(model, x, options):
    torch.compile(model, backend="memo", options=options)(x).backward()
    model.zero_grad()
    return memo_compile.report().plans[-1]


@pytest.mark.parametrize("lowering", in_ci(["aten", "inductor"], "aten"))
def test_the_plan_equals_the_backends_byte_for_byte(lowering):
    """Where everything is saved, and under a budget that makes tensors move."""
    options = {"lowering": lowering, "costs": "roofline", "strict": True}
    model, x = inputs()
    saved = assert_equals_the_backends(model, x, options)
    assert {row.decision for row in saved.decisions} == {"SAVE"}
    torch._dynamo.reset()
    budget = int(0.85 * saved.peak_bytes)
    moved = assert_equals_the_backends(model, x, {**options, "memory_budget": budget})
    assert {row.decision for row in moved.decisions} > {"SAVE"}


def assert_equals_the_backends(model, x, options):
    plan = memo_compile.plan(model, x, options=options)
    theirs = planned_by_the_backend(model, x, options)
    assert len(plan.offsets) > 20
    assert plan.offsets == theirs.offsets
    for name in ("arena_bytes", "peak_bytes", "lower_bound_bytes", "host_bytes", "fixed"):
        assert getattr(plan, name) == getattr(theirs, name), name
    assert plan.resident_bytes == theirs.resident_bytes
    assert plan.decisions == theirs.decisions
    return plan


@functools.cache
def step_on_fakes(hardware=None):
    """The model's step on fakes, for this machine or for a named device."""
    model, x = inputs(fake=True)
    config = resolve({"lowering": "aten"}, None)
    named = None if hardware is None else find_hardware(hardware)
    return offline.plan_step_offline(model, (x,), {}, config=config, hardware=named)


def test_nothing_runs_and_nothing_stays_and_fakes_give_the_same_plan():
    model, x = inputs()
    before = [p.detach().clone() for p in model.parameters()]
    real = memo_compile.plan(model, x, options={"lowering": "aten"})
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert memo_compile.report().plans == ()
    torch._dynamo.reset()
    named = memo_compile.plan(model, x, options={"lowering": "aten"}, hardware="cpu")
    for plan in (named, step_on_fakes().plan):
        assert plan.offsets == real.offsets
        assert plan.peak_bytes == real.peak_bytes
    assert step_on_fakes().plan.decisions == real.decisions


def test_the_models_python_is_traced_and_not_run():
    """Nor is anything left where Dynamo puts what compiled code would need."""

    class Counting(nn.Linear):
        calls = 0
        seen = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.seen = x
            return super().forward(x).square().mean()

    model = Counting(8, 8)
    before = set(Counting.forward.__globals__)
    for size in range(4, 16):  # more shapes than Dynamo compiles a function for
        memo_compile.plan(model, torch.randn(size, 8), options={"lowering": "aten"})
    assert (model.calls, model.seen) == (0, None)
    assert set(Counting.forward.__globals__) == before


@pytest.mark.parametrize(
    "given",
    [
        lambda model: model.forward,
        functools.partial,
        torch.compile,
        lambda model: torch.compile(model.forward),
        lambda model: lambda x: model(x),
    ],
    ids=["method", "partial", "compiled module", "compiled function", "function"],
)
def test_whatever_can_be_called_is_planned(given):
    model, x = Model(num_layers=1), torch.randn(2, 32, 64)
    plan = memo_compile.plan(given(model), x, options={"lowering": "aten"})
    assert plan.peak_bytes == _peak_of_one_layer()
    assert plan.check.ok


@functools.cache
def _peak_of_one_layer():
    model, x = Model(num_layers=1), torch.randn(2, 32, 64)
    return memo_compile.plan(model, x, options={"lowering": "aten"}).peak_bytes


def test_a_gpus_plan_is_simulated_with_its_figures():
    slow, fast = step_on_fakes("a100"), step_on_fakes("h200")
    assert not slow.exact
    assert slow.costs.d2h_bytes_per_s == 32e9
    assert slow.plan.timeline.step_s > fast.plan.timeline.step_s
    assert slow.plan.timeline == simulate(slow.problem, slow.costs)
    assert slow.model_flops == fast.model_flops


def test_a_gpus_attention_backward_has_its_workspace():
    plan = step_on_fakes("a100").plan
    # batch 2 x heads 4 x rows 256 x (width 16 -> 32, and one sum), in float32
    assert plan.outside_bytes_by_kind["attention workspace"] == 2 * 4 * 256 * 33 * 4


def test_model_flops_are_those_of_the_products():
    layers, width, tokens = 2, 64, 512
    products = layers * (3 * width * width + 8 * width * width) + 8 * width
    attention = layers * 2 * 256 * 256 * width  # causal: half of 2 products, 2 FLOPs each, batch 2
    assert step_on_fakes().model_flops == 3 * (2 * tokens * products + 2 * attention)


def test_the_loss_is_part_of_the_step():
    model, x = (
        nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)),
        torch.randn(128, 64),
    )
    without = memo_compile.plan(model, x, options={"lowering": "aten"})
    within = memo_compile.plan(
        model, x, options={"lowering": "aten"}, loss=lambda out: out.square().mean()
    )
    assert without.fixed.outputs == 128 * 64 * 4
    assert within.fixed.outputs == 512  # a scalar, aligned


def test_infeasible_comes_bare_with_its_floor():
    model, x = inputs()
    with pytest.raises(Infeasible, match=r"^budget 1\.00 KiB < floor .* MiB") as caught:
        memo_compile.plan(model, x, options={"lowering": "aten", "memory_budget": "1KiB"})
    assert caught.value.floor_bytes > 1024


def test_slices_that_nothing_has_compared_with_the_whole_are_noted():
    options = {"lowering": "aten", "token_granule": 4}
    for more, noted in (
        ({}, []),
        ({"token_tiles": 4}, ["tiles of "]),
        ({"policy": "memo", "alpha": 0.5}, ["recomputations of a part of the tokens"]),
    ):
        state.reset()
        memo_compile.plan(Stack(num_layers=4), rows(1, 32), options={**options, **more})
        notes = [note for note in memo_compile.report().notes if "not compared" in note]
        assert len(notes) == len(noted)
        assert all(note.startswith(start) for note, start in zip(notes, noted, strict=True))


def test_a_graph_break_is_named():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            torch._dynamo.graph_break()
            return self.inner(x).sum()

    with pytest.raises(
        UnsupportedGraph, match=r"does not trace into one graph: .*graph_break.*"
    ) as caught:
        memo_compile.plan(Broken(), torch.randn(4, 8))
    assert "test_offline.py:" in str(caught.value)


def test_nothing_to_train_is_refused():
    frozen = nn.Linear(8, 8).requires_grad_(False)
    with pytest.raises(UnsupportedGraph, match="nothing in this step needs a gradient"):
        memo_compile.plan(frozen, torch.randn(4, 8))


def test_unknown_options_are_refused():
    model, x = inputs()
    with pytest.raises(ConfigError, match="did you mean 'memory_budget'"):
        memo_compile.plan(model, x, options={"memory_budge": "1GiB"})


def test_a_models_own_error_is_not_dressed_up():
    with pytest.raises(Exception, match="same reduction dim") as caught:
        memo_compile.plan(nn.Linear(8, 8), torch.randn(4, 7))
    assert not isinstance(caught.value, memo_compile.errors.MemoError)


def test_more_gradient_bytes_than_parameters_are_counted_once():
    plan = step_on_fakes("a100").plan
    size = sum(p.numel() * 4 for p in Model().parameters())
    assert dataclasses.replace(plan.fixed, inputs=0, outputs=0, buffers=0) == dataclasses.replace(
        plan.fixed,
        parameters=size,
        gradients=size,
        new_gradients=size,
        optimizer_state=2 * size,
        inputs=0,
        outputs=0,
        buffers=0,
    )


def test_tries_of_one_trace_count_the_same_memory(monkeypatch):
    """Parameters, gradients and optimizer state once counted in the first try only."""
    (once, twice) = (step_on_fakes().plan, [])

    def both(gm, facts, config, attempt, device_bytes):
        twice.extend(attempt(gm, config) for _ in range(2))
        return twice[-1]

    monkeypatch.setattr(offline, "first_that_fits", both)
    model, x = inputs(fake=True)
    offline.plan_step_offline(model, (x,), {}, config=resolve({"lowering": "aten"}, None))
    assert [step.plan.fixed for step in twice] == [once.fixed, once.fixed]
    assert once.fixed.gradients > 0
    assert [step.plan.peak_bytes for step in twice] == [once.peak_bytes] * 2
