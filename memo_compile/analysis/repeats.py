"""Finds tandem repeats in a token sequence, and the rotation at which to cut them."""

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
"""A rotation with one instance fewer is taken only if its border is so many times cheaper."""


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
    """Returns maximal runs of two periods or more, of 2 nodes or more. Cost: 10,000 in 0.2 s."""
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
    """Returns the verified repeat that covers most of the range; of equals, the shortest period.

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
        repeats = [repeat for repeat in parts if repeat is not None]
        if repeats:
            return max(repeats, key=lambda repeat: repeat.count)
    return None


def _rotations(
    tape: Tape, run: TokenRun, prefers_cut: Callable[[int], bool]
) -> list[tuple[int, int]]:
    """Returns (rotation, bytes that cross its border), the narrowest border first.

    A run may be cut at any of ``period`` rotations. The first ``slack + 1`` of them keep all its
    instances; the others lose one, and are considered only if two are left and their border is
    ``_WORTH_A_UNIT`` times cheaper. Example: ``abcabcab`` keeps 2 instances at rotations 0, 1, 2.
    """
    slack = (run.end - run.start) % run.period
    may_lose_one = run.count > 2
    borders = []
    for rotation in range(run.period if may_lose_one else slack + 1):
        origin = run.start + rotation
        borders.append((tape.border_bytes(origin + run.period, origin), rotation))
    keeping_all = borders[: slack + 1]
    if min(keeping_all)[0] <= min(borders)[0] * _WORTH_A_UNIT:
        borders = keeping_all  # none is so cheap that it is worth an instance
    borders.sort()

    def tie_break(rotation: int) -> tuple[int, bool, int]:
        origin = run.start + rotation
        cut = origin + run.period
        return tape.broken_chains(cut, origin), not prefers_cut(cut), rotation

    narrowest = borders[0][0]
    ties = [rotation for border, rotation in borders if border == narrowest]
    wider = [(rotation, border) for border, rotation in borders[len(ties) :]]
    return [(rotation, narrowest) for rotation in sorted(ties, key=tie_break)] + wider


def _isomorphic_part(tape: Tape, run: TokenRun, rotation: int, border: int) -> Repeat | None:
    """Returns the longest chain of isomorphic instances at this rotation, each fed by the last."""
    first = run.start + rotation
    count = (run.end - first) // run.period
    forms = [
        tape.canonical(first + index * run.period, first + (index + 1) * run.period)
        for index in range(count)
    ]
    best_chain, best_count = 0, 1
    chain = 0  # index of the instance with which the present chain begins
    for index in range(1, count + 1):
        is_alike = index < count and forms[index] == forms[chain]
        low = first + index * run.period
        if not is_alike or not tape.feeds(low - run.period, low, low + run.period):
            if index - chain > best_count:
                best_chain, best_count = chain, index - chain
            chain = index
    if best_count < 2:
        return None
    start = first + best_chain * run.period
    return Repeat(start=start, period=run.period, count=best_count, border_bytes=border)
