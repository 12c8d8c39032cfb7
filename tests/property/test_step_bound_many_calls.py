"""The bound of a step against plans of steps whose passes are several calls: none is faster."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from memo_compile.errors import InvalidPlan
from memo_compile.planners.move_rules import RecomputeOf
from memo_compile.planners.policy.candidate import Candidate, simulated
from memo_compile.planners.policy.candidates import CandidateSource
from memo_compile.planners.policy.model import least_bytes, least_cost_s
from memo_compile.planners.step_bound import step_lower_bound_s
from memo_compile.step.movable import MovableStep, RecomputeKey, RecomputeRegion
from tests.steps.many_calls import random_moves, random_step, varied_recomputer
from tests.steps.movable import KIB

NUM_PLANS = 40
"""Random plans of each step, beside those near greedy's floor."""


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    talks=st.booleans(),
    stays=st.booleans(),
    pairs=st.booleans(),
    loss_bytes=st.sampled_from((0, 0, 40 * KIB, 400 * KIB)),
)
@example(seed=2, talks=False, stays=False, pairs=False, loss_bytes=0)
@example(seed=46, talks=False, stays=False, pairs=False, loss_bytes=0)
@example(seed=68, talks=False, stays=False, pairs=False, loss_bytes=0)
@example(seed=318, talks=True, stays=False, pairs=False, loss_bytes=0)
@example(seed=390, talks=True, stays=False, pairs=False, loss_bytes=0)
@example(seed=3, talks=False, stays=True, pairs=False, loss_bytes=0)
@example(seed=5, talks=True, stays=True, pairs=False, loss_bytes=0)
@example(seed=32, talks=False, stays=True, pairs=False, loss_bytes=0)
@example(seed=29135, talks=True, stays=False, pairs=False, loss_bytes=0)
@example(seed=1010, talks=False, stays=False, pairs=True, loss_bytes=0)
@example(seed=1021, talks=False, stays=False, pairs=True, loss_bytes=0)
def test_no_plan_is_faster_than_the_bound_where_calls_read_different_slots(
    seed, talks, stays, pairs, loss_bytes
):
    """With ``stays`` kernels allocate results beside an arena that is never given back.

    With ``pairs`` some operators make two slots, as attention does. ``loss_bytes`` are gone when
    the backward has begun.
    """
    rng = Random(seed)
    step = random_step(rng, max_layers=3, talks=talks, pairs=pairs)
    problem = replace(step.problem, loss_bytes=loss_bytes, releases_pages=not stays)
    step = replace(step, problem=problem)
    regions: dict[RecomputeKey, RecomputeRegion] = {}
    made = varied_recomputer(rng, step, outside=0.4 if stays else 0.0)
    plans = list(_fastest(_plans(rng, step, made, regions)))
    for plan in plans:
        assert least_bytes(step, plan.moves) <= plan.live_bytes
        assert least_cost_s(step, plan.moves, made) <= plan.cost_s * (1 + 1e-9)
        for host_bytes in (None, plan.host_bytes):
            bound_s = step_lower_bound_s(
                step,
                budget_bytes=plan.live_bytes,
                host_budget_bytes=host_bytes,
                regions=regions.values(),
            )
            assert bound_s <= plan.timeline.step_s * (1 + 1e-6)


def _plans(
    rng: Random,
    step: MovableStep,
    made: RecomputeOf,
    regions: dict[RecomputeKey, RecomputeRegion],
) -> Iterator[Candidate]:
    """Random plans, and good ones; ``regions`` become those that they recompute with."""

    def recompute(key: RecomputeKey) -> RecomputeRegion:
        return regions.setdefault(key, made(key))

    for _ in range(NUM_PLANS):
        with contextlib.suppress(InvalidPlan):  # some recompute from what is not there yet
            yield simulated(step, random_moves(rng, step), recompute)
    source = CandidateSource(step=step, recompute=recompute)
    for candidate in source.plans("near floor"):
        yield candidate
        yield from source.spared(candidate)


def _fastest(plans: Iterator[Candidate]) -> Iterator[Candidate]:
    """Those of which no other needs as few bytes and seconds, the fewest bytes first."""
    best_s = math.inf
    for plan in sorted(plans, key=lambda plan: (plan.live_bytes, plan.timeline.step_s)):
        if plan.timeline.step_s < best_s:
            best_s = plan.timeline.step_s
            yield plan
