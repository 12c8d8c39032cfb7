"""After a step that an exception stopped, or that came otherwise than planned, training goes on."""

import copy
from collections.abc import Callable, Iterator
from functools import partialmethod
from typing import Any

import pytest
import torch
from memo_runtime.heap import COUNTED_LATE_BYTES, HeapWatch
from torch import nn

import memo_compile
from memo_compile.driver.step_watch import StepWatch
from memo_compile.errors import Infeasible
from memo_compile.reporting import state
from tests.numerics.small import Block
from tests.numerics.training import in_ci

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"  # Dynamo hides it by a filter
)

HIDDEN, LAYERS = 32, 3
LIMIT = 2e-6
"""Of each parameter's largest gradient: sums in another order."""
ROOMY, TIGHT = "1GiB", 0.9
"""A budget in which all is kept, and a share of the peak there."""


class Layers(nn.Module):
    """Layers, and between the first two a graph break if it ``breaks``."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(HIDDEN) for _ in range(LAYERS))
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if self.breaks and index == 0:
                torch._dynamo.graph_break()
        return x.pow(2).mean()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    state.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def blocks(model: Layers, budget: str | int) -> Callable[..., Any]:
    """Each layer compiled by itself."""
    for layer in model.layers:
        layer.compile(backend="memo", options={"lowering": "aten", "memory_budget": budget})
    return model


def whole(model: Layers, budget: str | int, **options: Any) -> Callable[..., Any]:
    """The model compiled at once."""
    options |= {"lowering": "aten", "memory_budget": budget}
    return torch.compile(model, backend="memo", options=options)


def trained(model: Layers, run: Callable[..., Any], *inputs: torch.Tensor) -> float:
    """One step of all ``inputs``; the largest difference to eager of a gradient, by its size."""
    eager = copy.deepcopy(model)
    for layer in eager.layers:
        layer._compiled_call_impl = None
    model.zero_grad()
    eager.zero_grad()
    sum(run(x) for x in inputs).backward()
    sum(eager(x) for x in inputs).backward()
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    return max(
        float((own.grad - its.grad).abs().max() / its.grad.abs().max()) for own, its in pairs
    )


def tight_budget(model: Layers, compiled: Callable[..., Any], inputs: list[torch.Tensor]) -> int:
    """Bytes in which a step of ``inputs`` fits, and another beside it does not."""
    own = copy.deepcopy(model)
    run = compiled(own, ROOMY)
    for _ in range(3):
        trained(own, run, *inputs)
    report = memo_compile.report()
    peak = max(plan.peak_bytes for plan in (*report.groups, *report.plans))
    torch._dynamo.reset()
    state.reset()
    return int(TIGHT * peak)


def _grows(watch: HeapWatch, _: int, num_bytes: int) -> None:
    watch.beyond_bytes = num_bytes


def _raise(_: torch.Tensor) -> None:
    raise ValueError("half way")


@pytest.mark.parametrize(
    "way",
    in_ci(["blocks", "alike", "a graph break", "two forwards"], "alike", "a graph break"),
)
def test_a_hook_that_raises_stops_one_step_only(way: str) -> None:
    """Autograd keeps the node behind such a hook until the thread's next backward."""
    model = Layers(breaks=way == "a graph break")
    two = way == "two forwards"
    alike = way == "alike"  # all layers are of one graph where the first one's input has a gradient
    inputs = [torch.randn(1, 64, HIDDEN, requires_grad=alike) for _ in range(1 + two)]

    def compiled(own: Layers, budget: str | int) -> Callable[..., Any]:
        if way in ("blocks", "alike"):
            return blocks(own, budget)
        return whole(own, budget, max_inflight=len(inputs))

    budget = tight_budget(model, compiled, inputs)
    run = compiled(model, budget)
    for _ in range(3):
        assert trained(model, run, *inputs) <= LIMIT
    unplanned = memo_compile.report().unplanned_steps
    for _ in range(2):
        hook = model.layers[1].up.weight.register_hook(_raise)
        with pytest.raises(ValueError, match="half way"):
            trained(model, run, *inputs)
        hook.remove()
        for _ in range(3):
            assert trained(model, run, *inputs) <= LIMIT
    assert memo_compile.report().unplanned_steps == unplanned


