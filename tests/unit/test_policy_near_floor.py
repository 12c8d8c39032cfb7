"""What the search adds near the floor, where most plans have no room."""

import math
from dataclasses import replace

import pytest

from memo_compile.planners.move_rules import recompute_keys
from memo_compile.planners.policy import modes as policy_modes
from memo_compile.planners.policy.candidate import simulated
from memo_compile.planners.policy.candidates import NO_LAYER, CandidateSource
from memo_compile.planners.policy.modes import class_modes, layer_modes, outside_room
from memo_compile.planners.policy.slot_by_slot import MAX_WAYS_BY_SLOT, slot_by_slot
from memo_compile.step.movable import Action, Moves
from memo_compile.step.problem import OutsideBuffer
from memo_compile.step.residency import ordinary_bytes
from tests.steps.movable import KIB, movable_step, recomputer


@pytest.mark.parametrize("releases_pages", [False, True])
def test_what_kernels_allocate_counts_where_an_arena_stays_only_above_their_most(releases_pages):
    step = movable_step(3)
    last = step.problem.calls[-1]
    profile = step.problem.regions[last.region]
    own = OutsideBuffer(kind="kernel", size_bytes=64 * KIB, start=0, end=profile.num_lines)
    regions = {**step.problem.regions, last.region: replace(profile, outside=(own,))}
    problem = replace(step.problem, regions=regions, releases_pages=releases_pages)
    room = outside_room(replace(step, problem=problem))
    call = problem.first_backward
    most = max(ordinary_bytes(problem).most)
    assert most >= 64 * KIB
    before = ordinary_bytes(problem).after[call - 1]
    assert room[call] == (math.inf if releases_pages else most - before)


def test_where_others_have_no_room_beside_an_arena_one_mode_allocates_less(monkeypatch):
    """b's kernel allocates its result; late in the backward, beside gradients, that is too much.

    The knee, which does not recompute b in this step, is left out.
    """
    monkeypatch.setattr(policy_modes, "_knee", lambda modes: [])
    step = movable_step(4, bytes_per_s=KIB)
    step = replace(step, problem=replace(step.problem, releases_pages=False))
    plain = recomputer(step)
    recompute = allocating(plain, 200 * KIB)
    assert all(2 in cost.mode.slots(Action.RECOMPUTE) for cost in smallest(step, plain))
    assert any(2 not in cost.mode.slots(Action.RECOMPUTE) for cost in smallest(step, recompute))


def allocating(plain, size_bytes):
    """Regions whose kernel of b allocates so many bytes."""

    def recompute(key):
        region = plain(key)
        if 2 not in key.slots:
            return region
        end = region.profile.num_lines
        own = OutsideBuffer(kind="aten.op_b.default", size_bytes=size_bytes, start=0, end=end)
        return replace(region, profile=replace(region.profile, outside=(own,)))

    return recompute


def smallest(step, recompute):
    """The modes that recompute, of those that keep least."""
    modes = class_modes(step, "L", recompute, exact=True)
    least = min(cost.kept_bytes for cost in modes)
    return [cost for cost in modes if cost.kept_bytes == least and cost.keys]


def by_slot(step, start, most_simulated=10_000):
    """``start`` with other modes and slots in its bytes, and how many plans were simulated."""
    recompute, simulations = recomputer(step), []

    def evaluated(moves, below_s):
        simulations.append(moves)
        return simulated(step, moves, recompute)

    found, count = slot_by_slot(
        step,
        start,
        layer_modes(step, recompute),
        evaluated,
        lambda plan: plan.live_bytes <= start.live_bytes,
        most_simulated,
    )
    assert count == len(simulations)
    return found, count


@pytest.mark.parametrize("speed", [4 * KIB, 16 * KIB])
def test_a_plan_whose_layers_copy_all_gets_quicker_in_its_bytes(speed):
    """Some copy less, and some of one class differ."""
    step = movable_step(5, bytes_per_s=speed)
    modes = layer_modes(step, recomputer(step))
    copying = max(modes[0], key=lambda cost: cost.host_bytes).mode
    moves = Moves(modes=(copying,) * 5, schedule=NO_LAYER, policy="greedy")
    start = simulated(step, moves, recomputer(step))
    quicker, count = by_slot(step, start)
    assert quicker.live_bytes <= start.live_bytes
    assert quicker.cost_s < 0.97 * start.cost_s
    assert quicker.moves.schedule == NO_LAYER
    ways = {tuple(recompute_keys(step.classes["L"], mode)) for mode in quicker.moves.modes}
    assert len(ways - {()}) <= MAX_WAYS_BY_SLOT
    again, _ = by_slot(step, start)
    assert again.moves == quicker.moves
    _, few = by_slot(step, start, most_simulated=count // 2)
    assert few == count // 2


def allocating_source(num_layers, bytes_per_s, **more):
    """Plans of a step of which a kernel of b allocates more than its arena's neighbours."""
    step = movable_step(num_layers, bytes_per_s=bytes_per_s)
    step = replace(step, problem=replace(step.problem, releases_pages=False))
    return CandidateSource(step=step, recompute=allocating(recomputer(step), 200 * KIB), **more)


def test_what_helps_with_more_bytes_in_flight_is_tried_with_the_fewest_too():
    found = allocating_source(4, 16 * KIB).plans("near floor")
    wider = {plan.moves.modes for plan in found if plan.moves.schedule.widen > 1}
    assert wider
    assert wider <= {plan.moves.modes for plan in found if plan.moves.schedule.widen == 1}


def test_where_the_host_is_short_small_plans_get_quicker_as_well():
    """Those that copy least of it are no plans of greedy's sequence."""
    source = allocating_source(12, 64 * KIB)
    host = min(plan.host_bytes for plan in source.plans("steady") if plan.host_bytes)
    source = allocating_source(12, 64 * KIB, host_budget_bytes=host)
    assert source.host_is_short
    small = [plan for plan in source.plans("steady") if plan.host_bytes <= host]
    near = [plan for plan in source.plans("near floor") if plan.host_bytes <= host]
    for plan in small:
        others = [own for own in near if own.live_bytes <= plan.live_bytes]
        assert min(own.cost_s for own in others) <= plan.cost_s
    least = min(small, key=lambda plan: plan.live_bytes)
    assert any(own.live_bytes <= least.live_bytes and own.cost_s < least.cost_s for own in near)
