"""Collectives inside a planned step, in one process: a group of one rank.

A rank alone gets what it gave, so that eager execution of the same model tells what is right. The
late engine fills an output with NaN until its wait. Several ranks: tests/distributed.
"""

import gc
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from memo_runtime.leases import leases
from torch import nn

import memo_compile
from memo_compile.driver import step_planner
from memo_compile.errors import InvalidPlan
from memo_compile.reporting import state
from memo_compile.step.problem import CallKind
from tests.numerics.small import Pair, Stack, leased_slabs, rows, watched_calls
from tests.numerics.training import assert_planned, in_ci

LATE = "poison,collectives-late"
SCHEDULES = ("poison", LATE, "poison,collectives-early")
MOVING = {"costs": "roofline", "token_granule": 4, "token_tiles": 1, "comm_bytes_per_s": 1e6}
LAYERS = 2

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"  # Dynamo hides it by a filter
)


def named(new: str, old: str):
    """By its name in torch 2.13, which calls the other one deprecated, or in 2.11."""
    return getattr(functional_collectives, new, None) or getattr(functional_collectives, old)


gather = named("all_gather_single_autograd", "all_gather_tensor_autograd")
scatter = named("reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd")


@pytest.fixture(autouse=True)
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    torch._dynamo.reset()
    dist.destroy_process_group()


class Reduced(nn.Module):
    """Its block's result is the sum over the ranks."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x):
        return x + functional_collectives.all_reduce(self.block(x), "sum", dist.group.WORLD)


class Gathered(Reduced):
    """All ranks' rows go through the block; the sum is scattered."""

    def forward(self, x):
        world = dist.group.WORLD
        h = gather(x.tanh(), 0, world)
        y = scatter(self.block(h), "sum", 0, world)
        return x + y


class Exchanged(Reduced):
    """Rows go to other ranks and come back."""

    def forward(self, x):
        h = functional_collectives.all_to_all_single_autograd(x.cos(), None, None, dist.group.WORLD)
        sizes = [len(x)]
        y = functional_collectives.all_to_all_single_autograd(
            self.block(h), sizes, sizes, dist.group.WORLD
        )
        return x * y.sigmoid()


class Sharded(Reduced):
    """The first weight of its block is gathered for each use."""

    def forward(self, x):
        up = gather(self.block.up.weight, 0, dist.group.WORLD)
        return x + self.block.down(nn.functional.linear(x, up, self.block.up.bias).tanh())


def ranked(kind: type[Reduced], hidden: int = 32) -> Stack:
    model = Stack(hidden=hidden, num_layers=LAYERS)
    model.layers = nn.ModuleList(kind(layer) for layer in model.layers)
    return model


def x(seed: int, num_rows: int = 24, hidden: int = 32) -> torch.Tensor:
    return rows(seed, num_rows, hidden)


def plan():
    return memo_compile.report().plans[-1]


KINDS = {Reduced: 1, Gathered: 2, Exchanged: 2}
"""How many collectives a layer has each way."""


@pytest.mark.parametrize(
    ("kind", "schedule"),
    in_ci(
        itertools.product(KINDS, SCHEDULES),
        (Reduced, LATE),
        (Gathered, LATE),
        (Gathered, "poison"),
        (Exchanged, "poison,collectives-early"),
    ),
)
def test_gradients_are_those_of_eager(kind, schedule):
    """Three steps, one of them accumulated, of an odd number of rows and of columns."""
    pair = Pair(ranked(kind, hidden=30), debug=schedule)
    for step in range(3):
        if step < 2:
            pair.zero_grad()
        pair.each(lambda model, step=step: model(x(step, 23, 30)).backward())
        pair.assert_equal()
    assert_planned()
    assert plan().num_collectives == 2 * LAYERS * KINDS[kind]


@pytest.mark.parametrize(
    ("kind", "policy", "schedule"),
    in_ci(
        itertools.product(
            (Reduced, Gathered),
            ("full-recompute", "full-offload"),
            ("poison,collectives-late,copies-late", "poison,collectives-early,copies-early"),
        ),
        (Reduced, "full-recompute", "poison,collectives-late,copies-late"),
        (Gathered, "full-offload", "poison,collectives-late,copies-late"),
        (Gathered, "full-recompute", "poison,collectives-early,copies-early"),
    ),
)
def test_policies_keep_their_gradients(kind, policy, schedule):
    pair = Pair(ranked(kind), policy=policy, debug=schedule, **MOVING)
    for step in range(2):
        pair.assert_step(x(step))
    assert_planned()
    assert plan().recomputed_bytes + plan().offloaded_bytes > 0
    if policy == "full-recompute":
        assert plan().window_recompute_s > 0


