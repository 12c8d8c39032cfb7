"""Lynx's policies by name: what they may do, and that the choice is never slower than theirs."""

import dataclasses
import itertools

import pytest

from memo_compile.check.check_moves import check_moves, recomputations_of
from memo_compile.costs.hardware import find_hardware
from memo_compile.costs.models import find_model
from memo_compile.planners.move_rules import recompute_keys
from memo_compile.planners.place_step import place_step
from memo_compile.planners.policy import choose
from memo_compile.planners.policy.candidate import costs_with
from memo_compile.planners.policy.chooser import NothingFits
from memo_compile.planners.policy.frontier import GOOD_ENOUGH_SHARE
from memo_compile.planners.policy.lynx_policies import LYNX
from memo_compile.planners.recompute_windows import window_recompute_s
from memo_compile.step.movable import Action
from tests.steps.movable import movable_step, recomputer
from tests.steps.parallel_gpt import parallel_gpt

SHAPES = ("gpt-1.3b", "gpt-7b", "gpt-13b", "gpt-23b")
SLOW = {"link_bytes_per_s": 30e9}
HOST_BYTES = 0
"""Without copies, so that recomputation decides; with them the choice has more to choose from."""


def step_of(shape="gpt-1.3b", tp=8, num_layers=4, hardware="a100", **changed):
    found = find_model(shape)
    device = dataclasses.replace(find_hardware(hardware), **changed)
    return parallel_gpt(found, seq=2048, tp=tp, hardware=device, num_layers=num_layers)


def chosen(step, policy, budget_bytes=None, host_budget_bytes=HOST_BYTES):
    return choose(
        step,
        budget_bytes=budget_bytes,
        host_budget_bytes=host_budget_bytes,
        policy=policy,
        recompute=recomputer(step),
        place=lambda problem: place_step(problem, solver="greedy"),
    )


def budgets(step, shares=(0.15, 0.4, 0.7)):
    """Between what Lynx needs at least and what everything takes."""
    top = chosen(step, "save").plan.peak_bytes
    try:
        chosen(step, "lynx-heu", 1)
    except NothingFits as error:
        floor = error.floor_bytes
    return [int(floor + share * (top - floor)) for share in shares]


def keys_of(step, moves):
    """The regions that recompute."""
    pairs = zip(step.layers, moves.modes, strict=True)
    found = (recompute_keys(step.class_of(layer), mode) for layer, mode in pairs)
    return dict.fromkeys(itertools.chain.from_iterable(found))


@pytest.mark.parametrize("policy", LYNX)
def test_nothing_is_copied_and_all_is_proved(policy):
    step = step_of()
    for budget_bytes in budgets(step):
        found = chosen(step, policy, budget_bytes)
        assert found.plan.peak_bytes <= budget_bytes
        actions = {action for mode in found.moves.modes for action in mode.actions}
        assert actions == {Action.SAVE, Action.RECOMPUTE}
        assert found.problem.host_bytes == 0
        regions = map(recomputer(step), keys_of(step, found.moves))
        made = recomputations_of(step, found.problem, regions)
        assert check_moves(step.problem, found.problem, made).ok


def test_heu_decides_once_for_a_class_and_opt_for_each_layer():
    step = step_of(num_layers=6)
    heu, opt = (
        [chosen(step, policy, budget) for budget in budgets(step, (0.3, 0.55, 0.8))]
        for policy in LYNX
    )
    assert all(len(set(found.moves.modes)) == 1 for found in heu)
    assert any(len(set(found.moves.modes)) > 1 for found in opt)
    for apart, alike in zip(opt, heu, strict=True):
        assert apart.timeline.step_s <= alike.timeline.step_s


def test_recomputation_hides_where_a_link_is_slow():
    """A layer's windows hold all that full memory pressure makes it recompute."""
    step = step_of(link_bytes_per_s=20e9)
    found = chosen(step, "lynx-heu", budgets(step)[0])
    costs = costs_with(step, found.moves, recomputer(step))
    assert window_recompute_s(found.problem, costs) > 0
    before = chosen(step, "save").timeline.step_s
    again_s = found.timeline.step_s - before
    total_s = sum(
        costs.call_s(call) for call in found.problem.calls if call.kind.value == "recompute"
    )
    assert again_s < 0.7 * total_s


def assert_not_slower(step, policy, slack, shares, hosts):
    """At the memory that Lynx's plan takes, with so much host memory."""
    for budget_bytes in budgets(step, shares):
        lynx = chosen(step, policy, budget_bytes)
        for host_bytes in hosts:
            own = chosen(step, "auto", lynx.plan.peak_bytes, host_bytes)
            assert own.plan.peak_bytes <= lynx.plan.peak_bytes
            assert own.timeline.step_s <= lynx.timeline.step_s * (1 + slack)


def test_the_choice_is_not_slower_than_lynx_at_its_memory():
    step = step_of("gpt-23b", 8, num_layers=3, **SLOW)
    assert_not_slower(step, "lynx-heu", 1e-9, (0.4,), (HOST_BYTES,))


@pytest.mark.full
@pytest.mark.parametrize("hardware", ["a100", "h100"])
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_choice_is_never_slower_than_lynx_at_its_memory(shape, tp, hardware):
    """The integer program of ``lynx-opt`` is not solved where another plan is good enough."""
    for changed in ({}, SLOW):
        step = step_of(shape, tp, hardware=hardware, **changed)
        for policy, slack in (("lynx-heu", 1e-9), ("lynx-opt", GOOD_ENOUGH_SHARE)):
            assert_not_slower(step, policy, slack, (0.25, 0.6), (HOST_BYTES, None))


def test_a_step_of_one_device_has_lynx_without_windows():
    step = movable_step(4)
    found = chosen(step, "lynx-heu", budgets(step)[1])
    assert found.plan.peak_bytes <= budgets(step)[1]
    assert len(set(found.moves.modes)) <= 1 + len({layer.class_key for layer in step.layers})
