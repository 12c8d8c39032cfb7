"""The named policies decide exactly what they say, and choose() refuses what does not fit."""

from dataclasses import dataclass, replace

import pytest

from memo_compile.errors import ConfigError, Infeasible, UnsupportedGraph
from memo_compile.planners.policy import choose, reasons
from memo_compile.planners.policy.candidates import CandidateSource
from memo_compile.planners.policy.chooser import unbeaten
from memo_compile.planners.policy.frontier import Choice
from memo_compile.planners.policy.named import memo_alpha, named_moves
from memo_compile.step.movable import Action, MovableStep, RecomputeKey, RecomputeRegion
from memo_compile.step.problem import Problem
from memo_compile.step.simulate import peak_live_bytes
from tests.steps.movable import KIB, movable_step, recomputer

S, O, R = Action.SAVE, Action.OFFLOAD, Action.RECOMPUTE  # noqa: E741
SAVED = (S,) * 5
FAST = 256 * KIB
"""Bytes/s at which a whole layer (88 KiB) is copied in a third of its forward (1 s)."""


@dataclass(frozen=True)
class Placed:
    peak_bytes: int


def place(problem: Problem) -> Placed:
    """A placement that loses 512 B, so that placed peaks lie above the bytes alive."""
    return Placed(peak_bytes=peak_live_bytes(problem) + 512)


def decided(step: MovableStep, policy: str = "auto", **options: object) -> Choice:
    given = {"budget_bytes": None, "host_budget_bytes": None, "recompute": recomputer(step)}
    return choose(step, policy=policy, place=place, **{**given, **options})  # type: ignore[arg-type]


def actions(step: MovableStep, policy: str, **options: object) -> list[tuple[Action, ...]]:
    plan = named_moves(step, policy, recomputer(step), **options)  # type: ignore[arg-type]
    return [mode.actions for mode in plan.moves.modes]


def no_regions(key: RecomputeKey) -> RecomputeRegion:
    raise UnsupportedGraph(f"{key.class_key} draws random numbers")


def test_save_full_recompute_and_full_offload():
    step = movable_step(3)
    assert actions(step, "save") == [SAVED] * 3
    assert actions(step, "full-recompute") == [(S, S, R, R, R)] * 3
    assert actions(step, "full-offload") == [(O, O, O, O, O)] * 3


def test_kwai_offloads_a_share_the_largest_first_and_above_a_half_the_smallest():
    step = movable_step(3)
    assert actions(step, "kwai") == [(O, O, O, O, O)] * 3
    assert actions(step, "kwai", alpha=0.0) == [SAVED] * 3
    sizes = [slot.size_bytes for slot in step.classes["L"].slots]
    for alpha in (0.25, 0.5):
        gone = [
            size
            for mode in actions(step, "kwai", alpha=alpha)
            for size, action in zip(sizes, mode, strict=True)
            if action is O
        ]
        assert alpha * 3 * sum(sizes) <= sum(gone) < alpha * 3 * sum(sizes) + min(gone)
        assert gone == sorted(3 * sizes)[-len(gone) :]


def test_memo_offloads_input_and_attention_mixes_the_others_and_keeps_two_layers():
    step = movable_step(4)
    plan = named_moves(step, "memo", recomputer(step), alpha=0.25)
    assert [mode.actions for mode in plan.moves.modes] == [(O, O, R, R, R)] * 2 + [SAVED] * 2
    assert [mode.recompute_rows for mode in plan.moves.modes] == [6, 6, None, None]
    assert plan.moves.schedule.layers == 1
    assert plan.notes == ()


def test_what_memo_keeps_beside_the_last_layers_is_noted():
    step = movable_step(4)
    first = replace(step.layers[0], class_key="first")
    classes = {**step.classes, "first": replace(step.classes["L"], key="first")}
    step = replace(step, layers=(first, *step.layers[1:]), classes=classes)
    plan = named_moves(step, "memo", recomputer(step), alpha=1.0)
    assert [mode.actions for mode in plan.moves.modes] == [SAVED, (O,) * 5, SAVED, SAVED]
    assert plan.notes == ("first: is kept, policy memo moves layers that repeat",)
    step = movable_step(2)
    plan = named_moves(step, "memo", recomputer(step), alpha=1.0)
    assert plan.notes == ("nothing moves: of 2 layers policy memo keeps the last 2",)


