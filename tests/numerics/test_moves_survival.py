"""Steps that offload and recompute survive what users do: rows of the table of situations.

Row 22 (collectives are never recomputed) is in tests/graph/test_recompute_pass.py, row 33 (a stale
bandwidth) in tests/unit/test_bandwidth.py.
"""

import gc
import itertools
import logging

import pytest
import torch
from memo_runtime import host_store
from memo_runtime.arena import ArenaError, DeviceArena, Slab, arena_of
from memo_runtime.host_store import HostPool, HostStoreError
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

import memo_compile
from memo_compile.config import MemoConfig
from memo_compile.driver import assemble
from memo_compile.driver.tile_order import TOKEN_TILES
from memo_compile.errors import ConfigError, Infeasible
from memo_compile.planners.policy import candidates
from memo_compile.planners.solver import SolveStatus
from memo_compile.reporting import state
from memo_compile.step.plans import Plan
from tests.numerics.small import CPU, Pair, Stack, leased_slabs, rows, watched_calls
from tests.numerics.training import assert_planned, in_ci, memo_compiled

NUM_ROWS = 32
LAYERS = 3
MOVING = {"costs": "roofline", "token_granule": 4, "token_tiles": 1}
MIX = {**MOVING, "policy": "memo", "alpha": 0.5}
OUT = {**MOVING, "policy": "full-offload"}
AGAIN = {**MOVING, "policy": "full-recompute"}
SCHEDULES = ("poison", "poison,copies-late", "poison,copies-early")


def x(seed: int) -> torch.Tensor:
    return rows(seed, NUM_ROWS)


def moved_pair(**options: object) -> Pair:
    return Pair(Stack(num_layers=LAYERS), **options)


def assert_moved(*, offloads: bool = True, again: bool = True) -> None:
    plan = memo_compile.report().plans[-1]
    assert (plan.offloaded_bytes > 0, plan.recomputed_bytes > 0) == (offloads, again)


def inner_error(model: nn.Module, **options: object) -> BaseException:
    """What the backend raised for one forward."""
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        memo_compiled(model, **options)(x(1))
    return raised.value.inner_exception


@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_memory_is_given_back_between_steps_and_taken_again(schedule):
    pair, arena = moved_pair(**OUT, debug=schedule), arena_of(CPU)
    pair.assert_step(x(1))
    assert memo_compile.release() >= memo_compile.report().plans[-1].arena_bytes > 0
    assert arena.size_bytes == 0
    assert not arena.host.stores
    assert memo_compile.release() == 0
    pair.assert_step(x(2))
    assert_moved(again=False)


def test_what_a_live_step_holds_is_not_given_back():
    model = Stack(num_layers=LAYERS)
    run = memo_compiled(model, **OUT)
    loss = run(x(1)).sum()
    assert memo_compile.release() == 0
    assert leased_slabs()
    loss.backward()
    gradient = model.entry.weight.grad.clone()
    assert memo_compile.release() > 0
    model.zero_grad()
    run(x(1)).sum().backward()
    assert torch.equal(model.entry.weight.grad, gradient)


def test_a_budget_that_is_met_in_the_same_memory_says_so_once():
    for policy in ("full-offload", "save", "full-offload"):
        options = {**MOVING, "policy": policy, "memory_budget": "1GiB"}
        memo_compiled(Stack(num_layers=LAYERS), **options)(x(1)).sum().backward()
        told = [note for note in memo_compile.report().notes if "host_budget=0" in note]
        assert len(told) == 1


@pytest.mark.parametrize(
    ("options", "schedule"),
    in_ci(
        itertools.product((MIX, OUT, AGAIN), SCHEDULES),
        *zip((MIX, OUT, AGAIN), SCHEDULES, strict=True),
    ),
    ids=lambda value: value["policy"] if isinstance(value, dict) else value,
)
def test_retained_graph_runs_twice(options, schedule):
    """Row 5: what the first backward reloaded over is there again for the second."""
    pair = moved_pair(**options, debug=schedule)

    def twice(model):
        loss = model(x(1))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()

    pair.each(twice)
    pair.assert_equal()
    pair.assert_step(x(2))
    assert_planned(1)
    assert leased_slabs() == 0


