"""Modes of a layer, the arithmetic of a step, greedy, and the program against brute force."""

import itertools
from dataclasses import replace

import pytest

from benchmarks.layer_steps import Setting, gpt_step, recompute_of
from memo_compile.costs.hardware import find_hardware
from memo_compile.costs.models import find_model
from memo_compile.planners.move_rules import can_split, recompute_keys
from memo_compile.planners.policy import choose
from memo_compile.planners.policy.candidate import simulated
from memo_compile.planners.policy.candidates import NO_LAYER, CandidateSource
from memo_compile.planners.policy.cheapest_first import (
    MAX_WAYS,
    NUM_CHUNKS,
    greedy_sequence,
    has_few_ways,
)
from memo_compile.planners.policy.chooser import is_steady
from memo_compile.planners.policy.milp import lowest_peak, make_bundles, solve_modes
from memo_compile.planners.policy.model import StepModel, build_model
from memo_compile.planners.policy.modes import (
    LAUNCH_S,
    apart,
    class_modes,
    layer_modes,
    make_mode,
    mode_cost,
    with_launches,
)
from memo_compile.planners.policy.named import NAMED
from memo_compile.planners.policy.subsets import MAX_GROUPS, recompute_sets, slot_groups
from memo_compile.planners.solver import SolveStatus
from memo_compile.step.movable import MEASURED, Action, Moves, RecomputeKey, Schedule
from memo_compile.step.problem import Problem
from memo_compile.step.simulate import peak_live_bytes
from tests.steps.movable import KIB, Live, movable_step, recomputer

ROTATING = Schedule(layers=1)


def model_of(num_layers: int = 3, schedule: Schedule = ROTATING, **options: float) -> StepModel:
    step = movable_step(num_layers, **options)  # type: ignore[arg-type]
    return build_model(step, layer_modes(step, recomputer(step)), schedule)


def test_recompute_sets_are_the_lower_hull():
    cls = movable_step(2).classes["L"]
    # b: 8 KiB, 0.05 s; c: 32 KiB, 0.3 s; d: 32 KiB, 0.05 s. Together 72 KiB in 0.4 s.
    assert [sorted(slots) for slots in recompute_sets(cls)] == [[], [4], [2, 4], [2, 3, 4]]


def test_a_class_without_recomputable_slots_has_the_empty_set_only():
    cls = movable_step(2).classes["L"]
    slots = tuple(replace(slot, can_recompute=False) for slot in cls.slots)
    assert recompute_sets(replace(cls, slots=slots)) == (frozenset(),)


def test_many_slots_are_merged_into_groups():
    cls = movable_step(2).classes["L"]
    more = tuple(replace(cls.slots[4], name=f"e{i}") for i in range(20))
    ops = tuple(
        replace(cls.ops[4], name=f"op_e{i}", slot=5 + i, seconds=0.01 * i) for i in range(20)
    )
    wide = replace(cls, slots=(*cls.slots, *more), ops=(*cls.ops, *ops))
    groups = slot_groups(wide)
    assert len(groups) == MAX_GROUPS
    assert sorted(slot for group in groups for slot in group) == list(range(2, 25))
    assert max(recompute_sets(wide), key=len) == frozenset(range(2, 25))


def test_costs_of_a_mode():
    step = movable_step(2, bytes_per_s=16 * KIB, copy_latency_s=0.25)
    cls = step.classes["L"]
    mode = make_mode(cls, offload=(0, 1), recompute=(3, 4), rows=6)
    cost = mode_cost(cls, mode, recomputer(step))
    # x and a whole, two of eight rows of c and d: 8 + 8 + 8 + 8 KiB in four copies.
    assert (cost.host_bytes, cost.num_copies, cost.kept_bytes) == (32 * KIB, 4, 8 * KIB)
    assert cost.d2h_s(step.costs) == cost.h2d_s(step.costs) == pytest.approx(3.0)
    assert cost.recompute_s == pytest.approx(0.35 * 6 / 8)
    assert cost.recompute_peaks == (512,)  # its results lie in the reloaded buffers
    whole = mode_cost(cls, make_mode(cls, recompute=(3, 4)), recomputer(step))
    assert whole.recompute_peaks == (64 * KIB + 512,)
    assert whole.recompute_outside == (0,)


def test_modes_start_with_save_and_hold_the_extremes():
    step = movable_step(4)
    modes = class_modes(step, "L", recomputer(step))
    assert modes[0].mode.actions == (Action.SAVE,) * 5
    assert min(priced.kept_bytes for priced in modes) == 0
    bare = [priced for priced in modes if not priced.host_bytes]
    assert min(priced.kept_bytes for priced in bare) == 16 * KIB  # x and a
    assert any(priced.mode.recompute_rows for priced in modes)
    exact = class_modes(step, "L", recomputer(step), exact=True)
    assert not any(priced.mode.recompute_rows for priced in exact)


