"""Plans whose kernels take less memory beside an arena that stays.

What a recomputation adds to the most of such memory, the arena loses in all calls: most of it late
in the backward, when most gradients are there. So the layers whose backward comes last copy what
the others recompute.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from memo_compile.planners.move_rules import facts_of
from memo_compile.planners.policy.modes import ModeCost, outside_room, quickest
from memo_compile.step.movable import Mode, MovableStep, Moves

MAX_LEVELS = 4
"""For so many amounts of memory a plan is made whose recomputations add at most that."""


def less_outside(
    step: MovableStep, modes: Sequence[Sequence[ModeCost]], found: Sequence[Moves]
) -> Iterator[Moves]:
    """``found`` with other modes for layers whose recomputation adds too much; new ones only.

    Such a layer takes the quickest of its ``modes`` that keep least and add less.
    """
    known = set(found)
    added = list(_added_bytes(step, modes))
    amounts = sorted({own for layer in added for own in layer.values()})[:-1]
    for some in np.array_split(amounts, MAX_LEVELS):
        if not len(some):
            continue
        inside = [
            quickest([cost for cost in own if layer[cost.mode] <= some[0]], step.costs)
            for own, layer in zip(modes, added, strict=True)
        ]
        for moves in found:
            changed = tuple(
                other.mode if other is not None and layer.get(mode, 0) > some[0] else mode
                for mode, other, layer in zip(moves.modes, inside, added, strict=True)
            )
            less = replace(moves, modes=changed)
            if less not in known:
                known.add(less)
                yield less


def _added_bytes(
    step: MovableStep, modes: Iterable[Iterable[ModeCost]]
) -> Iterator[dict[Mode, float]]:
    """Per layer what each of its modes adds to the memory of kernels."""
    room = outside_room(step)
    for at, some in zip(facts_of(step).backward_at, modes, strict=True):
        yield {
            cost.mode: max(0, max(cost.recompute_outside, default=0) - room[at]) for cost in some
        }