def test_double_backward_is_refused():
    """Row 6: as in a step without copies, and the next step is right."""
    pair = moved_pair(**MIX)
    loss = pair.compiled(x(1))
    gradients = torch.autograd.grad(loss, list(pair.ours.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradients[0].sum().backward()
    del loss, gradients
    gc.collect()
    pair.assert_step(x(2))
    assert_planned(1)
    assert leased_slabs() == 0


@pytest.mark.parametrize(
    ("error", "schedule"),
    in_ci(
        [(ValueError, "poison"), (KeyboardInterrupt, "poison,copies-late")],
        (KeyboardInterrupt, "poison,copies-late"),
    ),
)
def test_error_at_every_instruction(monkeypatch, error, schedule):
    """Rows 7 and 8: at every region call, issue and wait; the next step equals a fresh one."""
    calls = watched_calls(monkeypatch)
    pair = moved_pair(**MIX, debug=schedule)
    pair.assert_step(x(0))
    assert_moved()
    num_calls = calls.count
    assert num_calls > 2 * (2 + LAYERS) + 8  # regions, and at least four copies with their waits
    calls.error = error
    for position in range(num_calls):
        calls.count, calls.fail_at = 0, position
        with pytest.raises(error, match=f"injected at region call {position}"):
            pair.compiled(x(1)).backward()
        calls.fail_at = None
        gc.collect()
        assert leased_slabs() == 0
        pair.assert_step(x(2 + position))
    assert_planned(1)


@pytest.mark.parametrize("schedule", in_ci(SCHEDULES, SCHEDULES[-1]))
def test_dropped_forward_with_copies_in_flight(schedule):
    """Row 3: the frames go back when the copies have ended; the next step may use them at once."""
    pair = moved_pair(**OUT, debug=schedule, copy_bytes_per_s=1e6)
    for seed in range(3):
        loss = pair.compiled(x(seed))
        assert leased_slabs() == 1
        del loss
        gc.collect()
        assert leased_slabs() == 0
        pair.assert_step(x(10 + seed))
    assert_planned(1)


@pytest.mark.parametrize("options", in_ci([MIX, OUT], MIX), ids=["mix", "out"])
def test_two_live_forwards(options):
    """Row 2: each offloads into a host frame of its own."""
    pair = moved_pair(**options, max_inflight=2)

    def both(model):
        first, second = model(x(1)), model(x(2))
        first.backward()
        third = model(x(3))
        second.backward()
        third.backward()

    pair.each(both)
    pair.assert_equal()
    assert_planned(1)
    assert leased_slabs() == 0


def test_a_forward_too_many_moves_in_ordinary_memory():
    """Row 2: beyond max_inflight the same program runs on frames that are freed with it."""
    pair = moved_pair(**MIX)
    pair.each(lambda model: (model(x(1)) + model(x(2)) + model(x(3))).backward())
    pair.assert_equal()
    assert memo_compile.report().unplanned_steps == 2
    assert_moved()
    assert leased_slabs() == 0


def test_gradient_accumulation():
    """Row 1: gradients stay out of the frame that reloads write into."""
    pair = moved_pair(**MIX)

    def accumulate(model):
        for seed in (1, 2, 3):
            model(x(seed)).backward()

    pair.each(accumulate)
    pair.assert_equal()
    assert_planned(1)
    assert_moved()


def test_inputs_written_between_forward_and_backward():
    """Row 26: what is recomputed from an input would be wrong; the step says so instead."""

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

        def forward(self, value, scale):
            for layer in self.layers:
                value = layer((value * scale).tanh())
            return value.pow(2).mean()

    pair = Pair(Late(), **AGAIN)
    scale = torch.full((NUM_ROWS, 32), 0.5)
    loss = pair.compiled(x(1), scale)
    scale.mul_(3)
    with pytest.raises(RuntimeError, match=r"written in place|modified by an inplace operation"):
        loss.backward()
    del loss
    gc.collect()
    pair.assert_step(x(2), scale)
    assert_moved(offloads=False)
    assert leased_slabs() == 0


def test_a_slice_of_an_input_is_watched_too():
    """Row 26: the step keeps a view; the user writes through the whole tensor."""

    class Sliced(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 16))

        def forward(self, value):
            return (value[:, 16:] * self.weight).tanh().sum()

    pair = Pair(Sliced())
    value = x(1)
    loss = pair.compiled(value)
    value.add_(1)
    with pytest.raises(RuntimeError, match=r"written in place|modified by an inplace operation"):
        loss.backward()
    del loss
    gc.collect()
    pair.assert_step(value)


def save_plan() -> Plan:
    """The plan of the stack that keeps everything; nothing of it is left."""
    torch._dynamo.reset()
    memo_compiled(Stack(num_layers=LAYERS), **MOVING, policy="save")(x(1)).backward()
    plan = memo_compile.report().plans[-1]
    torch._dynamo.reset()
    state.reset()
    return plan


def save_peak() -> int:
    return save_plan().peak_bytes


def test_host_budget_that_is_too_small():
    """Row 12: the error names host memory, before anything has run."""
    error = inner_error(Stack(num_layers=LAYERS), **OUT, memory_budget=save_peak(), host_budget=512)
    assert isinstance(error, Infeasible)
    assert "host memory" in str(error)
    assert "host_budget is 512 B" in str(error)


def test_host_budget_that_the_machine_has_not():
    """Row 12: never a silent clamp."""
    error = inner_error(Stack(num_layers=LAYERS), **OUT, host_budget="1000TiB")
    assert isinstance(error, ConfigError)
    assert "host_budget" in str(error)
    assert "free host memory" in str(error)


def test_host_memory_is_refused(monkeypatch):
    """Row 13: at compile time, with the size and the option to change; no step has run."""

    def refuse(*_):
        raise OSError(12, "Cannot allocate memory")

    # What another test has left in the pool must not serve this one.
    monkeypatch.setattr(arena_of(CPU), "host", HostPool())
    monkeypatch.setattr(host_store.mmap, "mmap", refuse)
    error = inner_error(Stack(num_layers=LAYERS), **OUT, max_inflight=3)
    assert isinstance(error, HostStoreError)
    assert "host_budget" in str(error)
    assert " B as shm" in str(error)
    assert leased_slabs() == 0


@pytest.mark.parametrize(
    "options",
    in_ci(
        [{"strict": True}, {"strict": False}, {"memory_budget": "1GiB"}],
        {"strict": False},
    ),
)
def test_host_memory_that_is_refused_at_every_size(monkeypatch, caplog, options):
    """Row 13: an error, not plain Inductor; the graph was tried in tiles as well."""

    def refuse(self, kind, size_bytes, plan_key):
        raise HostStoreError(f"memo: refused {size_bytes} B as {kind}. Lower host_budget")

    monkeypatch.setattr(HostPool, "acquire", refuse)
    out = {name: value for name, value in OUT.items() if name != "token_tiles"}
    with caplog.at_level(logging.INFO, logger="memo"):
        error = inner_error(Stack(num_layers=LAYERS), **out, **options)
    assert isinstance(error, HostStoreError)
    assert "no smaller plan was found" in str(error)
    for tiles in (1, TOKEN_TILES):
        assert f"in {tiles} tiles of tokens: memo: refused" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert leased_slabs() == 0


def test_the_arena_is_refused_at_the_start(monkeypatch):
    """Row 14: before the first step, as an OutOfMemoryError with the size."""

    def refuse(self, size_bytes):
        raise ArenaError(f"memo: cpu refused {size_bytes} B for the arena of a step")

    monkeypatch.setattr(DeviceArena, "acquire", refuse)
    error = inner_error(Stack(num_layers=LAYERS), **MOVING, memory_budget="1GiB")
    assert isinstance(error, torch.OutOfMemoryError)
    assert "arena" in str(error)


def test_a_smaller_plan_for_the_arena_that_the_device_has(monkeypatch, caplog):
    """Row 14: planned again for less, and what fits is said."""
    acquire = DeviceArena.acquire
    limit = save_plan().arena_bytes * 9 // 10

    def refuse(self, size_bytes):
        if size_bytes > limit:
            raise ArenaError(f"memo: cpu refused {size_bytes} B for the arena of a step")
        return acquire(self, size_bytes)

    monkeypatch.setattr(DeviceArena, "acquire", refuse)
    with caplog.at_level(logging.WARNING, logger="memo"):
        pair = Pair(Stack(num_layers=LAYERS), **MOVING)
        for seed in (1, 2):
            pair.assert_step(x(seed))
    assert_planned(1)
    assert memo_compile.report().plans[-1].arena_bytes <= limit
    (note,) = (note for note in memo_compile.report().notes if "Planned again" in note)
    assert "arena" in note
    assert note.removeprefix("memo: ") in caplog.text
    assert memo_compile.report().plans[-1].budget_bytes is None

    def accumulate(model):
        for seed in (3, 4, 5):
            model(x(seed)).backward()

    pair.zero_grad()
    pair.each(accumulate)  # gradients that are kept make the peak larger, the arena not
    pair.assert_equal()
    assert_planned(1)


@pytest.mark.full
@pytest.mark.parametrize("strict", in_ci([False, True], False))
def test_an_arena_that_is_refused_at_every_size(monkeypatch, strict):
    """Row 14: an OutOfMemoryError, not plain Inductor; the graph was tried in tiles as well."""
    asked = []

    def refuse(self, size_bytes):
        asked.append(size_bytes)
        raise ArenaError(f"memo: cpu refused {size_bytes} B for the arena of a step")

    monkeypatch.setattr(DeviceArena, "acquire", refuse)
    moving = {name: value for name, value in MOVING.items() if name != "token_tiles"}
    error = inner_error(Stack(num_layers=LAYERS), **moving, strict=strict)
    assert isinstance(error, ArenaError)
    assert "no smaller plan was found" in str(error)
    assert min(asked) < max(asked)


def test_a_refusal_says_how_often_the_step_was_planned_again(monkeypatch):
    """Row 14: a smaller plan may exist that was not tried; the message does not deny it."""

    def refuse(self, size_bytes):
        raise ArenaError(f"memo: cpu refused {size_bytes} B for the arena of a step")

    monkeypatch.setattr(DeviceArena, "acquire", refuse)
    monkeypatch.setattr(assemble, "MAX_REFUSALS", 1)
    error = inner_error(Stack(num_layers=LAYERS), **MOVING)
    assert "the step was planned again 1 times" in str(error)
    assert "no smaller plan was found" not in str(error)


def test_a_smaller_plan_for_the_host_memory_that_there_is(monkeypatch):
    """Row 13: what the host refuses is planned again for less."""
    asked = []
    acquire = HostPool.acquire

    def refuse(self, kind, size_bytes, plan_key):
        asked.append(size_bytes)
        if size_bytes == asked[0]:
            raise HostStoreError(f"memo: refused {size_bytes} B as {kind}. Lower host_budget")
        return acquire(self, kind, size_bytes, plan_key)

    monkeypatch.setattr(HostPool, "acquire", refuse)
    pair = Pair(Stack(num_layers=LAYERS), **MOVING, policy="memo")
    for seed in (1, 2):
        pair.assert_step(x(seed))
    assert asked[0] > max(asked[1:]) > 0
    assert memo_compile.report().plans[-1].offloaded_bytes > 0
    assert [note for note in memo_compile.report().notes if "Planned again: arena" in note]


def test_pageable_memory_for_pinned_memory_that_is_refused(monkeypatch):
    """Row 13: planned again with the speed of pageable copies; here nothing can be pinned."""

    def kind(config, _):
        return "pinned" if config.host_store == "auto" else config.host_store

    monkeypatch.setattr(MemoConfig, "host_kind", kind)
    pair = moved_pair(**OUT)
    for seed in (1, 2):
        pair.assert_step(x(seed))
    assert_planned(1)
    assert [note for note in memo_compile.report().notes if "go through pageable memory" in note]


@pytest.mark.parametrize("in_backward", [False, True])
def test_memory_beside_the_arena_runs_out(monkeypatch, caplog, tmp_path, in_backward):
    """Row 15: the error is torch's own; frames go back, the plan is on disk, the option named."""
    pair = moved_pair(**MIX, dump=str(tmp_path))
    pair.assert_step(x(1))
    calls = watched_calls(monkeypatch)
    loss = pair.compiled(x(1))
    calls.error = torch.OutOfMemoryError
    calls.fail_at = calls.count + 2 if in_backward else 2
    if not in_backward:
        calls.count = 0
    with pytest.raises(torch.OutOfMemoryError) as raised:
        loss.backward() if in_backward else pair.compiled(x(2))
    del loss
    gc.collect()
    (said,) = raised.value.__notes__
    assert "memory_budget" in said
    assert said in caplog.text
    (folder,) = tmp_path.glob("memo-out-of-memory-*")
    assert str(folder) in said
    assert (folder / "plan.json").exists()
    assert leased_slabs() == 0
    calls.fail_at = None
    pair.assert_step(x(3))


def test_what_the_device_refuses_is_named():
    """Row 14: size, device, reason, what to change."""
    with pytest.raises(ArenaError, match=r"cpu refused \d+ B for the arena.*memory_budget"):
        Slab(torch.device("cpu"), 2**60)
    slab = Slab(torch.device("cpu"), 512)
    with pytest.raises(ArenaError, match="refused"):
        slab.grow(2**60)
    slab.grow(1024)
    assert slab.size_bytes == 1024


@pytest.mark.parametrize("options", in_ci([MIX, OUT], OUT), ids=["mix", "out"])
def test_slow_link(options):
    """Row 16: the step stalls, and says for how long."""
    pair = moved_pair(**options, copy_bytes_per_s=2e6)
    for seed in (1, 2):
        pair.assert_step(x(seed))
    plan = memo_compile.report().plans[-1]
    assert plan.stall_s > 0.2 * plan.offloaded_bytes / 2e6
    assert_planned(1)


def test_two_offloaders_do_not_disturb_each_other():
    """Row 19: the step is right and planned with and without the other."""
    pair = moved_pair(**MIX)
    with torch.autograd.graph.save_on_cpu():
        pair.assert_step(x(1))
        pair.assert_step(x(2))
    pair.assert_step(x(3))
    assert_planned(1)


class Selective(Stack):
    """Products by the policy of the user's checkpoint, the rest preferably recomputed."""

    def __init__(self, decision: str) -> None:
        super().__init__(num_layers=LAYERS)
        policy = getattr(torch_checkpoint.CheckpointPolicy, decision)
        prefer = torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)

        def choose(_, op, *args, **kwargs):
            return policy if op in products else prefer

        self.context = lambda: torch_checkpoint.create_selective_checkpoint_contexts(choose)

    def features(self, x):
        x = self.entry(x).tanh()
        for layer in self.layers:
            x = torch_checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=self.context)
        return x


