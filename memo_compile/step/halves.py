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
"""Calls that run a region, or talk to other ranks: in the half of their member, which alone has
its inputs."""


def half_keys(problem: Problem) -> tuple[HalfKey, ...]:
    """The halves in the order in which they run; a step on paper has two."""
    if not problem.halves:
        return ((Phase.FORWARD, 0), (Phase.BACKWARD, 0))
    return tuple((half.phase, half.member) for half in problem.halves)


def halves_of_calls(problem: Problem) -> tuple[int, ...]:
    """Per call the index of the half that runs it.

    Copies and waits stand between regions. Where these are of two halves, the earlier one begins
    the copies, so that they run beside what the user's code does in between; what stands behind
    the last of them is left to the later one.
    """
    keys = half_keys(problem)
    index_of = {key: at for at, key in enumerate(keys)}
    found: list[int] = []
    gap: list[StepCall] = []
    before = own = 0
    phase = member = None
    for call in problem.calls:
        if call.kind not in RUNS:
            gap.append(call)
            continue
        if call.phase is not phase or call.member != member:
            phase, member = call.phase, call.member
            own = index_of[phase, member]
        if gap:
            found += [own] * len(gap) if before == own else _of_gap(gap, keys, before, own)
            gap = []
        found.append(own)
        before = own
    last = len(keys) - 1
    return (*found, *(_of_gap(gap, keys, before, last)))


def _of_gap(
    gap: Sequence[StepCall], keys: Sequence[HalfKey], before: int, own: int
) -> Iterator[int]:
    """The half of each copy and wait between regions of half ``before`` and of half ``own``.

    The earlier one ends with the last copy that is issued; where a backward follows a forward,
    with the last call of a forward.
    """
    turns = keys[before][0] is Phase.FORWARD and keys[own][0] is Phase.BACKWARD
    ends = (call.phase is Phase.FORWARD if turns else call.copy is not None for call in gap)
    last = max((at for at, is_end in enumerate(ends) if is_end), default=-1)
    for at in range(len(gap)):
        yield before if at <= last else own


def half_starts(problem: Problem) -> tuple[int, ...]:
    """Per half the index of its first call, and the number of calls as last."""
    of_calls = halves_of_calls(problem)
    return tuple(bisect.bisect_left(of_calls, half) for half in range(len(half_keys(problem)) + 1))