@pytest.mark.parametrize(
    ("kind", "moved", "schedule"),
    [
        (Exchanged, ("up", "down"), "copies-early"),
        (Exchanged, ("up", "down"), "copies-late"),
        (Sharded, ("down",), "copies-late"),
    ],
)
def test_weights_on_the_host_keep_their_gradients(kind, moved, schedule):
    """What a collective reads stays on the device."""
    pair = Pair(ranked(kind), weights="host", debug=f"{LATE},{schedule}", **MOVING)
    for step in range(2):
        pair.assert_step(x(step))
    assert_planned()
    blocks = [layer.block for layer in pair.ours.layers]
    expected = sum(getattr(block, name).weight.nbytes for block in blocks for name in moved)
    assert plan().training_state.parameters.host_bytes == expected


@pytest.mark.full
def test_inductor_runs_the_pieces():
    pair = Pair(ranked(Gathered), lowering="inductor", debug=LATE)
    for step in range(2):
        pair.assert_step(x(step))
    assert_planned()


def test_a_budget_holds_and_moves_what_it_must():
    """What the waits show, gathered rows among it, goes to the host and comes back."""
    Pair(ranked(Gathered), debug=LATE, **MOVING).assert_step(x(1))
    peak = plan().peak_bytes
    torch._dynamo.reset()
    state.reset()
    pair = Pair(ranked(Gathered), debug=LATE, memory_budget=peak - 6_000, **MOVING)
    for step in range(2):
        pair.assert_step(x(step))
    assert_planned()
    assert plan().peak_bytes <= peak - 6_000
    assert plan().recomputed_bytes + plan().offloaded_bytes > 0


def test_without_windows_nothing_is_hidden():
    options = {"policy": "full-recompute", **MOVING}
    pair = Pair(ranked(Gathered), debug=LATE, comm_windows=False, **options)
    pair.assert_step(x(1))
    waiting = plan()
    assert waiting.num_collectives == 4 * LAYERS
    assert waiting.window_recompute_s == 0
    assert waiting.hidden_comm_s == pytest.approx(0, abs=1e-12)
    torch._dynamo.reset()
    pair = Pair(ranked(Gathered), debug=LATE, **options)
    pair.assert_step(x(1))
    assert plan().window_recompute_s > 0
    assert plan().hidden_comm_s > 0
    assert plan().exposed_comm_s < waiting.exposed_comm_s
    assert plan().comm_wait_s > 0


def test_results_that_leave_are_the_users():
    """A reduced loss, and rows that ranks exchanged: ordinary memory, which a next step keeps."""

    class Leaving(Stack):
        def forward(self, x):
            features = self.features(x)
            world = dist.group.WORLD
            shown = gather(features, 0, world)
            loss = functional_collectives.all_reduce(
                self.head(features).pow(2).mean(), "sum", world
            )
            return loss, shown

    pair = Pair(Leaving(), debug=LATE)
    kept = []

    def step(model):
        loss, shown = model(x(1))
        (loss + shown.sum()).backward()
        kept.append(shown)

    for _ in range(2):
        pair.zero_grad()
        pair.each(step)
        pair.assert_equal()
    assert torch.allclose(kept[0], kept[2])
    assert torch.allclose(kept[0], kept[1], atol=1e-6)
    assert_planned()


def test_a_tensor_that_others_read_is_not_reduced_in_place():
    """What is reduced is read once more: saved for the backward, and added."""

    class Read(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x):
            y = self.block(x)
            total = functional_collectives.all_reduce(y * 2.0, "sum", dist.group.WORLD)
            return (x + y.exp() + total.sin()).tanh()

    model = Stack(num_layers=2)
    model.layers = nn.ModuleList(Read(layer) for layer in model.layers)
    pair = Pair(model, debug=LATE, lowering="aten")
    for step in range(2):
        pair.assert_step(x(step))
    assert_planned()


