"""What a step meets only later: kept gradients, live forwards, regions larger than estimated."""

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import fx, nn
from torch._dynamo import convert_frame

import memo_compile
from memo_compile.backends.specialise import Specialised
from memo_compile.config import MemoConfig
from memo_compile.driver import assemble, recompute_regions
from memo_compile.driver.plan_step import plan_step
from memo_compile.driver.stages import PlanRequest
from memo_compile.errors import Infeasible
from memo_compile.lowering.aten import estimate
from memo_compile.reporting import state
from memo_compile.step.plans import Plan
from tests.numerics.small import Pair, Stack, leased_slabs, rows
from tests.numerics.training import assert_planned, memo_compiled
from tests.steps.running import SETUPS, Ready

NUM_ROWS = 32
MOVING = {"costs": "roofline", "token_granule": 4, "token_tiles": 1}


def x(seed: int) -> torch.Tensor:
    return rows(seed, NUM_ROWS)


def moved_pair(**options: object) -> Pair:
    return Pair(Stack(num_layers=4), **options)


def refusal(model: nn.Module, **options: object) -> Infeasible:
    """Why the first forward has no plan."""
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        memo_compiled(model, **options)(x(1))
    error = raised.value.inner_exception
    assert isinstance(error, Infeasible)
    torch._dynamo.reset()
    state.reset()
    return error


class WithWideWeight(nn.Module):
    """Four layers, and a weight whose gradient is larger than the arena."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Stack(num_layers=4)
        self.wide = nn.Linear(512, 600, bias=False)
        self.register_buffer("row", torch.ones(1, 512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + 0.01 * self.wide(self.row).sum()


def saved_plan(model: nn.Module) -> Plan:
    """Of a step that keeps everything."""
    torch._dynamo.reset()
    memo_compiled(model, **MOVING, policy="save")(rows(1, 256)).backward()
    plan = memo_compile.report().plans[-1]
    torch._dynamo.reset()
    state.reset()
    return plan


def test_a_step_that_is_planned_again_while_another_waits():
    """Row 2: the waiting step ends by the plan that it began with.

    The budget has room for a second forward in ordinary memory. Gradients that are kept do not fit,
    so the third forward is planned again; the second does not keep the plan from being changed.
    """
    saved = saved_plan(WithWideWeight())
    room = saved.arena_bytes + saved.fixed.outputs
    assert saved.fixed.new_gradients > room
    pair = Pair(WithWideWeight(), **MOVING, memory_budget=saved.peak_bytes + room)

    def overlapping(model):
        first, second = model(rows(1, 256)), model(rows(2, 256))
        first.backward()
        third = model(rows(3, 256))
        second.backward()
        third.backward()

    pair.each(overlapping)
    pair.assert_equal()
    plan = memo_compile.report().plans[-1]
    assert plan.offloaded_bytes + plan.recomputed_bytes > 0  # it was planned again
    assert plan.peak_bytes <= saved.peak_bytes + room
    assert memo_compile.report().unplanned_steps == 1
    assert leased_slabs() == 0


def test_a_forward_too_many_is_refused_where_it_would_break_the_budget():
    """Row 2: nothing has run; what waits ends as planned, and the next step is planned."""
    saved = saved_plan(Stack(num_layers=4))
    budget = saved.peak_bytes + saved.arena_bytes - 1
    pair = moved_pair(**MOVING, memory_budget=budget)
    loss = pair.compiled(rows(1, 256))
    with pytest.raises(Infeasible, match="max_inflight=2") as raised:
        pair.compiled(rows(2, 256))
    assert raised.value.floor_bytes is None  # with more, a plan is chosen that needs more
    loss.backward()
    pair.eager(rows(1, 256)).backward()
    pair.each(lambda model: model(rows(3, 256)).backward())
    pair.assert_equal()
    assert_planned()
    assert leased_slabs() == 0


def test_a_forward_that_only_the_collector_has_yet_to_end_does_not_count():
    saved = saved_plan(Stack(num_layers=4))
    pair = moved_pair(**MOVING, memory_budget=saved.peak_bytes)
    gc.disable()
    try:
        cycle = [pair.compiled(rows(1, 256))]
        cycle.append(cycle)
        del cycle
        pair.each(lambda model: model(rows(2, 256)).backward())
    finally:
        gc.enable()
    pair.assert_equal()
    assert_planned()


@pytest.fixture(scope="module")
def step() -> Ready:
    """One that moves slices."""
    return SETUPS["slices"].ready()


def test_a_request_leaves_nothing_behind(step):
    """What one plan had to count, the next one of the same step counts only when it is told to."""
    first, burdened, last = (
        planned_for(step, request)
        for request in (
            PlanRequest(),
            PlanRequest(
                existing_gradient_bytes=2**20,
                earlier_output_bytes=2**19,
                host_store="shm",
                granted_host_bytes=2**30,
            ),
            PlanRequest(),
        )
    )
    assert burdened.peak_bytes == first.peak_bytes + 2**20 + 2**19
    assert last == first == step.planned.plan


def lock_is_free() -> bool:
    """Whether another thread could compile now."""
    with ThreadPoolExecutor(1) as other:
        free = other.submit(convert_frame.compile_lock.acquire, blocking=False).result()
        if free:
            other.submit(convert_frame.compile_lock.release).result()
    return free


def test_nothing_else_compiles_while_a_step_is_planned_again(step, monkeypatch):
    """Row 17: Inductor's code generators are the process's; Dynamo's lock keeps threads apart."""
    free = []

    def plan(*args):
        free.append(lock_is_free())
        return plan_step(*args)

    monkeypatch.setattr(assemble, "plan_step", plan)
    step.assembly._replan(0)
    assert free == [False]
    assert lock_is_free()


