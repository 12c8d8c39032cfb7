"""Moving activations never changes a gradient: models x policies x budgets x copy schedules."""

import itertools

import pytest

from memo_compile.step.plans import Plan
from tests.numerics.budget_cases import (
    BUDGETS,
    DECISIONS,
    MODELS,
    SCHEDULES,
    SHAPES,
    Case,
    assert_bitwise,
    assert_close,
    assert_moved,
    budget_of,
    covering,
    run,
    run_schedules,
    save_run,
    traced,
)
from tests.numerics.training import Run, in_ci

LEFT_TO_FULL = ("save", "memo-0", "memo-0.125", "memo-0.25")
"""Every step runs under ``save`` anyway, and the part of the tokens does not matter to a law."""
SHAPE_OF = {"llama": "sequence", "gemma": "odd-batch", "t5": "tiled-batch"}
"""Models and what each is given: tracing a step takes ten times as long as running a case."""
FACTORS = {
    "model": tuple(SHAPE_OF),
    "decision": tuple(decision for decision in DECISIONS if decision not in LEFT_TO_FULL),
    "budget": BUDGETS,
    "schedule": tuple(schedule for schedule in SCHEDULES if "poison" in schedule),
}
"""Of what CI runs. `make numerics-full` runs the product of all models, decisions and shapes."""

PAIRWISE = [Case(**row, shape=SHAPE_OF[row["model"]]) for row in covering(FACTORS)]
PRODUCT = [
    Case(model=model, decision=decision, budget=budget, shape=shape)
    for model, decision, budget, shape in itertools.product(MODELS, DECISIONS, BUDGETS, SHAPES)
]
"""Of all models; each of them runs under every schedule."""


def check_run(case: Case, budget: int | None, ours: Run, plan: Plan) -> None:
    assert_close(ours, case)
    assert_moved(case, plan, budget)
    if budget is not None:
        assert plan.peak_bytes <= budget
    if not plan.recomputed_bytes:
        assert_bitwise(ours, save_run(case)[0])


def test_every_pair_is_covered():
    """Two factors at a time, and far from the whole product."""
    seen = {
        pair
        for case in PAIRWISE
        for pair in itertools.combinations([(name, getattr(case, name)) for name in FACTORS], 2)
    }
    for first_factor, second_factor in itertools.combinations(FACTORS, 2):
        for first, second in itertools.product(FACTORS[first_factor], FACTORS[second_factor]):
            assert ((first_factor, first), (second_factor, second)) in seen
    assert set(SHAPE_OF.values()) == set(SHAPES)  # pairs with a shape are pairs with its model
    assert len(PAIRWISE) < 50 < len(PRODUCT) * len(SCHEDULES)
    assert covering(FACTORS) == covering(FACTORS)


@pytest.mark.parametrize("model", in_ci(FACTORS["model"], "llama"))
def test_steps_equal_eager(model, subtests):
    """Each step is traced and cut once, then lowered, planned and run for every case of it."""
    cases = [case for case in PAIRWISE if case.model == model]
    step = traced(cases[0])
    for case in cases:
        with subtests.test(str(case)):
            budget = budget_of(case)
            check_run(case, budget, *step.run({**case.options(), "memory_budget": budget}))


@pytest.mark.full
def test_a_step_traced_once_has_the_plan_that_torch_compile_makes():
    case = Case(model="llama", decision="auto", budget="half")
    step, budget = traced(case), budget_of(case)
    ours, plan = step.run({**case.options(), "memory_budget": budget})
    # The trace, which has no budget, reads buffers themselves and no copies of them.
    compiled, whole = run(case, memory_budget=budget, passes=("-own-inputs",))
    assert_bitwise(ours, compiled)
    assert plan.peak_bytes < save_run(case)[1].peak_bytes
    for name in ("offsets", "decisions", "peak_bytes", "offloaded_bytes", "recomputed_bytes"):
        assert getattr(plan, name) == getattr(whole, name)


@pytest.mark.full
@pytest.mark.parametrize("case", PRODUCT, ids=lambda case: str(case).replace("-poison", ""))
def test_steps_equal_eager_under_every_schedule(case):
    budget = budget_of(case)
    for under, ours, plan in run_schedules(case, memory_budget=budget):
        check_run(under, budget, ours, plan)