def test_regions_are_kept_apart_by_a_copy_of_what_joins_them():
    """d is read first, and is made from c, and that from b, which the backward reads later."""
    cls = movable_step(2).classes["L"]
    cls = replace(cls, parts={}, slots=tuple(replace(slot, first_read=3) for slot in cls.slots))
    everything = frozenset((2, 3, 4))
    assert apart(cls, everything) == everything  # all are read at once
    sizes = (64 * KIB, 64 * KIB, 64 * KIB, 8 * KIB, 64 * KIB)
    reads = (3, 3, 3, 3, 0)
    slots = tuple(
        replace(slot, size_bytes=size, first_read=first)
        for slot, size, first in zip(cls.slots, sizes, reads, strict=True)
    )
    cls = replace(cls, parts={}, slots=slots)
    assert apart(cls, everything) == {2, 4}  # c is copied, so that b is made when it is read
    keys = recompute_keys(cls, make_mode(cls, recompute=(2, 4), offload=(3,)))
    assert [key.slots for key in keys] == [(4,), (2,)]


def test_what_gains_as_much_as_its_copies_cost_is_copied_where_they_hide():
    """Without a copy of c, 128 KiB exist too early: twice the bytes of c."""
    cls = movable_step(2).classes["L"]
    slots = tuple(
        replace(slot, size_bytes=64 * KIB, first_read=first)
        for slot, first in zip(cls.slots, (3, 3, 3, 3, 0), strict=True)
    )
    cls = replace(cls, parts={}, slots=slots)
    everything = frozenset((2, 3, 4))
    assert apart(cls, everything) == everything
    assert apart(cls, everything, 64 * KIB - 1) == everything
    assert apart(cls, everything, 64 * KIB) == {2, 4}


def test_without_copies_in_flight_the_model_has_the_programs_bytes():
    step = movable_step(4)
    recompute = recomputer(step)
    at_once = Schedule(layers=0)
    model = build_model(step, layer_modes(step, recompute), at_once, copy_price=0.5)
    for number, mode in enumerate(model.modes[0]):
        chosen = (number,) * 4
        real = simulated(step, model.moves(chosen, "greedy"), recompute)
        assert model.peak_bytes(chosen) == real.live_bytes
        added = model.cost_s(chosen) - sum(model.facts.call_s) - 4 * mode.recompute_s
        copied_s = 4 * (mode.d2h_s(step.costs) + mode.h2d_s(step.costs))
        assert 0.5 * copied_s <= added + 1e-9 <= 1.5 * copied_s + 1e-6


def test_what_is_left_of_the_host_is_filled_by_one_layer():
    model = model_of(32, bytes_per_s=1024 * KIB)
    largest = max(mode.host_bytes for mode in model.modes[0])
    limited = greedy_sequence(model, host_budget_bytes=7 * largest)
    assert max(map(model.host_bytes, limited)) > 6.5 * largest  # layers go two by two


