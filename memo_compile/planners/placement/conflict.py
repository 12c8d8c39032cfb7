"""Why a capacity cannot be met: a small set of buffers that cannot, by deletion.

A set is shrunk by leaving out chunks, then single buffers, as long as the rest is still proved not
to fit. With time the result is irreducible; without, it is valid all the same, only larger.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from memo_compile.planners.placement import kernel
from memo_compile.planners.placement.instance import Instance, build_instance
from memo_compile.planners.placement.placement_problem import PlacementProblem
from memo_compile.planners.placement.portfolio import Searcher

_PROOF_NODES = 20_000
"""Most nodes of one search that tries to prove that a smaller set does not fit either."""


def load_conflict(instance: Instance, capacity: int) -> tuple[str, ...]:
    """Ids of few buffers live together, or of a fixed one, whose bytes exceed ``capacity``."""
    problem = instance.problem
    worst = int(np.argmax(instance.section_bounds()))
    spans = (instance.span_lower <= worst) & (worst < instance.span_upper)
    live = sorted(set(instance.owner[spans].tolist()), key=lambda i: -int(instance.size[i]))
    names = [instance.buffers[i].id for i in live]

    def too_high(ids: Sequence[str]) -> bool:
        return build_instance(problem, ids).lower_bound() > capacity

    few = next((names[:k] for k in range(1, len(names)) if too_high(names[:k])), names)
    return _shrink(few, too_high, float("inf"))


def search_conflict(problem: PlacementProblem, capacity: int, deadline_s: float) -> tuple[str, ...]:
    """Ids of buffers that are proved not to fit ``capacity`` together, where all of them are."""

    def cannot_fit(ids: Sequence[str]) -> bool:
        instance = build_instance(problem, ids)
        if instance.lower_bound() > capacity:
            return True
        searcher = Searcher(instance, use_numba=False)
        rank = next(searcher.ranks())
        outcome, _ = searcher.run(capacity, rank, _PROOF_NODES, jump=False)
        return outcome == kernel.EXHAUSTED

    ids = [b.id for b in sorted(problem.buffers, key=lambda b: b.size) if b.size > 0]
    return _shrink(ids, cannot_fit, deadline_s)


def _shrink(
    ids: Sequence[str], cannot_fit: Callable[[Sequence[str]], bool], deadline_s: float
) -> tuple[str, ...]:
    """A subset of ``ids`` that still cannot fit: chunks of halving length are left out."""
    kept = list(ids)
    chunk = max(len(kept) // 2, 1)
    while True:
        at = 0
        while at < len(kept):
            if time.perf_counter() > deadline_s:
                return tuple(sorted(kept))
            rest = kept[:at] + kept[at + chunk :]
            if rest and cannot_fit(rest):
                kept = rest
            else:
                at += chunk
        if chunk == 1:
            return tuple(sorted(kept))
        chunk = max(chunk // 2, 1)
