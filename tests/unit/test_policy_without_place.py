"""What is chosen where placements have holes, so that plans do not fit whose bytes alive do."""

from memo_compile.planners.policy import choose
from memo_compile.planners.policy.candidates import CandidateSource
from memo_compile.planners.policy.chooser import unbeaten
from memo_compile.planners.policy.frontier import Choice
from memo_compile.step.movable import MovableStep
from memo_compile.step.problem import CallKind, Problem
from memo_compile.step.residency import step_constant_bytes
from memo_compile.step.simulate import most_per_call, peak_live_bytes
from tests.steps.movable import KIB, Live, movable_step, recomputer


def chosen(
    step: MovableStep,
    budget_bytes: int,
    place: type[Live],
    *,
    policy: str = "greedy",
) -> Choice:
    return choose(
        step,
        budget_bytes=budget_bytes,
        host_budget_bytes=None,
        policy=policy,
        recompute=recomputer(step),
        place=place,
    )


def test_a_plan_that_has_no_place_keeps_its_copies_out_of_the_way(monkeypatch):
    """Placements have holes where values that wait for the host fill the forward to the peak."""

    class WithHoles(Live):
        def __init__(self, problem: Problem) -> None:
            super().__init__(problem)
            alive = most_per_call(problem) + step_constant_bytes(problem)
            waits = any(call.kind is CallKind.WAIT for call in problem.calls)
            if waits and alive[: problem.first_backward].max() > 0.99 * self.peak_bytes:
                self.peak_bytes *= 2

    step = movable_step(4, bytes_per_s=40 * KIB, transient_bytes=40 * KIB)
    budget_bytes = int(0.45 * peak_live_bytes(step.problem))

    with_spared = chosen(step, budget_bytes, WithHoles)
    assert with_spared.moves.schedule.spare > 0
    assert with_spared.plan.peak_bytes <= budget_bytes
    monkeypatch.setattr(CandidateSource, "spared", lambda *_: ())
    without = chosen(step, budget_bytes, WithHoles)
    assert without.timeline.step_s > 1.1 * with_spared.timeline.step_s


def test_where_none_of_the_best_has_a_place_the_fastest_of_the_others_is_taken(monkeypatch):
    """Not a steady plan, which copies at once and is several times as slow."""
    step = movable_step(5, bytes_per_s=12 * KIB)
    source = CandidateSource(step=step, recompute=recomputer(step))
    steady = source.plans("steady")
    candidates = [*source.named("save"), *steady, *source.plans(*source.quick)]
    best = {candidate.problem.calls for candidate in unbeaten(candidates, None)}

    class WithHoles(Live):
        def __init__(self, problem: Problem) -> None:
            super().__init__(problem)
            self.peak_bytes *= 2 if problem.calls in best else 1

    monkeypatch.setattr(CandidateSource, "spared", lambda *_: ())
    fits = max(plan.live_bytes for plan in steady if plan.problem.calls not in best)
    choice = chosen(step, fits, WithHoles)
    assert choice.problem.calls not in best
    assert choice.timeline.step_s < 0.9 * min(plan.timeline.step_s for plan in steady)


def test_greedys_choice_stands_where_what_beats_it_has_no_place():
    step = movable_step(6, bytes_per_s=4 * KIB)
    source = CandidateSource(step=step, recompute=recomputer(step))
    own = {plan.problem.calls for plan in (*source.named("save"), *source.plans(*source.quick))}

    class WithHoles(Live):
        def __init__(self, problem: Problem) -> None:
            super().__init__(problem)
            self.peak_bytes *= 1 if problem.calls in own else 2

    budget_bytes = peak_live_bytes(step.problem) * 37 // 100
    greedys = chosen(step, budget_bytes, WithHoles)
    best = chosen(step, budget_bytes, WithHoles, policy="auto")
    assert best.timeline.step_s <= greedys.timeline.step_s
