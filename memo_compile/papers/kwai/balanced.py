"""Balanced checkpointing: the frontier of bytes kept against seconds recomputed in one layer.

Source: Kwai (USENIX ATC 24), section 4. Each tensor of a layer is kept or recomputed in backward;
recomputing one needs its inputs, which are kept or recomputed in turn. Up to ``MAX_ENUMERATED``
tensors every subset is evaluated; above, the frontier is walked by a MILP, two solves a point.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memo_compile.costs.hardware import HardwareProfile
from memo_compile.costs.models import ModelShape
from memo_compile.errors import InputError
from memo_compile.papers.layer_costs import (
    BACKWARD_FACTOR,
    Efficiency,
    forward_seconds_per_token,
    layer_tensors,
)
from memo_compile.planners import solver
from memo_compile.planners.policy.subsets import recomputed_steps
from memo_compile.planners.solver import SolveStatus, exact_model, weighted

MAX_ENUMERATED = 20
"""2^20 subsets take 0.1 s and 40 MB; each further tensor doubles both."""

BALANCED = frozenset({"n1", "n2", "silu", "product", "gelu"})
"""What Kwai's balanced policy recomputes: both norm outputs and what follows the activation."""

TIE_TOLERANCE = 1e-12
"""Relative difference of two sums of seconds that is rounding."""

