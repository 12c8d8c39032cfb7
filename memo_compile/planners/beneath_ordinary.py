"""Offsets for which the arena and the ordinary memory beside it are low together.

A step's peak on a CPU is the largest sum, over its calls, of the arena up to its highest byte that
is still needed and of the ordinary memory during the call (``step.residency``). The lowest arena
alone may hold a buffer at its top while a convolution takes its work space. Here both share one
column, ordinary memory coming down from the top and the arena growing from the bottom. It is placed
upside down, because then ordinary memory is a wall of known height to stand on.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from memo_compile.planners.placement import Buffer, Placement, PlacementProblem
from memo_compile.step.problem import ALIGNMENT_BYTES, ArenaBuffer, Problem, align, call_starts
from memo_compile.step.residency import ordinary_bytes


def with_walls(rectangles: PlacementProblem, problem: Problem) -> PlacementProblem:
    """The buffers of ``problem``, and below them what its ordinary memory has been at most so far.

    Pages that went do not come back in the same step, hence "so far".
    """
    most = list(accumulate(ordinary_bytes(problem).most, max))
    starts = call_starts(problem)
    rises = [at for at in range(len(most)) if at == 0 or most[at] > most[at - 1]]
    walls = [
        Buffer(
            id=f"ordinary memory/{at}",
            lower=starts[at],
            upper=starts[until],
            size=align(most[at] - most[0]),
            alignment=ALIGNMENT_BYTES,
            offset=0,
        )
        for at, until in pairwise([*rises, len(most)])
        if starts[at] < starts[until]
    ]
    return replace(rectangles, buffers=(*rectangles.buffers, *walls))


def offsets_from_above(buffers: Sequence[ArenaBuffer], placed: Placement) -> dict[str, int]:
    """``placed``, whose offsets count from the top, turned over; each buffer then sinks.

    The lowest comes first, and stands on those that live together with it. Cost: quadratic.
    """
    with_bytes = [buffer for buffer in buffers if buffer.size_bytes]
    sizes = np.array([align(buffer.size_bytes) for buffer in with_bytes], dtype=np.int64)
    births = np.array([buffer.start for buffer in with_bytes], dtype=np.int64)
    deaths = np.array([buffer.end for buffer in with_bytes], dtype=np.int64)
    tops = np.array([placed.offsets[buffer.id] for buffer in with_bytes], dtype=np.int64)
    order = np.argsort(-(tops + sizes), kind="stable")
    sizes, births, deaths = sizes[order], births[order], deaths[order]
    ends = np.zeros(len(with_bytes), dtype=np.int64)
    offsets = {buffer.id: 0 for buffer in buffers}
    for at, index in enumerate(order):
        meets = (births[:at] < deaths[at]) & (deaths[:at] > births[at])
        offset = int(ends[:at][meets].max(initial=0))
        ends[at] = offset + sizes[at]
        offsets[with_bytes[index].id] = offset
    return offsets