@pytest.mark.parametrize(("num_layers", "speed"), [(8, 64), (8, 1024), (32, 4)])
def test_all_layers_of_a_mode_move_where_no_few_of_them_can(num_layers, speed):
    """Some recompute in two ways, and a third is none of them: they leave one of those together."""
    step = movable_step(num_layers, bytes_per_s=speed * KIB)
    model = build_model(step, layer_modes(step, recomputer(step)), NO_LAYER)
    plans = greedy_sequence(model, host_budget_bytes=40 * KIB * num_layers)
    changed = [
        sum(a != b for a, b in zip(before, after, strict=True))
        for before, after in itertools.pairwise(plans)
    ]
    assert max(changed) > max(1, num_layers // NUM_CHUNKS)
    assert all(has_few_ways(model, plan, "L") for plan in plans)
    peaks = [model.peak_bytes(plan) for plan in plans]
    assert peaks[-1] == min(peaks)


def test_a_chain_through_attention_is_not_split():
    cls = movable_step(2).classes["L"]
    assert can_split(cls, (2, 3, 4))
    ops = (*cls.ops[:2], replace(cls.ops[2], row_wise=False), *cls.ops[3:])
    assert not can_split(replace(cls, ops=ops), (2, 3, 4))
    assert can_split(replace(cls, ops=ops), (3, 4))


@pytest.mark.parametrize("schedule", [ROTATING, Schedule(layers=2)])
@pytest.mark.parametrize("bytes_per_s", [8 * KIB, 64 * KIB, 512 * KIB])
def test_the_model_is_the_simulated_step(schedule, bytes_per_s):
    step = movable_step(4, bytes_per_s=bytes_per_s)
    recompute = recomputer(step)
    modes = layer_modes(step, recompute)
    model = build_model(step, modes, schedule)
    for number in range(len(modes[0])):
        chosen = (number, 0, number, 0)
        moves = model.moves(chosen, "auto")
        real = simulated(step, moves, recompute)
        # The model lets a layer's copies begin when its forward ends and its recomputation wait
        # for all of them: never faster than the program; it never has fewer bytes.
        assert model.step_s(chosen) >= real.timeline.step_s * (1 - 1e-9)
        assert model.step_s(chosen) <= real.timeline.step_s * 1.25
        assert real.live_bytes <= model.peak_bytes(chosen)
    save_all = (0,) * 4
    assert model.peak_bytes(save_all) == peak_live_bytes(step.problem)
    assert model.step_s(save_all) == pytest.approx(sum(model.facts.call_s))


def cheapest(model: StepModel, bound_bytes: int) -> float | None:
    """The least cost of all combinations of modes within the bound."""
    costs = [
        model.cost_s(chosen)
        for chosen in itertools.product(*(range(len(modes)) for modes in model.modes))
        if model.peak_bytes(chosen) <= bound_bytes and num_keys(model, chosen) <= MAX_WAYS
    ]
    return min(costs, default=None)


def num_keys(model: StepModel, chosen: tuple[int, ...]) -> int:
    keys = {modes[mode].keys for modes, mode in zip(model.modes, chosen, strict=True)}
    return len(keys - {()})


@pytest.mark.parametrize("bytes_per_s", [8 * KIB, 80 * KIB])
def test_the_program_finds_what_brute_force_finds(bytes_per_s):
    model = model_of(3, bytes_per_s=bytes_per_s)
    top, lowest = model.peak_bytes((0, 0, 0)), lowest_peak(model)
    assert lowest.status is SolveStatus.OPTIMAL
    floor = model.peak_bytes(lowest.chosen)
    assert cheapest(model, floor) is not None
    assert cheapest(model, floor - 512) is None
    for share in (0.0, 0.3, 0.6, 0.9):
        bound_bytes = int(floor + share * (top - floor))
        found = solve_modes(model, bound_bytes=bound_bytes, gap=0.0)
        assert found.status is SolveStatus.OPTIMAL
        assert model.peak_bytes(found.chosen) <= bound_bytes
        assert num_keys(model, found.chosen) <= MAX_WAYS
        # TIE may cost a millionth of the step.
        assert model.cost_s(found.chosen) == pytest.approx(cheapest(model, bound_bytes), rel=1e-5)


def test_a_bound_below_the_floor_is_infeasible():
    model = model_of(3)
    assert solve_modes(model, bound_bytes=1024).status is SolveStatus.INFEASIBLE
    floor = model.peak_bytes(lowest_peak(model).chosen)
    assert solve_modes(model, bound_bytes=floor - 512).status is SolveStatus.INFEASIBLE


def test_the_program_obeys_the_host_budget():
    model = model_of(4, bytes_per_s=1024 * KIB)
    bound_bytes = int(model.peak_bytes((0,) * 4) * 0.8)
    free = solve_modes(model, bound_bytes=bound_bytes)
    assert model.host_bytes(free.chosen) > 0
    none = solve_modes(model, bound_bytes=bound_bytes, host_budget_bytes=0)
    assert none.status is SolveStatus.OPTIMAL
    assert model.host_bytes(none.chosen) == 0
    assert model.cost_s(none.chosen) > model.cost_s(free.chosen)


def test_the_program_is_not_slower_than_greedy():
    model = model_of(6, bytes_per_s=40 * KIB)
    for chosen in greedy_sequence(model):
        found = solve_modes(model, bound_bytes=model.peak_bytes(chosen), gap=0.0)
        assert model.cost_s(found.chosen) <= model.cost_s(chosen) * (1 + 1e-5)


def test_greedy_goes_from_save_all_down():
    model = model_of(6, bytes_per_s=40 * KIB)
    sequence = greedy_sequence(model)
    assert sequence[0] == (0,) * 6
    assert sequence[1][0] != 0  # the first layers move first
    assert sequence[1][1:] == (0,) * 5
    assert model.peak_bytes(sequence[-1]) < 0.75 * model.peak_bytes(sequence[0])
    assert all(num_keys(model, chosen) <= MAX_WAYS for chosen in sequence)
    limited = greedy_sequence(model, host_budget_bytes=100 * KIB)
    assert max(model.host_bytes(chosen) for chosen in limited) <= 100 * KIB


def test_bundles_are_single_layers_or_equal_parts():
    assert make_bundles(model_of(4)) == [(0,), (1,), (2,), (3,)]
    parts = make_bundles(model_of(12), num_bundles=7)
    assert [layer for part in parts for layer in part] == list(range(12))
    assert [len(part) for part in parts] == [2, 2, 2, 2, 2, 1, 1]


def test_every_candidate_names_who_proposed_it():
    step = movable_step(4)
    source = CandidateSource(step=step, recompute=recomputer(step))
    proposers = {candidate.moves.policy for candidate in source.plans(*source.all)}
    needs_shares = {"kwai"}  # of several microbatches, see test_pipeline_chunks
    assert proposers == {"greedy", "program", "steady", "widened", *NAMED} - needs_shares


def test_what_keeps_a_floor_is_the_same_whatever_is_measured():
    def steady(seconds: float) -> list[Problem]:
        step = movable_step(4)
        region_s = {name: seconds * s for name, s in step.costs.region_s.items()}
        step = replace(step, costs=replace(step.costs, region_s=region_s))
        source = CandidateSource(step=step, recompute=recomputer(step), solver=False)
        return [plan.problem for plan in source.plans(*source.all) if is_steady(plan)]

    assert steady(1.0) == steady(0.3)


def test_a_gpt_at_64k_tokens_recomputes_the_cheap_and_offloads_attention():
    shape = replace(find_model("gpt-7b"), num_layers=6)
    setting = Setting(
        shape=shape, seq=64 * 1024, tp=8, hardware=find_hardware("h100"), copy_bytes_per_s=12e9
    )
    step = gpt_step(setting)
    peak_bytes = peak_live_bytes(step.problem)
    choice = choose(
        step,
        budget_bytes=int(peak_bytes * 0.85),
        host_budget_bytes=None,
        policy="auto",
        recompute=recompute_of(step),
        place=Live,
    )
    names = [slot.name for slot in step.classes["layer"].slots]
    again = {names[slot] for mode in choice.moves.modes for slot in mode.slots(Action.RECOMPUTE)}
    assert {"n1", "n2", "gelu"} <= again
    assert not again & {"o", "lse"}


def test_a_step_without_layers_keeps_everything_or_names_its_floor():
    step = replace(movable_step(2), layers=())
    source = CandidateSource(step=step, recompute=recomputer(step))
    assert {candidate.live_bytes for candidate in source.plans(*source.all)} == {
        peak_live_bytes(step.problem)
    }


def test_a_layer_that_may_not_recompute_a_slot_saves_instead():
    step = movable_step(3)
    calls = tuple(
        replace(call, inputs=(*call.inputs, "d0")) if call.name == "Lb@2" else call
        for call in step.problem.calls
    )
    regions = {**step.problem.regions, "Lb2": replace(step.problem.regions["Lb"], name="Lb2")}
    regions["Lb2"] = replace(regions["Lb2"], input_ends=(*regions["Lb2"].input_ends, 4))
    calls = tuple(replace(call, region="Lb2") if call.name == "Lb@2" else call for call in calls)
    costs = replace(step.costs, region_s={**step.costs.region_s, "Lb2": 2.0})
    step = replace(step, problem=replace(step.problem, calls=calls, regions=regions), costs=costs)
    first, second, _ = layer_modes(step, recomputer(step))
    assert not any(4 in priced.mode.slots(Action.RECOMPUTE) for priced in first)
    assert any(4 in priced.mode.slots(Action.RECOMPUTE) for priced in second)
    assert len(first) == len(second)


def test_a_program_that_cannot_be_is_left_out_with_a_warning(caplog):
    step = movable_step(3)
    source = CandidateSource(step=step, recompute=recomputer(step))
    bad = Moves(modes=step.save_all().modes[:2], policy="auto")
    with caplog.at_level("WARNING", logger="memo"):
        assert source.valid([bad]) == []
    assert "a plan of policy auto is left out: expected a mode for each of 3 layers" in caplog.text


@pytest.mark.parametrize(("source", "launches"), [(MEASURED, 3), ("roofline", 0)])
def test_estimates_count_launches_where_seconds_are_measured(source, launches):
    step = movable_step(2)
    step = replace(step, costs=replace(step.costs, source=source))
    known = recomputer(step)
    key = RecomputeKey(class_key="L", slots=(2, 3, 4))
    lowered = known(key)
    assert with_launches(step, known)(key) is lowered
    estimate = with_launches(step, lambda key: replace(known(key), is_lowered=False))(key)
    assert estimate.seconds == pytest.approx(lowered.seconds + launches * LAUNCH_S)
