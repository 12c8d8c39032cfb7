"""The backward of one step while it runs: as a whole, or in parts between which autograd works.

Between two parts the user's code may run (hooks, an optimizer, other graphs). What it writes into
that later parts read is seen before they go on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memo_runtime.current import current
from memo_runtime.instructions import Instruction, Running
from memo_runtime.leases import Lease


class StepError(RuntimeError):
    """A backward was called that its forward's plan does not cover."""


@dataclass(slots=True, kw_only=True)
class BackwardRun:
    """One backward of one step; ``rest`` ends it, and so does whatever is raised in it."""

    plan: Any
    """The StepPlan of its forward."""
    lease: Lease
    running: Running
    calls: tuple[Instruction, ...]
    """Those of the plan's backward, and in a group the copies that stand among them."""
    keeps_graph: bool
    """The backward may run again: the frame is not given back."""
    snapshot: torch.Tensor | None
    """The frame as it was, where ``keeps_graph``; a group has its own."""
    _done: int = 0
    """How many of the half's calls have run."""
    _left: set[int] = field(default_factory=set)
    """Positions of the results that were taken."""
    _seen: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """What later parts read of the user's tensors, and their versions when the last part ended."""

    @property
    def is_over(self) -> bool:
        """True once the frame is given back, or restored."""
        return self._done < 0

    def part(self, results: Sequence[int], read: Sequence[int] = ()) -> list[Any]:
        """These results, by position, when nothing of the step uses them any more.

        Neither the inputs that they are gradients of nor those at the positions ``read`` are read
        after it. Raises StepError: the user wrote into what the step still reads.
        """
        half = self.plan.backward
        ends = [half.ready[position] for position in results]
        ends += [half.read_until[position] for position in (*results, *read)]
        self._run_to(max(ends, default=0))
        found = [self._take(position) for position in results]
        self._seen = self._still_read()
        return found

    def rest(self, results: Sequence[int]) -> list[Any]:
        """These results, when all calls have run; the step has ended."""
        self._run_to(len(self.calls))
        found = [self._take(position) for position in results]
        lease, group, counted = self.lease, self.lease.group, self.running.counted
        if group is not None:
            self.running.leave(self.plan.backward)
        self._end()
        lease.ran = True
        if group is None:
            self.plan.on_step_end(lease.counted + counted)
        else:
            group.count(lease.counted + counted)
        return found

    def abandon(self) -> None:
        """End a backward that nobody goes on with, because of an exception between two parts."""
        if not self.is_over:
            self._end()

    def _run_to(self, end: int) -> None:
        if self.is_over:
            raise StepError("memo: this backward has ended, because a part of it failed")
        if any(tensor._version != version for tensor, version in self._seen):
            self._end()
            raise StepError(
                "memo: a hook wrote in place into what the rest of this backward reads (a "
                "parameter whose own gradient is still to come, an input or a result of the step). "
                "Write into a parameter in its own hook only, or set early_gradients=False."
            )
        try:
            for call in self.calls[self._done : end]:
                call.execute(self.running)
        except BaseException:
            self.running.lease.settle_ranks()  # a group's frame may go on to serve other members
            self._end()
            raise
        finally:
            current.views = ()
            current.inputs = {}
        self._done = max(self._done, end)

    def _take(self, position: int) -> Any:
        """Result ``position``, which the step lets go of unless another result is the same."""
        results, env = self.plan.backward.results, self.running.env
        register = results[position]
        if register is None:
            return None
        value = env[register]
        self._left.add(position)
        if all(at in self._left for at, other in enumerate(results) if other == register):
            env[register] = None
        return value

    def _still_read(self) -> list[tuple[torch.Tensor, int]]:
        """The user's tensors that calls to come read, and their versions."""
        half, env, lease = self.plan.backward, self.running.env, self.lease
        found = [env[register] for register, until in half.guarded if until > self._done]
        behind = [tensor for tensor, _ in lease.checked]
        until = half.checked_until
        found += [
            tensor
            for at, tensor in enumerate(behind)
            if at >= len(until) or until[at] > self._done  # the others are results of the step
        ]
        return [(value, value._version) for value in found if isinstance(value, torch.Tensor)]

    def _end(self) -> None:
        """Give the frame back, or put it as it was."""
        lease, self._done, self._seen = self.lease, -1, []
        if self.snapshot is not None:
            lease.settle()  # before a reload in flight can overwrite what is restored
            lease.restore(self.snapshot)
        elif not self.keeps_graph:
            lease.release()
        lease.running = False
        self.running.env.clear()  # and the lease, if a checkpoint has given its handle away
