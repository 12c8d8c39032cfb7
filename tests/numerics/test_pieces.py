"""Graphs that graph breaks cut apart run as one step under one budget, with numbers of eager."""

import copy
import gc
import time
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import pytest
import torch
from memo_runtime.arena import arena_of
from memo_runtime.leases import leases
from torch import nn
from torch._dynamo.convert_frame import register_bytecode_hook

import memo_compile
from memo_compile.errors import Infeasible
from memo_compile.reporting import state
from tests.numerics.small import Block, in_two_threads
from tests.steps.running import CPU

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"  # Dynamo hides it by a filter
)

HIDDEN, ROWS, LAYERS = 32, 128, 2
LIMIT = 2e-6
"""Of each parameter's largest gradient: sums in another order."""
ANY = "1GiB"
"""A budget in which everything can be kept."""


@torch._dynamo.disable
def outside(x: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """Code between two graphs, which takes memory for some time."""
    if not num_bytes:
        return x
    taken = torch.ones(num_bytes // 4)
    time.sleep(0.05)
    return x * taken[0]


class Broken(nn.Module):
    """Three graphs: layers, layers, and a head that returns the loss."""

    def __init__(self, taken_bytes: int = 0) -> None:
        super().__init__()
        self.first = nn.ModuleList(Block(HIDDEN) for _ in range(LAYERS))
        self.second = nn.ModuleList(Block(HIDDEN) for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, HIDDEN)
        self.taken_bytes, self.skips, self.fails = taken_bytes, False, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.first:
            x = layer(x)
        x = outside(x, self.taken_bytes)
        if self.fails:
            _fail()
        if not self.skips:
            x = self.middle(x)
        torch._dynamo.graph_break()
        return self.head(x).pow(2).mean()

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        for layer in self.second:
            x = layer(x)
        return x


@torch._dynamo.disable
def _fail() -> None:
    raise ValueError("half way")


class Pieces:
    """A model in pieces under memo, and the same model in eager."""

    def __init__(self, budget: str | int = ANY, taken_bytes: int = 0, **more: Any) -> None:
        torch._dynamo.reset()
        state.reset()
        torch.manual_seed(0)
        self.model = Broken(taken_bytes)
        self.eager = copy.deepcopy(self.model)
        options = {
            "lowering": "aten",
            "strict": True,
            "costs": "roofline",
            "token_granule": 4,
            "memory_budget": budget,
            "optimizer_state_bytes_per_parameter": 0,
            **more,
        }
        self.run = torch.compile(self.model, backend="memo", options=options)
        self.both = ((self.model, self.run), (self.eager, self.eager))
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model, _ in self.both]

    def step(self, act: "Act | None" = None, *, zero: bool = True) -> None:
        """One step of both on the same rows."""
        x = torch.randn(ROWS, HIDDEN)
        for model, run in self.both:
            if zero:
                model.zero_grad()
            (act or _plainly)(model, run, x)
        self.compare()

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()
            for optimizer in self.optimizers:
                optimizer.step()

    def compare(self) -> None:
        pairs = zip(self.model.named_parameters(), self.eager.parameters(), strict=True)
        for (name, mine), theirs in pairs:
            assert (mine.grad is None) == (theirs.grad is None), name
            if theirs.grad is not None and mine.grad is not None:
                most = theirs.grad.abs().max().item() + 1e-12
                assert (mine.grad - theirs.grad).abs().max().item() <= LIMIT * most, name


Act = Callable[[Broken, Any, torch.Tensor], None]
"""What a step does with a model, its compiled form, and rows."""


def _plainly(_: Broken, run: Any, x: torch.Tensor) -> None:
    run(x).backward()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert not any(slab.leased for slab in arena_of(CPU)._slabs)
    assert not leases.any_live()


@pytest.mark.parametrize(
    ("policy", "schedule"),
    [
        ("full-offload", "copies-late"),
        pytest.param("full-offload", "copies-early", marks=pytest.mark.full),
        pytest.param("full-recompute", "", marks=pytest.mark.full),
    ],
)
def test_graphs_of_one_step_have_one_frame(policy: str, schedule: str) -> None:
    pieces = Pieces(policy=policy, debug=("poison", *filter(None, [schedule])))
    pieces.train(3)
    report = memo_compile.report()
    (group,) = report.groups
    assert report.active
    assert report.unplanned_steps == 0
    assert group.num_instances == len(report.plans) == 3
    assert group.check.ok
    assert group.offloaded_bytes == (group.host_bytes if policy == "full-offload" else 0)
    assert (group.recomputed_bytes > 0) == (policy == "full-recompute")
    assert group.arena_bytes < sum(plan.arena_bytes for plan in report.plans)
    assert any("in their first step" in note for note in report.notes)


def test_one_budget_bounds_their_sum() -> None:
    """A budget that each graph keeps by itself, and all of them together do not."""
    pieces = Pieces()
    pieces.train(2)
    kept = memo_compile.report()
    largest = max(plan.peak_bytes for plan in kept.plans)
    budget = (largest + kept.groups[0].peak_bytes) // 2
    assert largest < budget < kept.groups[0].peak_bytes < sum(p.peak_bytes for p in kept.plans)
    pieces = Pieces(budget, debug=("poison", "copies-late"))
    pieces.train(3)
    (group,) = memo_compile.report().groups
    assert group.peak_bytes <= budget
    assert group.offloaded_bytes + group.recomputed_bytes > 0


def test_the_floor_of_the_first_graph_is_named_as_one_of_several() -> None:
    pieces = Pieces(1, token_tiles=1)
    with pytest.raises(Infeasible, match="the step needs at least that much") as refused:
        pieces.run(torch.randn(ROWS, HIDDEN))
    assert refused.value.floor_bytes is not None
    torch._dynamo.reset()
    options = {"memory_budget": 1, "lowering": "aten", "costs": "roofline"}
    whole = torch.compile(Block(HIDDEN), backend="memo", options=options)
    with pytest.raises(Infeasible) as of_all:
        whole(torch.randn(ROWS, HIDDEN))
    # A step of another test that is still held would make this graph one of several, too.
    assert leases.any_live() or "at least" not in str(of_all.value)


@pytest.mark.full
def test_a_budget_below_their_floor_is_refused_before_the_step() -> None:
    pieces = Pieces(340_000, token_tiles=1)
    pieces.step()
    for _ in range(2):
        with pytest.raises(Infeasible, match="3 graphs of one step, planned as one") as refused:
            pieces.step()
    floor = refused.value.floor_bytes
    assert floor is not None
    assert floor > 340_000
    pieces = Pieces(floor, token_tiles=1)
    pieces.train(3)
    (group,) = memo_compile.report().groups
    assert group.peak_bytes <= floor


def accumulates(_: Broken, run: Any, x: torch.Tensor) -> None:
    for rows in x.split(ROWS // 2):
        run(torch.cat([rows, rows])).backward()


def keeps_graph(_: Broken, run: Any, x: torch.Tensor) -> None:
    loss = run(x)
    loss.backward(retain_graph=True)
    loss.backward()


def evaluates(_: Broken, run: Any, x: torch.Tensor) -> None:
    loss = run(x)
    with torch.no_grad():
        run(x)
    loss.backward()


def fails(model: Broken, run: Any, x: torch.Tensor) -> None:
    model.fails = True
    try:
        with pytest.raises(ValueError, match="half way"):
            run(x)
    finally:
        model.fails = False
    run(x).backward()


def fails_in_backward(model: Broken, run: Any, x: torch.Tensor) -> None:
    def fail(_: Any) -> None:
        raise ValueError("half way")

    hook = model.second[0].up.weight.register_hook(fail)
    with pytest.raises(ValueError, match="half way"):
        run(x).backward()
    hook.remove()
    model.zero_grad()
    run(x).backward()


def two_forwards(_: Broken, run: Any, x: torch.Tensor) -> None:
    (run(x) + run(x.flip(0))).backward()


def skips(model: Broken, run: Any, x: torch.Tensor) -> None:
    model.skips = True
    run(x).backward()
    model.skips = False


ACTS: tuple[Act, ...] = (
    accumulates,
    keeps_graph,
    evaluates,
    fails,
    fails_in_backward,
    two_forwards,
    skips,
)


def test_whatever_comes_the_numbers_are_right(subtests: Any) -> None:
    pieces = Pieces(policy="full-offload", debug=("poison", "copies-late"))
    pieces.train(2)
    for act in ACTS:
        with subtests.test(act.__name__):
            for _ in range(2):
                pieces.step(act)
            pieces.step()
            pieces.step(zero=False)
    assert memo_compile.report().groups


def test_two_threads_do_not_meet_in_one_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = Pieces(policy="full-offload")
    pieces.train(2)
    rows = torch.randn(2, ROWS, HIDDEN)

    def run(model: Any, at: int) -> Any:
        return torch.autograd.grad(model(rows[at]), list(model.parameters()))

    found = in_two_threads(monkeypatch, lambda at: run(pieces.run, at))
    eager = [run(pieces.eager, at) for at in range(2)]
    torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-6)


def test_what_runs_between_them_is_counted() -> None:
    """Memory that eager code takes between two graphs is in the plan once it was seen."""
    taken = 8 * 2**20
    pieces = Pieces(taken_bytes=taken)
    pieces.train(2)
    (group,) = memo_compile.report().groups
    assert 0.9 * taken <= group.between_bytes <= 1.1 * taken + 2**20
    assert group.peak_bytes > group.between_bytes


@pytest.mark.full
def test_graphs_in_an_order_that_is_not_planned_are_named() -> None:
    def apart(model: Broken, run: Any, x: torch.Tensor) -> None:
        first, second = run(x), run(x * 2)
        first.backward()
        second.backward()

    pieces = Pieces()
    for _ in range(3):
        pieces.step(apart)
    assert any("do not come in the opposite order" in note for note in memo_compile.report().notes)


def test_no_code_of_memo_is_traced() -> None:
    """A forward that nobody waits for ends within a function that Dynamo runs eagerly."""
    traced: list[str] = []
    model, x = Broken(), torch.randn(ROWS, HIDDEN)

    def twice() -> torch.Tensor:
        for _ in range(2):
            loss = model(x)
            torch._dynamo.graph_break()
        return loss

    def note(code: CodeType, _: CodeType) -> None:
        traced.append(code.co_filename)

    with register_bytecode_hook(note):
        options = {"lowering": "aten", "debug": "poison"}
        torch.compile(twice, backend="memo", options=options)().backward()
    assert set(traced) == {__file__}