@pytest.mark.parametrize(
    ("alpha", "expected", "rows"),
    [(0.0, (O, O, R, R, R), None), (0.5, (O, O, R, R, R), 4), (1.0, (O, O, O, O, O), None)],
)
def test_every_alpha_of_memo(alpha, expected, rows):
    step = movable_step(3)
    mode = named_moves(step, "memo", recomputer(step), alpha=alpha).moves.modes[0]
    assert (mode.actions, mode.recompute_rows) == (expected, rows)


def test_exact_leaves_no_mix():
    step = movable_step(3)
    mode = named_moves(step, "memo", recomputer(step), alpha=0.5, exact=True).moves.modes[0]
    assert (mode.actions, mode.recompute_rows) == ((O, O, R, R, R), None)


@pytest.mark.parametrize(
    ("bytes_per_s", "host_budget_bytes", "alpha"),
    # A layer: 16 KiB always, 72 KiB others, forward 1 s; 4 of 6 layers move.
    [
        (16 * KIB, None, 0.0),
        ((16 + 36) * KIB, None, 0.5),
        ((16 + 35) * KIB, None, 0.25),
        (88 * KIB, None, 1.0),
        (88 * KIB, 4 * (16 + 9) * KIB, 0.125),
        (88 * KIB, 0, 0.0),
    ],
)
def test_alpha_is_the_largest_quantum_that_hides_and_fits_the_host(
    bytes_per_s, host_budget_bytes, alpha
):
    step = movable_step(6, bytes_per_s=bytes_per_s)
    assert memo_alpha(step, host_budget_bytes=host_budget_bytes) == alpha


def test_without_a_region_slots_stay_and_a_note_says_why():
    step = movable_step(3)
    plan = named_moves(step, "full-recompute", no_regions)
    assert [mode.actions for mode in plan.moves.modes] == [SAVED] * 3
    assert any("draws random numbers" in note for note in plan.notes)


def test_a_slot_that_cannot_move_stays_and_is_noted():
    step = movable_step(3)
    cls = step.classes["L"]
    slots = (cls.slots[0], replace(cls.slots[1], can_offload=False), *cls.slots[2:])
    step = replace(step, classes={"L": replace(cls, slots=slots)})
    plan = named_moves(step, "full-offload", recomputer(step))
    assert [mode.actions for mode in plan.moves.modes] == [(O, S, O, O, O)] * 3
    assert plan.notes == ("L: a0 is kept, it cannot be moved",)


def test_unknown_policies_and_alphas_are_refused():
    step = movable_step(3)
    with pytest.raises(ConfigError, match="policy: expected one of save"):
        named_moves(step, "best", recomputer(step))
    with pytest.raises(ConfigError, match=r"alpha: expected one of .* got 0\.3"):
        named_moves(step, "memo", recomputer(step), alpha=0.3)
    with pytest.raises(ConfigError, match="policy: expected auto, greedy, save"):
        decided(step, "best")


def test_without_a_budget_or_with_a_large_one_everything_stays():
    step = movable_step(4)
    for budget_bytes in (None, 1 << 40):
        choice = decided(step, budget_bytes=budget_bytes)
        assert {mode.actions for mode in choice.moves.modes} == {SAVED}
        assert choice.problem.calls == step.problem.calls
        assert [point.chosen for point in choice.frontier] == [True]


def test_under_a_budget_copies_that_hide_come_first_and_the_last_layers_stay():
    step = movable_step(6, bytes_per_s=FAST)
    saved = decided(step)
    choice = decided(step, budget_bytes=saved.plan.peak_bytes - 3 * 88 * KIB)
    assert choice.timeline.step_s == pytest.approx(saved.timeline.step_s)
    assert choice.plan.peak_bytes <= saved.plan.peak_bytes - 3 * 88 * KIB
    assert choice.moves.modes[-1].actions == SAVED
    assert O in choice.moves.modes[0].actions
    assert sum(point.chosen for point in choice.frontier) == 1
    times = [point.step_s for point in choice.frontier]
    assert times == pytest.approx(sorted(times))