TIME_STEP = 1e-7
"""Smallest step of the MILP's frontier, in units of the slowest or largest tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensor:
    """A tensor to keep or to recompute."""

    name: str
    size_bytes: int
    seconds: float
    """Time to recompute it once its inputs are there."""
    inputs: tuple[int, ...] = ()
    """Indices of earlier tensors that recomputing reads."""
    needed: bool = True
    """False: backward does not read it; only recomputing another one may want it."""
    kept: bool = False
    """True: cannot be recomputed (the layer's input)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancedPoint:
    """A set of recomputed tensors that no other set beats in both bytes and seconds."""

    kept_bytes: int
    recompute_s: float
    recomputed: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPoint:
    """A point of a transformer layer's frontier, in the units of Kwai's paper."""

    bytes_per_token_hidden: float
    extra_time_fraction: float
    """Recompute seconds over the layer's forward and backward seconds."""
    recomputed: tuple[str, ...]


def layer_frontier(
    shape: ModelShape, seq: int, hardware: HardwareProfile, efficiency: Efficiency
) -> tuple[LayerPoint, ...]:
    """The frontier of one layer of ``shape``, ascending in bytes."""
    choices = tuple(
        LayerTensor(
            name=tensor.name,
            size_bytes=tensor.bytes_per_token,
            seconds=tensor.seconds_per_token(hardware, efficiency),
            kept=tensor.name == "x",
        )
        for tensor in layer_tensors(shape, seq)
    )
    forward_s = forward_seconds_per_token(shape, seq, hardware, efficiency)
    layer_s = forward_s * (1 + BACKWARD_FACTOR)
    return tuple(
        LayerPoint(
            bytes_per_token_hidden=point.kept_bytes / shape.hidden,
            extra_time_fraction=point.recompute_s / layer_s,
            recomputed=point.recomputed,
        )
        for point in find_frontier(choices)
    )


def find_frontier(choices: Sequence[LayerTensor]) -> tuple[BalancedPoint, ...]:
    """All points that are not beaten, ascending in bytes, strictly descending in seconds.

    Of sets with equal bytes and seconds one is given, the same in each run.

    Raises:
        InputError: a tensor reads a later one, or has a negative size or time.
    """
    for i, choice in enumerate(choices):
        if any(j >= i or j < 0 for j in choice.inputs):
            raise InputError(f"inputs of {choice.name}: expected earlier tensors only")
        if choice.size_bytes < 0 or not choice.seconds >= 0:
            raise InputError(f"{choice.name}: expected a size and a time of at least 0")
    if len(choices) <= MAX_ENUMERATED:
        return enumerate_frontier(choices)
    return solve_frontier(choices)


def enumerate_frontier(choices: Sequence[LayerTensor]) -> tuple[BalancedPoint, ...]:
    """The frontier by evaluating all 2^n subsets at once; bit i of a subset keeps tensor i."""
    subsets = np.arange(1 << len(choices), dtype=np.int64)
    kept = [(subsets >> i & 1).astype(bool) for i in range(len(choices))]
    wanted = [np.full(len(subsets), choice.needed) for choice in choices]
    recomputed, seconds = recomputed_steps(choices, wanted, kept)
    kept_bytes = np.zeros(len(subsets), dtype=np.int64)
    possible = np.ones(len(subsets), dtype=bool)
    for row, choice in zip(kept, choices, strict=True):
        kept_bytes += row * choice.size_bytes
        possible &= row if choice.kept else True
    candidates = np.flatnonzero(possible)
    order = candidates[np.lexsort((candidates, seconds[candidates], kept_bytes[candidates]))]
    best = np.minimum.accumulate(seconds[order])
    before = np.concatenate(([np.inf], best[:-1]))
    picked = order[seconds[order] < before * (1 - TIE_TOLERANCE)]
    return tuple(
        BalancedPoint(
            kept_bytes=int(kept_bytes[s]),
            recompute_s=float(seconds[s]),
            recomputed=tuple(c.name for i, c in enumerate(choices) if recomputed[i][s]),
        )
        for s in picked
    )


def solve_frontier(choices: Sequence[LayerTensor]) -> tuple[BalancedPoint, ...]:
    """The frontier by a MILP: the fewest bytes, the least time with them, then the next point.

    Variables: keep_i, and redo_i = tensor i is recomputed. need: a tensor that backward reads is
    kept or recomputed. input: so is what a recomputed tensor reads. Each next point must save
    ``TIME_STEP`` of the slowest tensor, so that closer points count as one.
    """
    points: list[BalancedPoint] = []
    limit = math.inf
    unit_s = max(choice.seconds for choice in choices) or 1.0
    while (point := _next_point(choices, limit, unit_s)) is not None:
        assert not points or point.recompute_s < points[-1].recompute_s, f"no progress: {point}"
        points.append(point)
        limit = point.recompute_s / unit_s - TIME_STEP
    return tuple(points)


def _next_point(
    choices: Sequence[LayerTensor], limit: float, unit_s: float
) -> BalancedPoint | None:
    """The point with the fewest bytes whose time is at most ``limit`` units; None when none is."""
    model = exact_model("balanced")
    keep = [model.add_var(f"keep_{c.name}", var_type="B") for c in choices]
    redo = [model.add_var(f"redo_{c.name}", var_type="B") for c in choices]
    for i, choice in enumerate(choices):
        if choice.needed:
            model.add_constr(redo[i] + keep[i] >= 1, f"need_{choice.name}")
        if choice.kept:
            model.add_constr(keep[i] == 1, f"kept_{choice.name}")
        for j in choice.inputs:
            model.add_constr(redo[i] <= keep[j] + redo[j], f"input_{choice.name}_{j}")
    unit_bytes = float(max(choice.size_bytes for choice in choices)) or 1.0
    size = weighted([c.size_bytes / unit_bytes for c in choices], keep)
    time = weighted([c.seconds / unit_s for c in choices], redo)
    if math.isfinite(limit):
        if limit < 0:
            return None
        model.add_constr(time <= limit, "faster")
    model.objective = size
    status = solver.solve(model)
    if status is SolveStatus.INFEASIBLE:
        return None
    assert status is SolveStatus.OPTIMAL, f"balanced frontier: {status}"
    model.add_constr(size <= float(model.objective_value) + TIME_STEP, "smallest")
    model.objective = time
    status = solver.solve(model)
    assert status is SolveStatus.OPTIMAL, f"balanced frontier: {status}"
    redone = [solver.integer_value(r) for r in redo]
    kept = [solver.integer_value(k) for k in keep]
    return BalancedPoint(
        kept_bytes=sum(c.size_bytes for c, k in zip(choices, kept, strict=True) if k),
        recompute_s=sum(c.seconds for c, r in zip(choices, redone, strict=True) if r),
        recomputed=tuple(c.name for c, r in zip(choices, redone, strict=True) if r),
    )