def test_nothing_else_compiles_while_a_shape_is_compiled(monkeypatch):
    """Row 17: a shape may come up while another thread compiles another model."""
    free = []

    def compile_static(gm, *_):
        free.append(lock_is_free())
        return gm

    step = Specialised(fx.symbolic_trace(lambda x: x.sin()), (), MemoConfig(), compile_static)
    assert torch.equal(step(torch.ones(2)), torch.ones(2).sin())
    assert free == [False]
    assert lock_is_free()


def planned_for(step: Ready, request: PlanRequest) -> Plan:
    assembly = step.assembly
    return plan_step(assembly.lowered, assembly.config, request, assembly.known).plan


def test_the_floor_is_that_of_lowered_regions(monkeypatch):
    """What an error names can be kept, also where regions turn out larger than was estimated."""

    def too_small(region, *_):
        profile = estimate(region)
        kept = profile.outputs_of_buffers()
        buffers = (
            buffer if at in kept else replace(buffer, size_bytes=512)
            for at, buffer in enumerate(profile.buffers)
        )
        return replace(profile, buffers=tuple(buffers))

    monkeypatch.setattr(recompute_regions, "estimate", too_small)
    options = {**MOVING, "host_budget": 1}
    error = refusal(Stack(num_layers=4), **options, memory_budget=1)
    pair = moved_pair(**options, memory_budget=error.floor_bytes)
    pair.assert_step(x(1))
    assert_planned(1)
    assert memo_compile.report().plans[-1].recomputed_bytes > 0


@pytest.mark.full
def test_gradients_that_are_kept_and_do_not_fit():
    """The error says what changed since the first step, which did fit."""
    model = Stack(num_layers=4)
    floor = refusal(Stack(num_layers=4), **MOVING, memory_budget=1).floor_bytes
    compiled = memo_compiled(model, **MOVING, memory_budget=floor)
    compiled(x(1)).backward()
    with pytest.raises(Infeasible, match="set_to_none=True") as raised:
        compiled(x(2))
    assert raised.value.floor_bytes > floor
    model.zero_grad(set_to_none=True)
    compiled(x(3)).backward()


@pytest.mark.full
def test_gradients_of_another_model_do_not_count():
    """Two models of one class share their compiled step."""
    budget = refusal(Stack(num_layers=4), **MOVING, memory_budget=1).floor_bytes
    first = moved_pair(**MOVING, memory_budget=budget)
    first.assert_step(x(1))
    second = moved_pair(**MOVING, memory_budget=budget)
    second.assert_step(x(2))
    assert_planned(1)


def test_live_forwards_share_the_budget():
    """Row 2: what another live forward holds is in the plan."""

    def planned(max_inflight: int) -> Plan:
        torch._dynamo.reset()
        state.reset()
        options = {**MOVING, "policy": "save", "max_inflight": max_inflight}
        memo_compiled(Stack(num_layers=4), **options)(x(1)).backward()
        return memo_compile.report().plans[-1]

    first, second = planned(1), planned(2)
    gradients = first.fixed.new_gradients  # of one step, when the other's backward runs
    assert second.peak_bytes == first.peak_bytes + first.arena_bytes + gradients
    torch._dynamo.reset()
    state.reset()
    budget = first.peak_bytes + gradients + first.arena_bytes // 2
    pair = moved_pair(**MOVING, memory_budget=budget, max_inflight=2)
    pair.each(lambda model: (model(x(1)) + model(x(2))).backward())
    pair.assert_equal()
    assert_planned(1)
    plan = memo_compile.report().plans[-1]
    assert plan.offloaded_bytes + plan.recomputed_bytes > 0
