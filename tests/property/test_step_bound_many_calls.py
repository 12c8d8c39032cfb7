"""The bound of a step against plans of steps whose passes are several calls: none is faster."""

import math
from collections.abc import Iterator
from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from memo_compile.planners.policy.candidate import Candidate, simulated
from memo_compile.planners.policy.candidates import CandidateSource
from memo_compile.planners.step_bound import step_lower_bound_s
from memo_compile.step.movable import MovableStep, RecomputeKey, RecomputeRegion
from tests.steps.many_calls import random_moves, random_step, varied_recomputer

NUM_PLANS = 40
"""Random plans of each step, beside those near greedy's floor."""


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), talks=st.booleans())
@example(seed=2, talks=False)
@example(seed=46, talks=False)
@example(seed=68, talks=False)
@example(seed=318, talks=True)
@example(seed=390, talks=True)
def test_no_plan_is_faster_than_the_bound_where_calls_read_different_slots(seed, talks):
    rng = Random(seed)
    step = random_step(rng, max_layers=3, talks=talks)
    regions: dict[RecomputeKey, RecomputeRegion] = {}
    plans = list(_fastest(_plans(rng, step, regions)))
    for plan in plans:
        for host_bytes in (None, plan.host_bytes):
            bound_s = step_lower_bound_s(
                step,
                budget_bytes=plan.live_bytes,
                host_budget_bytes=host_bytes,
                regions=regions.values(),
            )
            assert bound_s <= plan.timeline.step_s * (1 + 1e-6)


def _plans(
    rng: Random, step: MovableStep, regions: dict[RecomputeKey, RecomputeRegion]
) -> Iterator[Candidate]:
    """Random plans, and good ones; ``regions`` become those that they recompute with."""
    made = varied_recomputer(rng, step)

    def recompute(key: RecomputeKey) -> RecomputeRegion:
        return regions.setdefault(key, made(key))

    for _ in range(NUM_PLANS):
        yield simulated(step, random_moves(rng, step), recompute)
    source = CandidateSource(step=step, recompute=recompute)
    for candidate in source.near_floor():
        yield candidate
        yield from source.spared(candidate)


def _fastest(plans: Iterator[Candidate]) -> Iterator[Candidate]:
    """Those of which no other needs as few bytes and seconds, the fewest bytes first."""
    best_s = math.inf
    for plan in sorted(plans, key=lambda plan: (plan.live_bytes, plan.timeline.step_s)):
        if plan.timeline.step_s < best_s:
            best_s = plan.timeline.step_s
            yield plan
