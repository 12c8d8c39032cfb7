"""A floor that is named can be had: a step that needs more is compiled anew, in other tiles."""

import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

import memo_compile
from memo_compile.backends.retile import PlannedGraph, Retiled, _Call
from memo_compile.driver.stages import PlanRequest
from memo_compile.errors import Infeasible
from memo_compile.reporting import state
from memo_compile.units import parse_size
from tests.numerics.small import Pair, rows

pytestmark = pytest.mark.usefixtures("probes_once")

OPTIONS = {"costs": "roofline", "token_granule": 1, "token_tiles": None}
ANEW = "a graph was compiled anew, in other tiles, because its steps needed more"


class Head(nn.Module):
    """A wide layer and logits, which are returned beside the loss."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 2 * hidden)
        self.head = nn.Linear(2 * hidden, classes)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(torch.tanh(self.up(x)))
        return functional.cross_entropy(logits, y), logits


def head(hidden: int, classes: int) -> Head:
    torch._dynamo.reset()
    state.reset()
    torch.manual_seed(0)
    return Head(hidden, classes)


def assert_retiled(budget: int) -> None:
    (plan,) = memo_compile.report().plans
    assert plan.peak_bytes <= budget
    assert ANEW in memo_compile.report().notes


def test_the_floor_of_accumulation():
    """In the budget that the text names the fastest tiles fit, but not with gradients before."""
    inputs = rows(1, 64, 128), torch.arange(64)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        Pair(head(128, 64), **OPTIONS, memory_budget=1).compiled(*inputs)
    named = re.search(r"\(accumulation\): (\S+ \w+)", str(raised.value.inner_exception))
    assert named is not None
    budget = parse_size(named[1])
    pair = Pair(head(128, 64), **OPTIONS, memory_budget=budget)
    for _ in range(3):
        pair.each(lambda model: model(*inputs)[0].backward())
        pair.assert_equal()
    assert_retiled(budget)


@pytest.mark.full
def test_the_floor_of_a_second_loss_outside():
    inputs = rows(1, 256, 16), torch.arange(256)

    def distil(model: nn.Module) -> None:
        loss, logits = model(*inputs)
        (loss + logits.pow(2).mean()).backward()

    def train(budget: int) -> None:
        pair = Pair(head(16, 512), **OPTIONS, memory_budget=budget)
        for _ in range(3):
            pair.zero_grad()
            pair.each(distil)
            pair.assert_equal()

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        train(1)
    with pytest.raises(Infeasible, match="outside_loss=True") as found:
        train(raised.value.inner_exception.floor_bytes)
    train(found.value.floor_bytes)
    assert_retiled(found.value.floor_bytes)


@pytest.mark.full
def test_the_floor_of_two_forwards_whose_results_are_held():
    """The results of the one that waits are in the plan, as its frame is."""
    inputs = rows(1, 256, 16), torch.arange(256)
    options = {**OPTIONS, "max_inflight": 2}

    def train_both(model: nn.Module) -> None:
        (first, logits), (second, others) = model(*inputs), model(*inputs)
        (first + second).backward()
        assert logits.shape == others.shape

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        Pair(head(16, 512), **options, memory_budget=1).compiled(*inputs)
    budget = raised.value.inner_exception.floor_bytes
    pair = Pair(head(16, 512), **options, memory_budget=budget)
    pair.each(train_both)
    pair.assert_equal()
    (plan,) = memo_compile.report().plans
    assert plan.peak_bytes <= budget


def retiled(plan: Callable[..., PlannedGraph]) -> Retiled:
    """A graph whose first tiles refuse a request."""

    def refuse(*_: torch.Tensor) -> None:
        raise Infeasible("in these tiles", floor_bytes=9)

    state.reset()
    assembly = SimpleNamespace(
        unplanned_request=PlanRequest(existing_gradient_bytes=1),
        release=lambda: None,
        retire=lambda: None,
        follow=lambda _: None,
        reported=None,
    )
    gm = fx.symbolic_trace(lambda x: x.sin())
    return Retiled(gm, plan, PlannedGraph(run=refuse, assembly=assembly))


def test_what_fits_in_no_tiles_is_looked_for_once():
    asked = []

    def plan(_gm: fx.GraphModule, _args: object, request: PlanRequest) -> PlannedGraph:
        asked.append(request)
        raise Infeasible("in no tiles", floor_bytes=7)

    step = retiled(plan)
    for _ in range(2):
        with pytest.raises(Infeasible, match="in no tiles") as raised:
            step(torch.ones(1))
        assert raised.value.floor_bytes == 7
    assert asked == [PlanRequest(existing_gradient_bytes=1)]


def test_a_fault_while_other_tiles_are_looked_for_leaves_the_refusal(caplog):
    def plan(*_: object) -> PlannedGraph:
        raise KeyError("unexpected")

    with pytest.raises(Infeasible, match="in these tiles"):
        retiled(plan)(torch.ones(1))
    assert "please report this" in caplog.text


def test_other_tiles_are_refused_where_what_is_written_shares_memory():
    """What torch compiles for that, it leaves to guards that Dynamo no longer makes."""

    def plan(*_: object) -> PlannedGraph:
        return PlannedGraph(run=lambda *_: pytest.fail("ran"), assembly=retiled(plan)._planned[1])

    both = torch.ones(4)
    with pytest.raises(Infeasible, match="in these tiles"):
        retiled(plan)(both[:3], both[1:])


def test_what_an_input_that_is_gone_forbids_is_tried_in_the_next_call():
    """Between two calls a stand-in does not tell whether what is written shares memory."""
    asked = []

    def plan(_gm: fx.GraphModule, _args: object, request: PlanRequest) -> PlannedGraph:
        asked.append(request)
        return PlannedGraph(run=lambda x: x + 1, assembly=retiled(plan)._planned[1])

    step = retiled(plan)
    step._first_call = _Call.now([torch.ones(1)])
    assert step._planned.assembly is not None
    step._planned.assembly.retile(Infeasible("in these tiles", floor_bytes=9))
    assert torch.equal(step(torch.ones(1)), torch.full((1,), 2.0))
    assert asked == 2 * [PlanRequest(existing_gradient_bytes=1)]
