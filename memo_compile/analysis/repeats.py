"""Tandem repeats of a token sequence, and the rotation at which to cut them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memo_compile.analysis.structure import Tape

_MAX_ATTEMPTS = 200
"""Most candidates that are verified per segment; few repeats of tokens fail in practice."""

_ROTATION_FINALISTS = 3
"""Most rotations whose isomorphism is checked, best border first; a check is linear in the run."""

_WORTH_A_UNIT = 2
"""A unit is given up for a better border only if the old one costs more than this many times it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRun:
    """A range of equal tokens at a distance: ``tokens[i] == tokens[i + period]`` inside it."""

    start: int
    end: int
    period: int

    @property
    def count(self) -> int:
        """Whole periods that fit."""
        return (self.end - self.start) // self.period


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """``count`` isomorphic ranges of ``period`` nodes, back to back, each fed by the previous."""

    start: int
    period: int
    count: int
    border_bytes: int
    """Bytes that cross from the first instance into the second."""

    @property
    def end(self) -> int:
        """One past the last node."""
        return self.start + self.period * self.count

    def ranges(self) -> list[tuple[int, int]]:
        """The half-open range of each instance, in order."""
        return [
            (self.start + index * self.period, self.start + (index + 1) * self.period)
            for index in range(self.count)
        ]


def token_runs(tokens: NDArray[np.int64], offset: int = 0) -> list[TokenRun]:
    """Maximal runs of two periods or more, each of at least 2 nodes. Quadratic: 10,000 in 0.2 s."""
    runs = []
    for period in range(2, len(tokens) // 2 + 1):
        differs = np.flatnonzero(tokens[:-period] != tokens[period:])
        starts = np.concatenate(([0], differs + 1))
        ends = np.concatenate((differs, [len(tokens) - period]))
        for index in np.flatnonzero(ends - starts >= period):
            start, end = int(starts[index]) + offset, int(ends[index]) + period + offset
            runs.append(TokenRun(start=start, end=end, period=period))
    return runs


def best_repeat(
    tape: Tape, start: int, end: int, prefers_cut: Callable[[int], bool]
) -> Repeat | None:
    """The verified repeat that covers most of the range; of equals, the shortest period.

    A matrix product in each instance depends on one in the instance before it. ``prefers_cut``
    breaks ties between rotations: it is true for positions where a module layer begins.
    """
    runs = [
        run
        for run in token_runs(tape.tokens[start:end], start)
        if tape.num_matmuls(run.start, run.start + run.period) > 0
    ]
    runs.sort(key=lambda run: (-run.count * run.period, run.period, run.start))
    for run in runs[:_MAX_ATTEMPTS]:
        rotations = _rotations(tape, run, prefers_cut)[:_ROTATION_FINALISTS]
        parts = (_isomorphic_part(tape, run, rotation, border) for rotation, border in rotations)
        found = [repeat for repeat in parts if repeat is not None]
        if found:
            return max(found, key=lambda repeat: repeat.count)
    return None


def _rotations(
    tape: Tape, run: TokenRun, prefers_cut: Callable[[int], bool]
) -> list[tuple[int, int]]:
    """Rotations that keep the most instances, best first, each with its border's bytes.

    A rotation with one instance fewer wins only when at least two are left and its border is
    ``_WORTH_A_UNIT`` times cheaper.
    """
    slack = (run.end - run.start) % run.period
    loses_one = run.count > 2
    priced = []
    for rotation in range(run.period if loses_one else slack + 1):
        origin = run.start + rotation
        priced.append((tape.border_bytes(origin + run.period, origin), rotation))
    cheapest = min(priced)[0]
    cheapest_full = min(priced[: slack + 1])[0]
    if cheapest_full <= cheapest * _WORTH_A_UNIT:
        priced = priced[: slack + 1]
    priced.sort()

    def tie_break(rotation: int) -> tuple[int, bool, int]:
        origin = run.start + rotation
        cut = origin + run.period
        return tape.broken_chains(cut, origin), not prefers_cut(cut), rotation

    ties = [rotation for border, rotation in priced if border == priced[0][0]]
    rest = [(rotation, border) for border, rotation in priced[len(ties) :]]
    return [(rotation, priced[0][0]) for rotation in sorted(ties, key=tie_break)] + rest


def _isomorphic_part(tape: Tape, run: TokenRun, rotation: int, border: int) -> Repeat | None:
    """The longest stretch of isomorphic instances at this rotation, each fed by the one before."""
    first = run.start + rotation
    count = (run.end - first) // run.period
    forms = [
        tape.canonical(first + index * run.period, first + (index + 1) * run.period)
        for index in range(count)
    ]
    best_start, best_count = 0, 1
    begin = 0
    for index in range(1, count + 1):
        joins = index < count and forms[index] == forms[begin]
        low = first + index * run.period
        if not joins or not tape.feeds(low - run.period, low, low + run.period):
            if index - begin > best_count:
                best_start, best_count = begin, index - begin
            begin = index
    if best_count < 2:
        return None
    start = first + best_start * run.period
    return Repeat(start=start, period=run.period, count=best_count, border_bytes=border)
