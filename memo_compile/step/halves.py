"""Which half of a step runs which call.

A whole graph has two halves, ``F B``. A group of n live steps has ``F0 F1 .. Fn-1 Bn-1 .. B0``, a
pipeline's stage ``F0 F1 B0 F2 B1 ..``: each runs when autograd calls it, and all of them are one
step program. The order is that of ``Problem.halves`` and nothing else, so that another order needs
only another list here.
"""

import bisect
from collections.abc import Iterator, Sequence

from memo_compile.step.problem import CallKind, Phase, Problem, StepCall

HalfKey = tuple[Phase, int]
"""Phase and member."""

RUNS = (CallKind.RUN, CallKind.RECOMPUTE, CallKind.ISSUE, CallKind.COMM_WAIT)
"""Calls that run a region or a collective: only the half of their own member has their inputs."""


def half_keys(problem: Problem) -> tuple[HalfKey, ...]:
    """Returns the halves in the order in which they run; a step without any listed has two."""
    if not problem.halves:
        return ((Phase.FORWARD, 0), (Phase.BACKWARD, 0))
    return tuple((half.phase, half.member) for half in problem.halves)


def halves_of_calls(problem: Problem) -> tuple[int, ...]:
    """Returns for each call the index of the half that runs it.

    Copies and waits stand in gaps between regions. In a gap between two halves the earlier half
    issues the copies, so that they run beside the user's code between the halves; the waits
    behind the last issued copy belong to the later half.
    """
    keys = half_keys(problem)
    index_of = {key: at for at, key in enumerate(keys)}
    halves: list[int] = []
    gap: list[StepCall] = []  # copies and waits behind the last region, which half ``earlier`` ran
    earlier = half = 0
    phase = member = None
    for call in problem.calls:
        if call.kind not in RUNS:
            gap.append(call)
            continue
        if call.phase is not phase or call.member != member:
            phase, member = call.phase, call.member
            half = index_of[phase, member]
        if gap:
            halves += [half] * len(gap) if earlier == half else _of_gap(gap, keys, earlier, half)
            gap = []
        halves.append(half)
        earlier = half
    return (*halves, *_of_gap(gap, keys, earlier, len(keys) - 1))


def _of_gap(
    gap: Sequence[StepCall], keys: Sequence[HalfKey], earlier: int, later: int
) -> Iterator[int]:
    """Yields the half of each copy and wait between regions of two halves.

    The earlier half ends with the last copy that is issued; where it is a forward and the later
    one a backward, with the last copy or wait of phase FORWARD.
    """
    turns = keys[earlier][0] is Phase.FORWARD and keys[later][0] is Phase.BACKWARD
    ends = (call.phase is Phase.FORWARD if turns else call.copy is not None for call in gap)
    last = max((at for at, is_end in enumerate(ends) if is_end), default=-1)
    for at in range(len(gap)):
        yield earlier if at <= last else later


def half_starts(problem: Problem) -> tuple[int, ...]:
    """Returns for each half the index of its first call, and behind them the number of calls."""
    of_calls = halves_of_calls(problem)
    return tuple(bisect.bisect_left(of_calls, half) for half in range(len(half_keys(problem)) + 1))
