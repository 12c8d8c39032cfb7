"""Blocks in checkpoints of the user's: dropped, run again bit by bit, planned as groups."""

import functools
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from memo_runtime.arena import arena_of
from memo_runtime.leases import leases
from torch import nn
from torch.utils.checkpoint import checkpoint

import memo_compile
from memo_compile.driver import around, joint_steps, step_watch
from memo_compile.driver.joint_plan import JointStepPlan
from memo_compile.driver.joint_steps import MAX_UNPLANNABLE
from memo_compile.errors import Infeasible
from tests.numerics.test_saved_tensor_hooks import WIDTH, Blocks, checkpointed

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"  # Dynamo hides it by a filter
)

COUNT, ROWS = 4, 24


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert not any(slab.leased for slab in arena_of(torch.device("cpu"))._slabs)
    assert not leases.any_live()


def group() -> Any:
    (found,) = memo_compile.report().groups
    return found


KINDS = pytest.mark.parametrize(
    ("reentrant", "inner"), [(False, 1), (False, 2), (True, 1), (True, 2)]
)


@KINDS
def test_planned_from_the_second_step_on(
    reentrant: bool, inner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a reentrant checkpoint the first forwards are not seen: its second step is planned."""
    blocks = Blocks(count=COUNT)
    run = functools.partial(checkpointed, inner=inner, use_reentrant=reentrant)
    for _ in range(1 + reentrant):
        blocks.step(run, rows=ROWS)
    first = memo_compile.report().unplanned_steps

    def never(*_: Any) -> Any:
        raise AssertionError("the group is planned, and nobody looks around any more")

    monkeypatch.setattr(JointStepPlan, "plan_and_bind", never)
    monkeypatch.setattr(step_watch.StepWatch, "_look_around", never)
    monkeypatch.setattr(around, "_modules", never)
    for _ in range(3):
        blocks.step(run, rows=ROWS)
    report = memo_compile.report()
    assert report.active
    assert report.unplanned_steps == first
    assert group().num_instances == inner


def bytes_of(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


@KINDS
def test_a_budget_counts_the_whole_model_and_what_checkpoints_keep(
    reentrant: bool, inner: int
) -> None:
    free = Blocks(count=COUNT)
    run = functools.partial(checkpointed, inner=inner, use_reentrant=reentrant)
    free.step(run, rows=ROWS)
    free.step(run, rows=ROWS)
    peak = group().peak_bytes
    kept = COUNT // inner * ROWS * WIDTH * 4
    assert peak >= 2 * bytes_of(free.compiled) + kept  # parameters and gradients
    assert _planned_inputs() >= kept
    tight = Blocks(count=COUNT, memory_budget=peak - 2000, debug=("poison", "copies-late"))
    for _ in range(4):
        tight.step(run, rows=ROWS)
    assert memo_compile.report().active
    assert joint_steps.FIRST_STEP in memo_compile.report().notes
    assert group().peak_bytes <= peak - 2000
    never = Blocks(count=COUNT, memory_budget=peak - 2 * bytes_of(free.compiled))
    with pytest.raises(Infeasible, match="budget"):
        _steps(never, run)


def _planned_inputs() -> int:
    plans = [own for own in gc.get_objects() if type(own) is JointStepPlan]
    (planned,) = [own.planned for own in plans if own.reported in memo_compile.report().groups]
    return planned.plan.fixed.inputs


def _steps(blocks: Blocks, run: Any) -> None:
    for _ in range(3):
        blocks.step(run, rows=ROWS)


def test_gradients_that_are_kept_are_planned_for() -> None:
    blocks = Blocks(count=COUNT)
    run = functools.partial(checkpointed, inner=1)
    for _ in range(2):
        blocks.step(run, rows=ROWS)
    before = group().peak_bytes
    blocks.keeps_gradients = True
    for _ in range(3):
        blocks.step(run, rows=ROWS)
    assert group().peak_bytes == before + bytes_of(blocks.compiled[0])
    assert memo_compile.report().active


def test_more_blocks_than_planned_and_blocks_without_a_checkpoint() -> None:
    blocks = Blocks(count=COUNT)
    few = functools.partial(checkpointed, inner=1)
    for _ in range(2):
        blocks.step(lambda own, x: few(own[:3], x), rows=ROWS, of=3)
    for run in (few, _plainly, few, _half_of_them):
        for _ in range(3):
            blocks.step(run, rows=ROWS)


def _plainly(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


def _half_of_them(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return checkpointed(blocks[: COUNT // 2], _plainly(blocks[COUNT // 2 :], x))


def test_an_order_that_is_not_planned_is_looked_at_in_two_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Backwards in the order of their forwards: nobody searches the process for models for ever."""
    looks = []
    search = around._modules
    monkeypatch.setattr(around, "_modules", lambda: looks.append(1) or search())
    blocks = Blocks(count=2).compiled
    for _ in range(MAX_UNPLANNABLE + 3):
        x = [torch.randn(ROWS, WIDTH, requires_grad=True) for _ in blocks]
        outs = [block(own).square().mean() for block, own in zip(blocks, x, strict=True)]
        for out in outs:
            out.backward()
    assert len(looks) <= MAX_UNPLANNABLE
    for _ in range(3):  # an order that has a plan gets it all the same
        _plainly(blocks, torch.randn(ROWS, WIDTH, requires_grad=True)).square().mean().backward()
    assert group().num_instances == 2


def test_the_pages_of_dropped_forwards_go_back_behind_the_last_one() -> None:
    """Before it the next forward uses them at once."""
    blocks = Blocks(count=3, debug=())
    run = functools.partial(checkpointed, inner=1)
    for _ in range(2):
        blocks.step(run, rows=ROWS)
    x, held = torch.randn(ROWS, WIDTH, requires_grad=True), []
    for block in blocks.compiled:
        x = run([block], x)
        held.append(any(slab.resident_bytes for slab in arena_of(x.device)._slabs))
    assert held == [True, True, False]
    x.sum().backward()


def every_second(blocks: nn.ModuleList, x: torch.Tensor, **options: Any) -> torch.Tensor:
    """Blocks in checkpoints and others in turns."""
    for at, block in enumerate(blocks):
        x = block(x) if at % 2 else checkpoint(block, x, **options)
    return x


def nested(blocks: nn.ModuleList, x: torch.Tensor, **options: Any) -> torch.Tensor:
    """Each block in a checkpoint, and pairs of those in another."""

    def pair(first: int, x: torch.Tensor) -> torch.Tensor:
        for block in blocks[first : first + 2]:
            x = checkpoint(block, x, **options)
        return x

    for first in range(0, len(blocks), 2):
        x = checkpoint(pair, first, x, use_reentrant=False)
    return x


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("order", [every_second, nested])
def test_blocks_that_are_run_again_while_others_wait(order: Any, reentrant: bool) -> None:
    """From the third step on nothing is unplanned, also under a budget."""
    run, budget = functools.partial(order, use_reentrant=reentrant), None
    for debug in ("copies-early", "copies-late"):
        blocks = Blocks(count=COUNT, memory_budget=budget, debug=("poison", debug))
        for _ in range(2):
            blocks.step(run, rows=ROWS)
        first = memo_compile.report().unplanned_steps
        for _ in range(2):
            blocks.step(run, rows=ROWS)
        report = memo_compile.report()
        assert report.active
        assert report.unplanned_steps == first
        assert not [note for note in report.notes if "max_inflight" in note]
        if budget is not None:
            assert group().peak_bytes <= budget
        budget = group().peak_bytes - 2000


def test_copies_of_blocks_that_are_run_again_while_others_wait() -> None:
    """What a dropped forward has copied to the host is let go of."""
    run = functools.partial(every_second, use_reentrant=False)
    for debug in ("copies-early", "copies-late"):
        blocks = Blocks(count=5, policy="full-offload", debug=("poison", debug))
        _steps(blocks, run)
        assert group().offloaded_bytes
        blocks.keeps_gradients = True
        _steps(blocks, run)
        _steps(blocks, _plainly)