@pytest.mark.parametrize("decision", ["MUST_SAVE", "PREFER_SAVE"])
def test_the_users_own_checkpoint(decision):
    """Row 20: MUST_SAVE is never recomputed, PREFER_SAVE gives way to the plan; both are said."""
    pair = Pair(Selective(decision), **AGAIN)
    for seed in (1, 2):
        pair.assert_step(x(seed))
    assert_planned(1)
    report = memo_compile.report()
    products = [row for row in report.plans[-1].decisions if "addmm" in row.tensor]
    assert products
    made_again = {row.decision for row in products if "layers" in row.layer_class}
    assert ("RECOMPUTE" in made_again) == (decision == "PREFER_SAVE")
    (note,) = [note for note in report.notes if "checkpoint()" in note]
    assert "PREFER_*" in note
    assert ("0 MUST_*" in note) == (decision == "PREFER_SAVE")


def test_suppressed_errors_are_loud(caplog):
    """Row 30: an infeasible budget under suppress_errors: eager runs, log and report say so."""
    model = Stack(num_layers=LAYERS)
    with (
        torch._dynamo.config.patch(suppress_errors=True),
        caplog.at_level(logging.ERROR, logger="memo"),
    ):
        memo_compiled(model, **MOVING, memory_budget=1, strict=False)(x(1)).backward()
    logged = [record for record in caplog.records if record.name == "memo"]
    assert logged
    assert {record.levelname for record in logged} == {"ERROR"}
    assert any("floor" in record.getMessage() for record in logged)
    assert not memo_compile.report().active
    assert any("floor" in note for note in memo_compile.report().notes)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    "status", in_ci([SolveStatus.TIME_LIMIT, SolveStatus.ERROR], SolveStatus.ERROR)
)
def test_solver_that_finds_nothing(monkeypatch, status):
    """Row 32: greedy and the named plans remain; the budget holds, and so do the gradients."""
    asked = []

    def nothing(*args, **kwargs):
        asked.append(kwargs)
        return type("Nothing", (), {"status": status, "chosen": ()})()

    for name in ("lowest_peak", "solve_modes"):
        monkeypatch.setattr(candidates, name, nothing)
    peak = save_peak()
    floor = inner_error(Stack(num_layers=LAYERS), **MOVING, memory_budget=1).floor_bytes
    assert floor < peak
    assert asked
    torch._dynamo.reset()
    budget = (floor + peak) // 2
    pair = moved_pair(**MOVING, memory_budget=budget)
    for seed in (1, 2):
        pair.assert_step(x(seed))
    plan = memo_compile.report().plans[-1]
    assert plan.peak_bytes <= budget
    assert plan.offloaded_bytes + plan.recomputed_bytes > 0


def test_never_worse_than_full_recomputation():
    """Row 32: what full recomputation fits, every budget policy fits."""
    torch._dynamo.reset()
    memo_compiled(Stack(num_layers=LAYERS), **AGAIN)(x(1)).backward()
    peak = memo_compile.report().plans[-1].peak_bytes
    torch._dynamo.reset()
    pair = moved_pair(**MOVING, memory_budget=peak)
    pair.assert_step(x(1))
    assert memo_compile.report().plans[-1].peak_bytes <= peak