def test_a_gradient_that_another_thread_drops_late_refuses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A collective's thread may hold what it has reduced when the next step begins."""
    model = Layers()
    x = torch.randn(1, 64, HIDDEN, requires_grad=True)  # then all layers are of one graph
    budget = tight_budget(model, blocks, [x])
    waiting = iter([budget])
    see = StepWatch.waiting_gradient_bytes
    monkeypatch.setattr(
        StepWatch, "waiting_gradient_bytes", lambda own: next(waiting, None) or see(own)
    )
    run = blocks(model, budget)
    for _ in range(3):
        assert trained(model, run, x) <= LIMIT
    assert next(waiting, None) is None


def test_a_second_forward_that_no_plan_counts_is_noted() -> None:
    model = Layers()
    trained(model, whole(model, ROOMY), *torch.randn(2, 1, 64, HIDDEN))
    assert any("Set max_inflight to the number" in note for note in memo_compile.report().notes)


def test_what_the_kernel_counts_late_is_not_taken_for_memory_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tiny step whose budget is its peak; the user's own megabytes are named."""
    model = Layers()
    x = torch.randn(1, 64, HIDDEN)
    budget = tight_budget(model, whole, [x])
    run = whole(model, budget)
    for beyond in (COUNTED_LATE_BYTES, 2 * COUNTED_LATE_BYTES):
        monkeypatch.setattr(HeapWatch, "check", partialmethod(_grows, num_bytes=beyond))
        trained(model, run, x)
        notes = [note for note in memo_compile.report().notes if "no plan knows of" in note]
        assert len(notes) == (beyond > COUNTED_LATE_BYTES)


LENGTHS = [(65, 33), (65, 65), (33, 65), (65, 33), (33, 33), (65, 65)]


@pytest.mark.full
def test_two_lengths_live_together_in_any_order_where_their_plans_fit() -> None:
    model = Layers()
    roomy = [torch.randn(1, 65, HIDDEN) for _ in range(2)]

    def compiled(own: Layers, budget: str | int) -> Callable[..., Any]:
        return whole(own, budget, max_inflight=2)

    budget = tight_budget(model, compiled, roomy)
    run = compiled(model, budget)
    assert trained(model, run, *roomy) <= LIMIT
    for lengths in LENGTHS:
        inputs = [torch.randn(1, length, HIDDEN) for length in lengths]
        assert trained(model, run, *inputs) <= LIMIT
    report = memo_compile.report()
    assert report.unplanned_steps == 0
    assert not report.groups


@pytest.mark.full
def test_more_lengths_together_than_plans_have_room_for_are_said() -> None:
    """Each of them has run before, two at a time."""
    model = Layers()
    inputs = [torch.randn(1, length, HIDDEN) for length in (65, 49, 33)]

    def compiled(own: Layers, budget: str | int) -> Callable[..., Any]:
        return whole(own, budget, max_inflight=2)

    budget = tight_budget(model, compiled, [inputs[0], inputs[0]])
    run = compiled(model, budget)
    for pair in (inputs[:2], inputs[1:], inputs[::2]):
        assert trained(model, run, *pair) <= LIMIT
    assert not any("their sum may exceed" in note for note in memo_compile.report().notes)
    assert trained(model, run, *inputs) <= LIMIT
    assert any("their sum may exceed" in note for note in memo_compile.report().notes)


def test_an_order_that_was_refused_is_planned_for() -> None:
    """Beyond max_inflight the graphs are planned together, in the order that was seen."""
    model = Layers()
    # Large enough that what the process takes meanwhile does not count.
    long, short = torch.randn(1, 521, HIDDEN), torch.randn(1, 265, HIDDEN)

    def compiled(own: Layers, budget: str | int) -> Callable[..., Any]:
        return whole(own, budget)

    budget = int(1.15 * tight_budget(model, compiled, [long, short]) / TIGHT)
    run = compiled(model, budget)
    for _ in range(3):
        assert trained(model, run, long, short) <= LIMIT
    with pytest.raises(Infeasible, match="order of the steps before"):
        trained(model, run, short, long)
    for _ in range(3):
        assert trained(model, run, short, long) <= LIMIT