def test_an_exception_at_any_call_drains_the_ranks(monkeypatch):
    """The next step is right, and no lease, no frame and no collective is left."""
    pair = Pair(ranked(Gathered), policy="full-recompute", debug=LATE, **MOVING)
    pair.assert_step(x(1))
    calls = watched_calls(monkeypatch)
    pair.compiled(x(1)).backward()
    total = calls.count
    assert total > 16 * LAYERS
    for number in range(total):
        calls.count, calls.fail_at = 0, number
        with pytest.raises(ValueError, match="injected"):
            pair.compiled(x(1)).backward()
        gc.collect()
        assert not leases.any_live()
        assert leased_slabs() == 0
        if number % 7 == 0:
            calls.fail_at = None
            pair.assert_step(x(2))
    calls.fail_at = None
    pair.assert_step(x(2))


def test_a_collective_that_cannot_be_split_waits_in_its_region():
    """A list of tensors is reduced as one: it stays where it was."""

    class Together(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x):
            y = self.block(x)
            with torch.no_grad():
                both = functional_collectives.all_reduce_coalesced(
                    [y.detach() * 0.5, x.detach() * 0.25], "sum", dist.group.WORLD
                )
            return y + both[0] + both[1]

    model = Stack(num_layers=2)
    model.layers = nn.ModuleList(Together(layer) for layer in model.layers)
    pair = Pair(model)
    pair.assert_step(x(1))
    assert_planned()
    assert plan().num_collectives == 0


def test_blocks_of_a_group_talk_each_for_itself():
    model = ranked(Gathered)
    pair = Pair(model)
    pair.compiled = model
    memo_compile.group(list(model.layers), lowering="aten", strict=True, debug=LATE)
    for step in range(3):
        pair.assert_step(x(step))
    (found,) = memo_compile.report().groups
    assert found.num_instances == LAYERS
    assert found.num_collectives == 4 * LAYERS


def test_what_is_counted_is_what_the_program_begins(tmp_path):
    Pair(ranked(Reduced), dump=str(tmp_path)).assert_step(x(1))
    text = next(tmp_path.glob("*/*-step-program.txt")).read_text()
    words = [line.split()[0] for line in text.splitlines()]
    assert words.count(CallKind.ISSUE.value) == words.count("comm_wait") == 2 * LAYERS
    assert plan().num_collectives == 2 * LAYERS


def refused(monkeypatch, wrongly, num_times=1):
    """The checker refuses so many plans of those for which ``wrongly``; the problems of all."""
    seen, original = [], step_planner.require_valid

    def require_valid(problem, plan):
        is_refused = wrongly(problem) and sum(map(wrongly, seen)) < num_times
        seen.append(problem)
        if is_refused:
            raise InvalidPlan("refused by the test")
        return original(problem, plan)

    monkeypatch.setattr(step_planner, "require_valid", require_valid)
    return seen


def moves(problem):
    return any(call.kind in (CallKind.OFFLOAD, CallKind.RECOMPUTE) for call in problem.calls)


@pytest.mark.parametrize("policy", ["save", "full-offload"])
def test_an_order_that_the_checker_refuses_is_left_out(monkeypatch, policy):
    """What it accepts of the same plan runs."""
    seen = refused(monkeypatch, lambda problem: True)
    pair = Pair(ranked(Reduced), policy=policy, debug=LATE, strict=True, **MOVING)
    for step in range(2):
        pair.assert_step(x(step))
    assert_planned()
    assert len(seen) == 2
    assert moves(seen[-1]) == (policy == "full-offload")
    assert any("is left out: InvalidPlan: refused by the test" in note for note in notes())


def test_a_plan_that_the_checker_refuses_is_left_out_under_a_budget(monkeypatch):
    """With all its orders. The next one keeps the budget too."""
    Pair(ranked(Gathered), debug=LATE, **MOVING).assert_step(x(1))
    budget = plan().peak_bytes - 6_000
    torch._dynamo.reset()
    state.reset()
    first = []

    def wrongly(problem):
        names = sorted(call.name for call in problem.calls)
        first[:] = first or [names]
        return first == [names]

    refused(monkeypatch, wrongly, num_times=100)
    pair = Pair(ranked(Gathered), debug=LATE, memory_budget=budget, **MOVING)
    for step in range(2):
        pair.assert_step(x(step))
    assert_planned()
    assert plan().peak_bytes <= budget
    assert any("a plan of policy" in note for note in notes())


def test_a_named_policy_that_the_checker_refuses_keeps_everything(monkeypatch):
    refused(monkeypatch, moves, num_times=100)
    pair = Pair(ranked(Reduced), policy="kwai", strict=True, **MOVING)
    for step in range(2):
        pair.assert_step(x(step))
    assert_planned()
    assert any("everything is kept, nothing is moved" in note for note in notes())


def notes():
    return memo_compile.report().notes