def test_with_slow_copies_the_cheap_slots_are_recomputed():
    step = movable_step(6, bytes_per_s=KIB // 8)
    saved = decided(step)
    # b and d of a layer take 40 KiB and 0.1 s to make again; c takes 0.3 s more for 32 KiB.
    choice = decided(step, budget_bytes=saved.plan.peak_bytes - 60 * KIB)
    again = {slot for mode in choice.moves.modes for slot in mode.slots(R)}
    assert again
    assert again <= {2, 4}
    assert not any(mode.slots(O) for mode in choice.moves.modes)


def test_infeasible_names_the_floor_and_what_makes_it():
    step = movable_step(4)
    with pytest.raises(
        Infeasible,
        match=r"budget 1\.00 KiB < floor .* \(parameters 64\.00 KiB, gradients 64\.00 KiB, "
        r"optimizer state 0 B, largest layer L@0 saves 88\.00 KiB\); raise memory_budget",
    ) as caught:
        decided(step, budget_bytes=KIB)
    floor_bytes = caught.value.floor_bytes
    assert floor_bytes is not None
    assert decided(step, budget_bytes=floor_bytes).plan.peak_bytes == floor_bytes
    with pytest.raises(Infeasible, match="< floor"):
        decided(step, budget_bytes=floor_bytes - 1)


def test_infeasible_names_host_memory_when_only_that_is_short():
    step = movable_step(6, bytes_per_s=FAST)
    floor_bytes = decided(step, "full-offload").plan.peak_bytes
    with pytest.raises(
        Infeasible, match=r"can be kept with .* of host memory .*host_budget is 1\.00 KiB"
    ):
        decided(step, "full-offload", budget_bytes=floor_bytes, host_budget_bytes=KIB)


def test_a_named_policy_that_does_not_fit_is_infeasible():
    step = movable_step(4)
    peak_bytes = decided(step, "save").plan.peak_bytes
    with pytest.raises(Infeasible, match="< floor"):
        decided(step, "save", budget_bytes=peak_bytes - 1)


def test_memo_takes_another_alpha_when_its_own_does_not_fit():
    step = movable_step(6, bytes_per_s=88 * KIB)
    own = decided(step, "memo")
    assert own.moves.modes[0].actions == (O,) * 5
    peaks = {alpha: decided(step, "memo", alpha=alpha).plan.peak_bytes for alpha in (0.0, 0.5, 1.0)}
    lowest = min(peaks.values())
    assert lowest <= own.plan.peak_bytes
    assert decided(step, "memo", budget_bytes=lowest).plan.peak_bytes <= lowest


@pytest.mark.parametrize("solver", [True, False])
def test_the_choice_is_the_same_each_time(solver):
    step = movable_step(5)
    budget_bytes = decided(step).plan.peak_bytes * 2 // 3
    first = decided(step, budget_bytes=budget_bytes, solver=solver)
    again = decided(movable_step(5), budget_bytes=budget_bytes, solver=solver)
    assert (first.moves, first.timeline) == (again.moves, again.timeline)


def test_auto_is_never_slower_than_what_else_fits():
    step = movable_step(6)
    top = decided(step).plan.peak_bytes
    for share in (0.9, 0.8, 0.7, 0.6):
        budget_bytes = int(top * share)
        found = {}
        for policy in ("auto", "greedy", "memo", "full-recompute", "full-offload"):
            try:
                found[policy] = decided(step, policy, budget_bytes=budget_bytes).timeline.step_s
            except Infeasible:
                continue
        assert found, f"nothing fits {share}"
        assert found["auto"] <= min(found.values()) * 1.001, (share, found)


def test_reasons_state_the_numbers():
    step = movable_step(6, bytes_per_s=FAST)
    choice = decided(step, "memo", alpha=0.25)
    why = reasons(step, choice.moves)
    moved, kept = dict.fromkeys(choice.moves.modes)
    assert set(why) == {("L", slot, mode) for slot in range(5) for mode in (moved, kept)}
    assert why["L", 0, moved].startswith("in 4 of 6 layers: its copy 31.25 ms hides")
    assert why["L", 0, moved].endswith("it cannot be recomputed in its layer")
    assert "rows 0 to 6 of 8 are recomputed" in why["L", 3, moved]
    assert why["L", 0, kept].startswith("in 2 of 6 layers: kept here, so that less moves: its")
    saved = decided(step)
    said = reasons(step, saved.moves)["L", 0, saved.moves.modes[0]]
    assert said == "nothing of these layers needs to move"
    recomputed = decided(movable_step(6), "full-recompute")
    mode = recomputed.moves.modes[0]
    why = reasons(movable_step(6), recomputed.moves)
    assert why["L", 4, mode].startswith("recompute costs 50.00 ms, its copy 2.00 s does not hide")
    assert why["L", 1, mode].startswith(
        "kept: the plan fits without freeing its 8.00 KiB; its copy"
    )


def test_candidates_above_the_host_budget_are_left_out():
    step = movable_step(6, bytes_per_s=FAST)
    source = CandidateSource(step=step, recompute=recomputer(step), host_budget_bytes=200 * KIB)
    kept = unbeaten(source.plans(*source.all), 200 * KIB)
    assert max(candidate.host_bytes for candidate in kept) <= 200 * KIB
    assert any(candidate.host_bytes for candidate in kept)
