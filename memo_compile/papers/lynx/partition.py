"""Splits layers over pipeline stages so that the slowest stage is as fast as possible.

Source: Lynx (arXiv 2406.08756), section 5. ``split_exact`` is a dynamic programme; ``split_ranges``
is the same for layers that differ and stage times that are expensive to find. ``split_paper`` is
the paper's greedy with two corrections: it starts from a split that fits, and when the fastest
stage cannot take a layer it offers the layer to the next-fastest.
"""

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memo_compile.papers.lynx.fields import Number
from memo_compile.papers.lynx.lynx_instance import StageTimes
from memo_compile.planners.solver import SolveStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Layers of each stage and the time of the slowest; or, when infeasible, what forbids it."""

    status: SolveStatus
    layers: tuple[int, ...] = ()
    slowest: Number = 0
    conflict: str = ""


def split_exact(table: StageTimes) -> Split:
    """Finds the split with the least slowest stage, then the least sum; O(stages x layers^2)."""
    if conflict := find_conflict(table):
        return Split(status=SolveStatus.INFEASIBLE, conflict=conflict)
    split = _fastest(
        table.num_layers, len(table.rows), lambda s, begin, end: _time(table, s, end - begin)
    )
    if split is None:
        conflict = (
            "num_layers: no combination of the layer counts that fit adds up to "
            f"{table.num_layers}; some stages run out of memory in the middle of their range"
        )
        return Split(status=SolveStatus.INFEASIBLE, conflict=conflict)
    return _checked(table, SolveStatus.OPTIMAL, split)


RangeTime = Callable[[int, int, int], Number | None]
"""Time of a stage with layers ``[begin, end)``, by (stage, begin, end); None = out of memory."""


def split_ranges(
    num_layers: int, num_stages: int, least: RangeTime, exact: RangeTime
) -> tuple[int, ...] | None:
    """Returns the layers of each stage of ``split_exact``'s best split; None = nothing fits.

    ``least`` is a cheap lower bound of ``exact``, which is called for few ranges. The best split by
    exact times, where they are known, and bounds elsewhere is found; the exact times of its ranges
    are looked up, the last stage first; and so on, until all ranges of the best split are exact.
    Then no split is better, since no range of another takes less than its bound.
    """
    exact_times: dict[tuple[int, int, int], Number | None] = {}

    def time_of(stage: int, begin: int, end: int) -> Number | None:
        key = (stage, begin, end)
        return exact_times[key] if key in exact_times else least(*key)

    while (split := _fastest(num_layers, num_stages, time_of)) is not None:
        ends = itertools.accumulate(split)
        ranges = (
            (s, end - count, end) for s, (count, end) in enumerate(zip(split, ends, strict=True))
        )
        bounded = [key for key in ranges if key not in exact_times]
        if not bounded:
            return split
        for key in reversed(bounded):
            exact_times[key] = exact(*key)
            if exact_times[key] is None:  # does not fit: this split is none
                break
    return None


def _fastest(num_layers: int, num_stages: int, time_of: RangeTime) -> tuple[int, ...] | None:
    """Finds the split with the least slowest stage, then the least sum; None = nothing fits."""
    fastest = _best_split(num_layers, num_stages, time_of, max)
    if fastest is None:
        return None
    ends = list(itertools.accumulate(fastest))
    times = [time_of(s, end - fastest[s], end) for s, end in enumerate(ends)]
    slowest = max(time for time in times if time is not None)

    def not_slower(stage: int, begin: int, end: int) -> Number | None:
        time = time_of(stage, begin, end)
        return None if time is None or time > slowest else time

    split = _best_split(num_layers, num_stages, not_slower, operator.add)
    assert split is not None, f"no split at {slowest}, but one was found"
    return split


def _best_split(
    num_layers: int,
    num_stages: int,
    time_of: RangeTime,
    combine: Callable[[Number, Number], Number],
) -> tuple[int, ...] | None:
    """Finds the split of the least combined time, or None; at ties early stages have fewer layers.

    Dynamic programme over stages; ``combine`` must not decrease in its first argument.
    """
    # Layers that the stages so far hold -> their least combined time, and the layers of each.
    best: dict[int, tuple[Number, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(num_stages):
        best_with_stage: dict[int, tuple[Number, tuple[int, ...]]] = {}
        for begin, (time_so_far, layers_of) in best.items():
            for end in range(begin, num_layers + 1):
                time = time_of(stage, begin, end)
                if time is None:
                    continue
                cost = combine(time_so_far, time)
                other = best_with_stage.get(end, (math.inf, ()))
                if cost <= other[0]:
                    best_with_stage[end] = min(other, (cost, (*layers_of, end - begin)))
        best = best_with_stage
    return best[num_layers][1] if num_layers in best else None


def split_paper(table: StageTimes) -> Split:
    """Runs the paper's greedy: while the slowest stage gets faster, it gives away a layer.

    It starts from equal stages, or, where one of these does not fit, from the nearest that fit.
    """
    least, remainder = divmod(table.num_layers, len(table.rows))
    layers_of = [least + (s < remainder) for s in range(len(table.rows))]
    if any(_time(table, s, n) is None for s, n in enumerate(layers_of)):
        nearest = split_exact(_distances(table, layers_of))
        if nearest.status is SolveStatus.INFEASIBLE:
            return nearest
        layers_of = list(nearest.layers)
    while _improve(table, layers_of):
        pass
    return _checked(table, SolveStatus.FEASIBLE, layers_of)


def find_conflict(table: StageTimes) -> str:
    """Says why no split exists, by the smallest reason; empty when none was found."""
    least = most = 0
    for s, row in enumerate(table.rows):
        fitting = [layers for layers, time in enumerate(row) if time is not None]
        if not fitting:
            return f"stage_times[{s}]: stage {s} runs out of memory with every number of layers"
        least, most = least + fitting[0], most + fitting[-1]
    if most < table.num_layers:
        return f"num_layers: {table.num_layers} layers, but all stages together hold {most}"
    if least > table.num_layers:
        return f"num_layers: {table.num_layers} layers, but the stages need at least {least}"
    return ""


def _time(table: StageTimes, stage: int, layers: int) -> Number | None:
    row = table.rows[stage]
    return row[layers] if 0 <= layers < len(row) else None


def _distances(table: StageTimes, counts: Sequence[int]) -> StageTimes:
    """Returns the table with distances from ``counts`` as times: its optimum fits, and is near."""
    rows = tuple(
        tuple(None if time is None else abs(i - count) for i, time in enumerate(row))
        for row, count in zip(table.rows, counts, strict=True)
    )
    return StageTimes(rows=rows, num_layers=table.num_layers)


def _improve(table: StageTimes, layers_of: list[int]) -> bool:
    """Moves one layer, in place, so that the slowest stage gets faster; False: none does."""
    times = _times(table, layers_of)
    by_time = sorted(range(len(times)), key=lambda s: (times[s], s))
    source, slowest = by_time[-1], max(times)
    shrunk = _time(table, source, layers_of[source] - 1)
    if shrunk is None or shrunk >= slowest:
        return False
    for target in by_time[:-1]:
        grown = _time(table, target, layers_of[target] + 1)
        if grown is not None and grown < slowest:
            layers_of[source] -= 1
            layers_of[target] += 1
            return True
    return False


def _times(table: StageTimes, layers_of: Sequence[int]) -> list[Number]:
    """Returns each stage's time, read from the table; all of them fit."""
    entries = (_time(table, s, n) for s, n in enumerate(layers_of))
    times = [time for time in entries if time is not None]
    assert len(times) == len(table.rows), f"{layers_of} runs out of memory"
    return times


def _checked(table: StageTimes, status: SolveStatus, layers_of: Sequence[int]) -> Split:
    """Returns the split with the time of its slowest stage."""
    assert sum(layers_of) == table.num_layers, f"{layers_of} is not {table.num_layers} layers"
    return Split(status=status, layers=tuple(layers_of), slowest=max(_times(table, layers_of)))
