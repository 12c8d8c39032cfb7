"""Which forwards of a graph the user's checkpoints (``torch.utils.checkpoint``) run again.

    forward   F0 dropped, F1 dropped, .., Fn dropped
    backward  Fn Bn, .., F1 B1, F0 B0                   each pair is a step by itself

All of this is a round. While one of its steps runs, the inputs of those that are still to come are
there, and the gradients of those that have run. With ``use_reentrant=True`` the first forwards run
without a graph, unseen: then the whole round is known once it is over.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref


class CheckpointedForward(NamedTuple):
    """One forward, or several in one checkpoint."""

    keys: tuple[int | None, ...]
    """Of each forward ``step_watch.first_key``: which module it is of."""
    parameters: tuple[ref[Any], ...]
    inputs: Mapping[int, int]
    """Storage -> bytes of what they were given; the checkpoint keeps it."""


@dataclass(slots=True)
class CheckpointRound:
    """What was seen of the round that runs."""

    dropped: tuple[CheckpointedForward, ...] = ()
    """Those that autograd let go of without a backward, and that have not been run again yet."""
    num_dropped: int = 0
    """How many these were before the first of them was run again."""
    _unseen: tuple[CheckpointedForward, ...] = ()
    """Those that ran in the backward, and had not been seen before."""

    def begin(self, key: int | None, *, in_backward: bool) -> tuple[CheckpointedForward, ...]:
        """Notes that a step begins with the forward of ``key``.

        Returns the round that ran unseen, if its first forward comes again: then it is over.
        """
        if not in_backward and any(key in step.keys for step in self.dropped):
            self.dropped, self.num_dropped = (), 0  # the backward of the round before did not come
        if in_backward and any(key in step.keys for step in self._unseen):
            last_round, self._unseen = self._unseen, ()
            return last_round
        return ()

    def is_open(self, *, in_backward: bool) -> bool:
        """True where a step that begins, in the backward or before it, is not the round's first."""
        return bool(self.dropped or (in_backward and self._unseen))

    def is_whole(self, *, in_backward: bool) -> bool:
        """True where the first of those that were dropped is run again."""
        return in_backward and 0 < self.num_dropped == len(self.dropped)

    def end(self, step: CheckpointedForward, *, has_backward: bool, in_backward: bool) -> None:
        """Notes that ``step`` has ended, which began in a backward or not."""
        if None in step.keys:  # without parameters nothing tells its forwards apart
            return
        others = tuple(each for each in self.dropped if set(each.keys).isdisjoint(step.keys))
        if not has_backward and not in_backward:
            self.dropped = (*others, step)
            self.num_dropped = len(self.dropped)
        elif has_backward:  # else it is run once more, by a checkpoint inside of another
            if in_backward and len(others) == len(self.dropped):  # nobody saw it being dropped
                self._unseen = (*self._unseen, step)
            self.dropped = others
